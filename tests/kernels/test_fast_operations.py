"""What `fast_operations.py` and `fast_memory.py` of tests/support do in one step, they do as Triton's interpreter does.

Each kernel runs twice: in one step, and with the functions that Triton has for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
tl = triton.language

if not torch.cuda.is_available():
    from tests.support import fast_interpreter, fast_operations

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU kernels are compiled")


@triton.jit
def _operators_kernel(x, y, out, size: tl.constexpr, number: tl.constexpr):
    index = tl.arange(0, size)
    a, b = tl.load(x + index), tl.load(y + index)
    first = tl.load(y)
    tl.store(out + index, a + b)
    tl.store(out + size + index, a - b)
    tl.store(out + 2 * size + index, a * first)
    tl.store(out + 3 * size + index, number - a)
    tl.store(out + 4 * size + index, a * number + first)
    tl.store(out + 5 * size + index, tl.where((a < b) & (a >= first) | (a == b), a, number))
    tl.store(out + 6 * size + index, tl.where((a > number) & (b <= a), b, a).to(tl.float32))


@triton.jit
def _integers_kernel(x, y, out, size: tl.constexpr):
    index = tl.arange(0, size)
    a, b = tl.load(x + index), tl.load(y + index)
    tl.store(out + index, a // b)
    tl.store(out + size + index, a % b)
    tl.store(out + 2 * size + index, a // 3 + b % 5)
    tl.store(out + 3 * size + index, (a & b) | 8)
    tl.store(out + 4 * size + index, tl.where(a != b, a, b))


@triton.jit
def _memory_kernel(x, out, rows, stride, columns: tl.constexpr, lines: tl.constexpr, other: tl.constexpr):
    line, column = tl.arange(0, lines), tl.arange(0, columns)
    inside = (line < rows)[:, None] & (column < stride)[None, :]
    values = tl.load(x + line[:, None] * stride + column[None, :], mask=inside, other=other)
    kept = tl.load(x + column, mask=column < stride)
    tl.store(out + line[:, None] * columns + column[None, :], values.to(tl.float32) + kept[None, :].to(tl.float32))
    tl.store(out + lines * columns + column, kept, mask=column + 1 < stride)
    tl.store(out + (lines + 1) * columns, tl.load(x + stride))


@pytest.fixture
def triton_only(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let Triton's own functions do all, from the call on."""

    def leave() -> None:
        for module, tables in ((tl.tensor, "OPERATORS"), (tl, "FUNCTIONS"), (tl.core, "FUNCTIONS")):
            for name in getattr(fast_interpreter, tables):
                quick = getattr(module, name)
                monkeypatch.setattr(module, name, getattr(quick, "triton_s", quick))

    return leave


def twice(leave: Callable[[], None], launch: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    quick = launch()
    leave()
    return quick, launch()


def numbers(dtype: torch.dtype, seed: int, size: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return (torch.randn(size, generator=generator) * 4).round(decimals=1).to(dtype)
    return torch.randint(0 if dtype == torch.uint8 else -5, 6, (size,), generator=generator).to(dtype)


NUMBERS = [torch.float32, torch.float64, torch.float16, torch.int32, torch.int64, torch.int16, torch.int8]


@pytest.mark.parametrize(
    ("left", "right", "number"),
    [(dtype, dtype, 3) for dtype in NUMBERS]
    + [
        (torch.int32, torch.int64, 2),
        (torch.int64, torch.int8, 2),
        (torch.float32, torch.int32, 2),
        (torch.float32, torch.float32, -1.5),
        (torch.float32, torch.float64, 0.1),
        (torch.int32, torch.int32, 0.5),
    ],
)
def test_operators_yield_what_triton_yields(
    left: torch.dtype, right: torch.dtype, number: float, triton_only: Callable[[], None]
) -> None:
    x, y = numbers(left, 1), numbers(right, 2)

    def launch() -> torch.Tensor:
        out = torch.zeros(7, 16, dtype=torch.float64)
        _operators_kernel[(1,)](x, y, out, 16, number)
        return out

    quick, slow = twice(triton_only, launch)
    assert torch.equal(quick, slow)
    assert quick[0].count_nonzero() > 4


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16, torch.uint8])
def test_integers_are_divided_towards_zero(dtype: torch.dtype, triton_only: Callable[[], None]) -> None:
    x = numbers(dtype, 3) * 5
    y = numbers(dtype, 4)
    y = torch.where(y == 0, 1, y)

    def launch() -> torch.Tensor:
        out = torch.zeros(5, 16, dtype=torch.int64)
        _integers_kernel[(1,)](x, y, out, 16)
        return out

    quick, slow = twice(triton_only, launch)
    assert torch.equal(quick, slow)
    assert torch.equal(quick[0], torch.div(x, y, rounding_mode="trunc").long())


@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.int32, torch.float32),
        (torch.int32, torch.int64),
        (torch.bool, torch.int32),
    ],
)
def test_what_is_loaded_and_stored_is_what_triton_loads_and_stores(
    dtype: torch.dtype, out_dtype: torch.dtype, triton_only: Callable[[], None]
) -> None:
    x = numbers(torch.int32, 5, 24).to(dtype)
    other = 0 if dtype == torch.bfloat16 else 7  # of which the interpreter takes the number for bits

    def launch() -> torch.Tensor:
        out = torch.full((6, 8), 3, dtype=out_dtype)
        _memory_kernel[(1,)](x, out, 3, 6, 8, 4, other)
        return out

    quick, slow = twice(triton_only, launch)
    assert torch.equal(quick, slow)
    assert (quick[4, 5:] == 3).all()  # what the mask leaves alone


@triton.jit
def _wrong_mask_kernel(x, out, size: tl.constexpr):
    index = tl.arange(0, size)
    tl.store(out + index, tl.load(x + index, mask=index[:, None] < 2), mask=index < 2)


@triton.jit
def _mask_of_a_scalar_kernel(x, out, size: tl.constexpr):
    tl.store(out, tl.load(x, mask=tl.arange(0, size) < 2))


@triton.jit
def _other_alone_kernel(x, out, size: tl.constexpr):
    tl.store(out + tl.arange(0, size), tl.load(x + tl.arange(0, size), other=1.0))


@triton.jit
def _wrong_policy_kernel(x, out, size: tl.constexpr):
    tl.store(out + tl.arange(0, size), tl.load(x + tl.arange(0, size), eviction_policy="evict_never"))


@triton.jit
def _block_into_a_scalar_kernel(x, out, size: tl.constexpr):
    tl.store(out, tl.load(x + tl.arange(0, size)))


@pytest.mark.parametrize(
    "kernel",
    [
        _wrong_mask_kernel,
        _mask_of_a_scalar_kernel,
        _other_alone_kernel,
        _wrong_policy_kernel,
        _block_into_a_scalar_kernel,
    ],
)
def test_what_triton_refuses_stays_refused(kernel: Any, triton_only: Callable[[], None]) -> None:
    x, out = torch.ones(4), torch.zeros(4)
    with pytest.raises(Exception, match=r".") as quick:
        kernel[(1,)](x, out, 4)
    triton_only()
    with pytest.raises(Exception, match=r".") as slow:
        kernel[(1,)](x, out, 4)
    assert str(quick.value) == str(slow.value)
    assert not out.any()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The sizes of each tensor that is made in one step."""
    made: list[tuple[int, ...]] = []
    make = fast_operations.tensor_of

    def noted(data: Any, element: Any, sizes: tuple[int, ...]) -> Any:
        made.append(sizes)
        assert data.shape == (sizes or (1,))
        return make(data, element, sizes)

    monkeypatch.setattr(fast_operations, "tensor_of", noted)
    return made


def test_the_plain_operations_take_one_step(steps: list[tuple[int, ...]]) -> None:
    x, y, out = numbers(torch.float32, 1), numbers(torch.float32, 2), torch.zeros(7, 16)
    _operators_kernel[(1,)](x, y, out, 16, 3)
    assert len(steps) >= 30
    assert set(steps) <= {(), (16,)}
