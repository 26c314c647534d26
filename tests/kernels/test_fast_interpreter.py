"""What `tests/support/fast_interpreter.py` does faster, it does as Triton's interpreter does it."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")
tl = triton.language

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU kernels are compiled")


@triton.jit
def _add_kernel(x, y, out, size: tl.constexpr):
    index = tl.arange(0, size)
    tl.store(out + index, tl.load(x + index) + tl.load(y + index))


@triton.jit
def _multiply_kernel(x, out, factor, size: tl.constexpr):
    index = tl.arange(0, size)
    tl.store(out + index, tl.load(x + index) * factor)


@triton.jit
def _table_kernel(x, y, out, rows: tl.constexpr, columns: tl.constexpr):
    row, column = tl.arange(0, rows), tl.arange(0, columns)
    table = tl.load(x + row)[:, None] + tl.load(y + column)[None, :]
    tl.store(out + row[:, None] * columns + column[None, :], table)


@triton.jit
def _mismatch_kernel(x, y, out, size: tl.constexpr):
    half: tl.constexpr = size // 2
    tl.store(out + tl.arange(0, size), tl.load(x + tl.arange(0, size)) + tl.load(y + tl.arange(0, half)))


@pytest.mark.parametrize(("dtype", "limit"), [(torch.int32, 2**31 - 1), (torch.int16, 2**15 - 1), (torch.int8, 127)])
def test_a_sum_that_overflows_is_noticed_and_the_largest_one_is_right(dtype: torch.dtype, limit: int) -> None:
    x = torch.tensor([limit - 1, 3, -limit, 0], dtype=dtype)
    one, out = torch.tensor([1, 1, -1, 0], dtype=dtype), torch.zeros(4, dtype=dtype)
    _add_kernel[(1,)](x, one, out, 4)
    assert out.tolist() == [limit, 4, -limit - 1, 0]
    for sign in (1, -1):
        with pytest.raises(Exception, match="overflow detected for operation add"):
            _add_kernel[(1,)](sign * (x.abs() + 1), sign * one.abs(), out, 4)


def test_a_product_that_overflows_is_noticed_and_64_bits_hold_it() -> None:
    x, out = torch.tensor([1 << 20, 1], dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(Exception, match="overflow detected for operation mul"):
        _multiply_kernel[(1,)](x, out, 1 << 12, 2)
    _multiply_kernel[(1,)](x.long(), out, 1 << 12, 2)
    assert out.tolist() == [1 << 32, 1 << 12]


def test_rows_and_columns_become_a_table() -> None:
    x, y, out = torch.arange(4, dtype=torch.float32), torch.arange(8, dtype=torch.float32) * 10, torch.zeros(4, 8)
    _table_kernel[(1,)](x, y, out, 4, 8)
    assert torch.equal(out, x[:, None] + y[None, :])


def test_blocks_whose_sizes_do_not_fit_are_an_error() -> None:
    x, y, out = torch.ones(8), torch.ones(4), torch.zeros(8)
    with pytest.raises(Exception, match="incompatible dimensions"):
        _mismatch_kernel[(1,)](x, y, out, 8)


@triton.jit
def _scale_kernel(x, out, factor: tl.constexpr, size: tl.constexpr):
    index = tl.arange(0, size)
    tl.store(out + index, tl.load(x + index) * factor)


@pytest.mark.parametrize(
    ("dtype", "factor", "result"),
    [
        (torch.int16, 3, torch.int16),
        (torch.int32, 0.5, torch.float32),  # a number of a higher kind takes the tensor along
        (torch.float32, 3, torch.float32),
        (torch.float16, 0.1, torch.float16),
        (torch.bool, 3, torch.int32),
    ],
)
def test_a_number_takes_the_type_of_a_tensor_whose_kind_is_not_a_lower_one(
    dtype: torch.dtype, factor: float, result: torch.dtype
) -> None:
    x, out = torch.tensor([0, 1]).to(dtype), torch.zeros(2, dtype=result)
    _scale_kernel[(1,)](x, out, factor, 2)
    assert out.tolist() == (x * torch.tensor(factor, dtype=result)).tolist()


def test_a_number_that_its_tensor_cannot_hold_is_an_error() -> None:
    with pytest.raises(Exception, match="300 is out of range for type int8"):
        _scale_kernel[(1,)](torch.ones(2, dtype=torch.int8), torch.ones(2, dtype=torch.int8), 300, 2)


def test_tensors_of_two_types_are_taken_to_the_wider_one() -> None:
    x, y, out = torch.tensor([2.5, -1.0]), torch.tensor([1, 2], dtype=torch.int32), torch.zeros(2)
    _add_kernel[(1,)](x, y, out, 2)
    assert out.tolist() == [3.5, 1.0]
