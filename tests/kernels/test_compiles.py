"""The kernels compile for the GPU they are meant for, whether or not one is here."""

from __future__ import annotations

import re

import pytest

from tests.kernels.compile_only import ROOT, compiled_kernels
from tests.support.scale import SCALE

pytest.importorskip("triton.backends.nvidia", reason="this build of Triton cannot compile for NVIDIA GPUs")

# The files whose kernels a module launches; the last one all the others.
FILES = {
    "model_launches": [
        "attention_merge",
        "attention_schedule",
        "context_write",
        "conv_heads",
        "delta_chunks",
        "grouped_conv",
        "invariant_attention",
        "invariant_linear",
        "markov_step",
        "moe",
        "moe_routing",
        "paged_attention",
        "qk_norm_rope_write",
        "quantised_moe",
        "rms_norm",
        "selector_walk",
        "shared_prefix",
        "activation",
    ],
    "quantised_launches": ["fp8_activations", "quantised_linear"],
    "test_timestamp": ["timestamp"],
}
KERNELS = {
    path.stem: set(re.findall(r"^ *def (_\w+_kernel)\(", path.read_text(encoding="utf-8"), re.MULTILINE))
    for path in (ROOT / "kernels/dflash_kernels").glob("*.py")
}
FILES["step_launches"] = sorted(KERNELS.keys() - {file for files in FILES.values() for file in files})


# Those of the models take two minutes to compile on a fresh machine.
MODULES = [module for module in FILES if module != "model_launches" or SCALE >= 4]


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> dict[str, set[str]]:
    """The kernels of each module that a test of this run asks for, by one process, of which each would take two seconds
    to import torch."""
    asked = {item.name for item in request.session.items if item.path == request.path}
    return compiled_kernels(
        [f"tests.kernels.{module}" for module in MODULES if any(f"[{module}]" in one for one in asked)]
    )


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_every_kernel_compiles_for_hopper(module: str, compiled: dict[str, set[str]]) -> None:
    expected = set().union(*(KERNELS[file] for file in FILES[module]))
    assert compiled[f"tests.kernels.{module}"] == expected != set()
