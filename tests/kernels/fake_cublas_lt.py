"""A cuBLASLt over the CPU's memory: it keeps what it is told of layouts, and multiplies what lies at the addresses."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from dflash_kernels import cublas_lt

DTYPES = {number: dtype for dtype, number in cublas_lt.DATA_TYPES.items()}
INVALID_VALUE, NOT_SUPPORTED = 7, 15


class FakeCublasLt:
    """version: what it says it is. offers: numbers of ways that it proposes, in order. parts: of ways with
    this number, parts of the sum that it proposes; else one. off: of ways with this number,
    what is added to every result. fails: ways that fail when they are asked to multiply."""

    def __init__(self, version: int = 130100, offers: tuple[int, ...] = (3, 1, 2)) -> None:
        self.version, self.offers = version, offers
        self.parts: dict[int, int] = {}
        self.off: dict[int, float] = {}
        self.fails: set[int] = set()
        self.made: dict[int, dict[str, Any]] = {}
        self.destroyed = 0
        self.multiplied: list[tuple[int, int, int]] = []
        self.asked: list[dict[int, int]] = []
        self._number = 100

    def _make(self, handle: Any, **facts: Any) -> int:
        self._number += 1
        handle._obj.value = self._number
        self.made[self._number] = facts
        return 0

    def _destroy(self, handle: Any) -> int:
        self.made.pop(handle.value)
        self.destroyed += 1
        return 0

    def cublasLtGetVersion(self) -> int:
        return self.version

    def cublasLtCreate(self, handle: Any) -> int:
        return self._make(handle)

    def cublasLtMatrixLayoutCreate(self, handle: Any, kind: int, rows: int, columns: int, leading: int) -> int:
        return self._make(handle, dtype=DTYPES[kind], rows=rows, columns=columns, leading=leading)

    def cublasLtMatmulDescCreate(self, handle: Any, compute: int, scale: int) -> int:
        assert (compute, scale) == (68, 0)  # CUBLAS_COMPUTE_32F, CUDA_R_32F
        return self._make(handle, attributes={})

    def cublasLtMatmulPreferenceCreate(self, handle: Any) -> int:
        return self._make(handle, attributes={})

    cublasLtMatrixLayoutDestroy = cublasLtMatmulDescDestroy = cublasLtMatmulPreferenceDestroy = _destroy

    def cublasLtMatmulDescSetAttribute(self, handle: Any, attribute: int, value: Any, size: int) -> int:
        assert ctypes.sizeof(value._obj) == size
        self.made[handle.value]["attributes"][attribute] = value._obj.value
        return 0

    cublasLtMatmulPreferenceSetAttribute = cublasLtMatmulDescSetAttribute

    def cublasLtMatmulAlgoGetHeuristic(
        self, lt: Any, desc: Any, a: Any, b: Any, c: Any, d: Any, preference: Any, count: int, results: Any, found: Any
    ) -> int:
        wanted = self.made[preference.value]["attributes"]
        self.asked.append(wanted)
        offers = self.offers[:count]
        for number, result in zip(offers, results, strict=False):
            split = self.parts.get(number, 1)
            result.algo.data[0], result.algo.data[2], result.algo.data[3] = number, split, 2 * (split > 1)
            result.state, result.workspace_size = 0, 0
        found._obj.value = len(offers)
        return 0

    def cublasLtMatmulAlgoCheck(
        self, lt: Any, desc: Any, a: Any, b: Any, c: Any, d: Any, algo: Any, result: Any
    ) -> int:
        split = algo._obj.data[2]
        result._obj.state, result._obj.workspace_size = 0, (split - 1) << 20
        return 0 if split <= 4 else NOT_SUPPORTED

    def cublasLtMatmulAlgoConfigGetAttribute(
        self, algo: Any, attribute: int, value: Any, size: int, written: Any
    ) -> int:
        assert ctypes.sizeof(value._obj) == size
        # algo, tile and so on: word 0, 2 and 3 have the algorithm's number, the split and its scheme.
        value._obj.value = algo._obj.data[attribute] if attribute < 8 else 0
        written._obj.value = size
        return 0

    def cublasLtMatmulAlgoConfigSetAttribute(self, algo: Any, attribute: int, value: Any, size: int) -> int:
        assert ctypes.sizeof(value._obj) == size
        algo._obj.data[attribute] = value._obj.value
        return 0

    def cublasLtMatmul(
        self, lt: Any, desc: Any, alpha: Any, a: int, a_layout: Any, b: int, b_layout: Any, beta: Any, c: int,
        c_layout: Any, d: int, d_layout: Any, algo: Any, workspace: int, workspace_size: int, stream: int,
    ) -> int:  # fmt: skip
        number = int(algo._obj.data[0])
        if number in self.fails:
            return NOT_SUPPORTED
        assert (alpha._obj.value, beta._obj.value, c, c_layout.value) == (1.0, 0.0, d, d_layout.value)
        assert workspace
        assert workspace_size == 32 << 20
        # Three is CUBLASLT_MATMUL_DESC_TRANSA, one CUBLAS_OP_T.
        if self.made[desc.value]["attributes"] != {3: 1}:
            return INVALID_VALUE
        left, right = self._columns(a, a_layout), self._columns(b, b_layout)
        out = self._columns(d, d_layout)
        out.copy_((left.float().t() @ right.float()).to(out.dtype) + self.off.get(number, 0.0))
        self.multiplied.append((number, int(algo._obj.data[2]), out.shape[1]))
        return 0

    def _columns(self, address: int, layout: Any) -> torch.Tensor:
        """The matrix at an address: a number's neighbour is the next of its column."""
        facts = self.made[layout.value]
        size, dtype = facts["leading"] * facts["columns"], facts["dtype"]
        memory = (ctypes.c_char * (size * dtype.itemsize)).from_address(address)
        numbers = torch.frombuffer(memory, dtype=dtype).view(facts["columns"], facts["leading"])
        return numbers[:, : facts["rows"]].t()
