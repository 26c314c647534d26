"""The package triton, or, where it cannot be imported, what stands in for it: kernels are defined then and cannot run,
which a machine without a GPU does not need."""

from __future__ import annotations

from typing import Any


class _Absent:
    """Any attribute is this again, and as a decorator it changes nothing."""

    JITFunction = type("JITFunction", (), {})

    def __getattr__(self, name: str) -> _Absent:
        return self

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return arguments[0] if arguments else self


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = _Absent()

HAS_TRITON = not isinstance(triton, _Absent)
