"""cuBLASLt, as far as choosing how a product is computed needs it: the ways that it proposes for a shape, and a product
by one of them.

torch takes cuBLAS's first proposal; the library has more of them for each shape, and ways to split the sum over the
inputs. It is the library that torch has loaded, called through ctypes: enums and structs are those of `cublasLt.h` of
version 13. A call that fails raises `CublasLtError`.
"""

from __future__ import annotations

import ctypes
import re
import weakref
from collections.abc import Iterator, Sequence
from ctypes import byref, c_float, c_int, c_int32, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p, sizeof
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

MAJOR_VERSION = 13
SUCCESS = 0
# cudaDataType, cublasComputeType_t, cublasOperation_t.
DATA_TYPES = {torch.float16: 2, torch.bfloat16: 14}
REAL_32F, COMPUTE_32F, TRANSPOSED = 0, 68, 1
# cublasLtMatmulDescAttributes_t.
DESC_TRANSA = 3
# cublasLtMatmulPreferenceAttributes_t. Alignments of A, B, C and D are four attributes.
PREF_WORKSPACE, PREF_REDUCTIONS, PREF_ALIGNMENTS = 1, 3, (5, 6, 7, 8)
# cublasLtReductionScheme_t: the sum's parts in the output's dtype in place, in float32, in the output's dtype.
NO_REDUCTION, IN_PLACE, IN_FLOAT32, IN_OUTPUT_TYPE = 0, 1, 2, 4
EVERY_REDUCTION = IN_PLACE | IN_FLOAT32 | IN_OUTPUT_TYPE
# cublasLtMatmulAlgoConfigAttributes_t, with the type of each.
CONFIG: dict[str, tuple[int, Any]] = {
    "algo": (0, c_int32), "tile": (1, c_uint32), "split": (2, c_int32), "reduction": (3, c_uint32),
    "swizzle": (4, c_uint32), "custom": (5, c_uint32), "stages": (6, c_uint32), "inner": (7, c_uint16),
    "cluster": (8, c_uint16),
}  # fmt: skip
# What addresses must be a multiple of, in bytes.
ALIGNMENT = 16
WORKSPACE_BYTES = 32 << 20
LIBRARY = re.compile(r"\s(/\S*/libcublasLt\.so\S*)$", re.MULTILINE)


class Algo(ctypes.Structure):
    """cublasLtMatmulAlgo_t."""

    _fields_ = [("data", c_uint64 * 8)]


class HeuristicResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algo", Algo), ("workspace_size", c_size_t), ("state", c_int), ("waves", c_float), ("reserved", c_int * 4),
    ]  # fmt: skip


# Arguments: p a pointer or handle, i an int or enum, n a size_t or uint64_t.
SIGNATURES = {
    "cublasLtCreate": "p",
    "cublasLtMatrixLayoutCreate": "pinnn",
    "cublasLtMatrixLayoutDestroy": "p",
    "cublasLtMatmulDescCreate": "pii",
    "cublasLtMatmulDescDestroy": "p",
    "cublasLtMatmulDescSetAttribute": "pipn",
    "cublasLtMatmulPreferenceCreate": "p",
    "cublasLtMatmulPreferenceDestroy": "p",
    "cublasLtMatmulPreferenceSetAttribute": "pipn",
    "cublasLtMatmulAlgoGetHeuristic": "pppppppipp",
    "cublasLtMatmulAlgoCheck": "pppppppp",
    "cublasLtMatmulAlgoConfigGetAttribute": "pipnp",
    "cublasLtMatmulAlgoConfigSetAttribute": "pipn",
    "cublasLtMatmul": "ppppppppppppppnp",
}
_TYPES = {"p": c_void_p, "i": c_int, "n": c_uint64}


class CublasLtError(RuntimeError):
    """The library is not there, or a call of it failed."""


@dataclass(frozen=True)
class Candidate:
    """A way to compute a product. workspace: bytes that it needs. config: its attributes by the names of `CONFIG`."""

    algo: Algo
    workspace: int
    config: dict[str, int]

    def describe(self) -> str:
        """What tells it from others, as "algo 66, tile 20, split 2"."""
        return ", ".join(f"{name} {value}" for name, value in self.config.items() if value or name == "algo")


@cache
def loaded_library() -> Any:
    """The cuBLASLt that this process has loaded, as torch does at its first product. Raises `CublasLtError`."""
    found = LIBRARY.search(Path("/proc/self/maps").read_text(encoding="utf-8"))
    if found is None:
        raise CublasLtError("this process has not loaded libcublasLt")
    library = ctypes.CDLL(found.group(1))
    for name, arguments in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = [_TYPES[kind] for kind in arguments], c_int
    library.cublasLtGetVersion.restype = c_size_t
    return library


class CublasLt:
    """A handle of the library for the current device. It is never given back, as torch's are not."""

    def __init__(self, library: Any) -> None:
        """Raises `CublasLtError` for another version, or where the device has no such handle."""
        self.library = library
        version = int(library.cublasLtGetVersion())
        # 130100 is 13.1.0, as 120 was the way to count before.
        if version // 10_000 != MAJOR_VERSION:
            raise CublasLtError(f"it is cuBLASLt {version}, and this was written for version {MAJOR_VERSION}")
        self.handle = c_void_p()
        self.call("cublasLtCreate", byref(self.handle))

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the library. Raises `CublasLtError` with its status."""
        status = getattr(self.library, name)(*arguments)
        if status != SUCCESS:
            raise CublasLtError(f"{name} gave status {status}")

    def made(self, owner: object, kind: str, *arguments: Any) -> c_void_p:
        """A descriptor of the library, which is destroyed after its owner."""
        made = c_void_p()
        self.call(f"cublasLt{kind}Create", byref(made), *arguments)
        weakref.finalize(owner, getattr(self.library, f"cublasLt{kind}Destroy"), made)
        return made


class Problem:
    """`x @ weight.T` of one shape, sums in float32. To the library, which counts columns first, it is
    `weight.T' @ x'` of the weight `[inputs, outputs]` and x `[inputs, rows]`, into `[outputs, rows]`."""

    def __init__(self, lt: CublasLt, outputs: int, inputs: int, rows: int, dtype: torch.dtype) -> None:
        """The product of x `[rows, inputs]` and a weight `[outputs, inputs]`, both in `dtype`."""
        self._lt = lt
        self._desc = lt.made(self, "MatmulDesc", COMPUTE_32F, REAL_32F)
        transposed = c_int32(TRANSPOSED)
        lt.call("cublasLtMatmulDescSetAttribute", self._desc, DESC_TRANSA, byref(transposed), sizeof(transposed))
        kind = DATA_TYPES[dtype]
        self._weight = lt.made(self, "MatrixLayout", kind, inputs, outputs, inputs)
        self._x = lt.made(self, "MatrixLayout", kind, inputs, rows, inputs)
        self._out = lt.made(self, "MatrixLayout", kind, outputs, rows, outputs)
        self._one, self._zero = c_float(1.0), c_float(0.0)

    @property
    def _layouts(self) -> tuple[c_void_p, c_void_p, c_void_p, c_void_p, c_void_p]:
        return self._desc, self._weight, self._x, self._out, self._out

    def candidates(self, count: int, reductions: int = EVERY_REDUCTION) -> list[Candidate]:
        """At most `count` ways, the library's first choice first. reductions: how parts of a sum may be added up."""
        lt = self._lt
        preference = lt.made(self, "MatmulPreference")
        attributes: list[tuple[int, Any]] = [(PREF_WORKSPACE, c_uint64(WORKSPACE_BYTES))]
        attributes += [
            (PREF_REDUCTIONS, c_uint32(reductions)),
            *((each, c_uint32(ALIGNMENT)) for each in PREF_ALIGNMENTS),
        ]
        for attribute, value in attributes:
            lt.call("cublasLtMatmulPreferenceSetAttribute", preference, attribute, byref(value), sizeof(value))
        results, found = (HeuristicResult * count)(), c_int()
        lt.call(
            "cublasLtMatmulAlgoGetHeuristic", lt.handle, *self._layouts, preference, count, results, byref(found)
        )  # fmt: skip
        return [self._candidate(each) for each in results[: found.value] if each.state == SUCCESS]

    def splits(self, candidate: Candidate, parts: Sequence[int]) -> Iterator[Candidate]:
        """The same way with its sum in each of these numbers of parts, where the library has that."""
        lt = self._lt
        for number in parts:
            if number == candidate.config["split"]:
                continue
            result = HeuristicResult(algo=Algo.from_buffer_copy(candidate.algo))
            scheme = IN_FLOAT32 if number > 1 else NO_REDUCTION
            try:
                for name, value in (("split", number), ("reduction", scheme)):
                    attribute, of_type = CONFIG[name]
                    value = of_type(value)
                    lt.call("cublasLtMatmulAlgoConfigSetAttribute", byref(result.algo), attribute, byref(value),
                            sizeof(value))  # fmt: skip
                lt.call("cublasLtMatmulAlgoCheck", lt.handle, *self._layouts, byref(result.algo), byref(result))
            except CublasLtError:
                continue
            if result.workspace_size <= WORKSPACE_BYTES:
                yield self._candidate(result)

    def _candidate(self, result: HeuristicResult) -> Candidate:
        algo, config = Algo.from_buffer_copy(result.algo), {}
        for name, (attribute, of_type) in CONFIG.items():
            value, written = of_type(), c_size_t()
            self._lt.call(
                "cublasLtMatmulAlgoConfigGetAttribute", byref(algo), attribute, byref(value), sizeof(value),
                byref(written),
            )  # fmt: skip
            config[name] = int(value.value)
        return Candidate(algo, int(result.workspace_size), config)

    def multiply(
        self, candidate: Candidate, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor,
        stream: int,
    ) -> None:  # fmt: skip
        """Queue the product on `stream`. All tensors are contiguous and begin at a multiple of `ALIGNMENT` bytes.
        workspace: uint8, which no product of another stream uses at the same time."""
        address = out.data_ptr()
        self._lt.call(
            "cublasLtMatmul", self._lt.handle, self._desc, byref(self._one), weight.data_ptr(), self._weight,
            x.data_ptr(), self._x, byref(self._zero), address, self._out, address, self._out, byref(candidate.algo),
            workspace.data_ptr(), workspace.numel(), stream,
        )  # fmt: skip
