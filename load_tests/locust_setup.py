"""Imports locust without its patches to the standard library. Import this before anything of locust.

locust patches sockets and threads for its own HTTP client, which is not used here; gRPC and asyncio would suffer.
"""

from __future__ import annotations

import os

os.environ.setdefault("LOCUST_SKIP_MONKEY_PATCH", "1")

import gevent.monkey
import locust

if gevent.monkey.is_module_patched("threading"):
    raise RuntimeError(
        "locust was imported before load_tests and has patched the standard library, which the gRPC client cannot "
        "bear: set LOCUST_SKIP_MONKEY_PATCH=1 in the environment"
    )

__all__ = ["locust"]
