"""The operations of Triton's language that kernels use most, for its interpreter in the tests, in one step each.

The interpreter takes `a + b` through a check of types, a cast and a broadcast of each operand, a second sum in 64 bits
that looks for overflow, and a new type and tensor for each value on the way: some 20 microseconds around one of NumPy.
Here operands that need none of it, of one type of numbers and of shapes that NumPy brings together, are given to NumPy
at once. Whatever is not exactly such an operation, and every error but overflow, is left to Triton, whose function
each of these wraps as `rest`. `tests/kernels/test_fast_operations.py` compares both. One thing differs: a bfloat16
below 2^-126 keeps its value on the way to float32 and back, which Triton's interpreter changes and a GPU does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

Function = Callable[..., Any]
Sizes = tuple[int, ...]


class Kind:
    """A type of numbers: Triton's, NumPy's, which numbers of Python it takes, and, of integers, its range."""

    def __init__(self, name: str, numpy: type, takes: tuple[type, ...]) -> None:
        self.type = tl.dtype(name)
        self.numpy = np.dtype(numpy)
        self.number = numpy
        self.takes = takes
        self.is_int = self.numpy.kind in "iu"
        self.low, self.high = (np.iinfo(numpy).min, np.iinfo(numpy).max) if self.is_int else (0, 0)
        self.low, self.high = int(self.low), int(self.high)

    def takes_number(self, value: Any) -> bool:
        """Whether a number of Python becomes one of this type, and no other does of the tensor's."""
        return type(value) in self.takes and (not self.is_int or self.low <= value <= self.high)


KINDS = {
    f"{sign}int{bits}": Kind(f"{sign}int{bits}", getattr(np, f"{sign}int{bits}"), (int,))
    for sign in ("", "u")
    for bits in (8, 16, 32, 64)
}
KINDS |= {"fp32": Kind("fp32", np.float32, (int, float)), "fp64": Kind("fp64", np.float64, (int, float))}
INTEGERS = {name: kind for name, kind in KINDS.items() if kind.is_int}
FLOATS = {name: kind for name, kind in KINDS.items() if not kind.is_int}
# Integers with a sign become the wider ones, of NumPy as of Triton.
SIGNED = [KINDS[f"int{bits}"] for bits in (8, 16, 32, 64)]
WIDER = {
    (one.type.name, other.type.name): max(one, other, key=lambda kind: kind.numpy.itemsize)
    for one in SIGNED
    for other in SIGNED
}
BOOL = tl.int1
SCALAR_SHAPE, ONE = tl.tuple([]), tl.constexpr(1)
WHOLE = slice(None)

_blocks: dict[tuple[str, str, Sizes], Any] = {}
_joint_sizes: dict[tuple[Sizes, Sizes], Sizes | None] = {}
_filled: dict[tuple[Any, Sizes, int], np.ndarray] = {}


def type_of(element: Any, sizes: Sizes) -> Any:
    """The type of a block of `element`, or of a scalar where there are no sizes; one object for each."""
    if not sizes:
        return element
    key = (element.name, getattr(element, "address_space", ""), sizes)
    found = _blocks.get(key)
    if found is None:
        found = _blocks[key] = tl.block_type(element, list(sizes))
        found.numel_constant = tl.constexpr(math.prod(sizes))
    return found


def tensor_of(data: np.ndarray, element: Any, sizes: Sizes) -> Any:
    """A tensor of Triton's language: `data` as it is, which is known to be of this type and these sizes."""
    handle = _new_handle(interpreter.TensorHandle)
    handle.data, handle.dtype, handle.attr = data, element, {}
    made = _new_tensor(tl.tensor)
    made.handle, made.dtype = handle, element
    made.type = kind = type_of(element, sizes)
    made.shape, made.numel = (kind.tensor_shape, kind.numel_constant) if sizes else (SCALAR_SHAPE, ONE)
    return made


_new_handle, _new_tensor = interpreter.TensorHandle.__new__, tl.tensor.__new__


def sizes_of(tensor: Any) -> Sizes:
    """A block's sizes, nothing for a scalar: what `fast_interpreter` keeps with each type."""
    sizes: Sizes = tensor.type.sizes
    return sizes


def joint(left: Sizes, right: Sizes) -> Sizes | None:
    """The sizes that both are brought to; None where they do not fit, which Triton then says."""
    if left == right or not right:
        return left
    if not left:
        return right
    key = (left, right)
    if key not in _joint_sizes:
        try:
            _joint_sizes[key] = np.broadcast_shapes(left, right)
        except ValueError:
            _joint_sizes[key] = None
    return _joint_sizes[key]


def filled(dtype: Any, sizes: Sizes, value: int) -> np.ndarray:
    """Zeros or ones that nothing writes into."""
    found = _filled.get((dtype, sizes, value))
    if found is None:
        found = _filled[dtype, sizes, value] = np.full(sizes or (1,), value, dtype=dtype)
        found.flags.writeable = False
    return found


def unwrapped(value: Any) -> Any:
    return value.value if type(value) is tl.constexpr else value


def is_number(tensor: Any, kinds: dict[str, Kind] = KINDS) -> bool:
    return type(tensor) is tl.tensor and type(tensor.dtype) is tl.dtype and tensor.dtype.name in kinds


def operands(left: Any, right: Any, kinds: dict[str, Kind]) -> tuple[Kind, Any, Any, Sizes] | None:
    """The operands' type, their data, and the sizes of the result; None where Triton has to cast or to complain. One of
    them may be a number of Python."""
    first = left if type(left) is tl.tensor else right
    kind = kinds.get(first.dtype.name) if type(first) is tl.tensor and type(first.dtype) is tl.dtype else None
    if kind is None:
        return None
    if first is right and type(left) is not tl.tensor:
        return (kind, kind.number(left), right.handle.data, sizes_of(right)) if kind.takes_number(left) else None
    if type(right) is not tl.tensor:
        return (kind, left.handle.data, kind.number(right), sizes_of(left)) if kind.takes_number(right) else None
    if type(right.dtype) is not tl.dtype:
        return None
    if right.dtype.name != left.dtype.name:
        kind = WIDER.get((left.dtype.name, right.dtype.name))
        if kind is None or kinds is FLOATS:
            return None
    sizes = joint(sizes_of(left), sizes_of(right))
    return None if sizes is None else (kind, left.handle.data, right.handle.data, sizes)


def arithmetic(operation: Function, rest: Function, is_reversed: bool, checks: str = "") -> Function:
    """`operation` of two operands with a result of their type. `checks`: the name by which integers overflow, of
    which 64 bits do without."""

    def compute(left: Any, right: Any, **more: Any) -> Any:
        other = unwrapped(right)
        found = operands(other, left, KINDS) if is_reversed else operands(left, other, KINDS)
        if found is None:
            return rest(left, right, **more)
        kind, first, second, sizes = found
        if not (kind.is_int and checks) or kind.numpy.itemsize == 8:
            data = operation(first, second)
        else:
            data = without_overflow(operation, first, second, kind, checks)
        if data.dtype is not kind.numpy:
            data = data.astype(kind.numpy)
        return tensor_of(data, kind.type, sizes)

    return compute


def without_overflow(operation: Function, left: Any, right: Any, kind: Kind, name: str) -> np.ndarray:
    """`operation` on integers of less than 64 bits. Raises `AssertionError` where the type does not hold the result."""
    wide = operation(left, right, dtype=np.int64, casting="unsafe")
    data = wide.astype(kind.numpy)
    if interpreter.interpreter_builder.options.sanitize_overflow and (data != wide).any():
        raise AssertionError(f"int{kind.type.int_bitwidth} overflow detected for operation {name}")
    return data


def of_kinds(operation: Function, rest: Function, kinds: dict[str, Kind]) -> Function:
    """`operation` on numbers of these types only."""
    fast = arithmetic(operation, rest, False)

    def compute(left: Any, right: Any, **more: Any) -> Any:
        return fast(left, right, **more) if is_number(left, kinds) else rest(left, right, **more)

    return compute


def compared(operation: Function, rest: Function) -> Function:
    """A comparison, whose result has one bit."""

    def compute(left: Any, right: Any, **more: Any) -> Any:
        found = operands(left, unwrapped(right), KINDS)
        if found is None:
            return rest(left, right, **more)
        return tensor_of(operation(found[1], found[2]), BOOL, found[3])

    return compute


def logical(operation: Function, rest: Function) -> Function:
    """`&` and `|` of two tensors of bits, or of integers."""
    of_integers = of_kinds(operation, rest, INTEGERS)

    def compute(left: Any, right: Any, **more: Any) -> Any:
        if type(right) is tl.tensor and left.dtype.name == right.dtype.name == "int1":
            sizes = joint(sizes_of(left), sizes_of(right))
            if sizes is not None and left.handle.data.dtype == right.handle.data.dtype == np.bool_:
                return tensor_of(operation(left.handle.data, right.handle.data), BOOL, sizes)
        return of_integers(left, right, **more)

    return compute


def added(rest: Function) -> Function:
    """A sum; one with a pointer counts elements."""
    of_numbers = arithmetic(np.add, rest, False, "add")

    def compute(left: Any, right: Any, **more: Any) -> Any:
        pointer = left.dtype
        if type(pointer) is not tl.pointer_type:
            return of_numbers(left, right, **more)
        other = unwrapped(right)
        if is_number(other, INTEGERS):
            offset, sizes = other.handle.data.astype(np.uint64), joint(sizes_of(left), sizes_of(other))
        elif type(other) is int and -(2**63) <= other < 2**63:
            offset, sizes = np.array([other], dtype=np.int64).astype(np.uint64), sizes_of(left)
        else:
            return rest(left, right, **more)
        if sizes is None:
            return rest(left, right, **more)
        width = np.uint64(max(1, pointer.element_ty.primitive_bitwidth // 8))
        return tensor_of(left.handle.data + width * offset, pointer, sizes)

    return compute


def divided_down(left: Any, right: Any) -> Any:
    """Integers divided towards zero."""
    return (left - np.fmod(left, right)) // right


def chosen(rest: Function) -> Function:
    """`tl.where` of a tensor of bits and two of one type, or one and a number."""

    def where(condition: Any, x: Any, y: Any, **more: Any) -> Any:
        if type(condition) is tl.tensor and condition.dtype.name == "int1":
            found = operands(unwrapped(x), unwrapped(y), KINDS)
            sizes = None if found is None else joint(sizes_of(condition), found[3])
            if found is not None and sizes is not None:
                data = np.where(condition.handle.data, found[1], found[2])
                return tensor_of(data, found[0].type, sizes)
        return rest(condition, x, y, **more)

    return where


def cast_to(tensor: Any, wanted: Any) -> np.ndarray | None:
    """A tensor's data as another type of numbers; None where the way there is not one step of NumPy. Triton's
    interpreter cuts a float32 off to make a bfloat16."""
    source = tensor.dtype
    if type(source) is not tl.dtype:
        return None
    data: np.ndarray = tensor.handle.data
    if source.name == wanted.name:
        return data
    kind = KINDS.get(wanted.name)
    if source.name == "bf16" and wanted.name == "fp32":
        return (data.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if source.name == "fp32" and wanted.name == "bf16":
        return (data.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    if kind is not None and (source.name in KINDS or source.name == "int1"):
        return data.astype(kind.numpy)
    return None


def cast(rest: Function) -> Function:
    """`x.to(type)` between types of numbers, and to the type that it has."""

    def to(tensor: Any, dtype: Any, fp_downcast_rounding: Any = None, bitcast: Any = False, **more: Any) -> Any:
        wanted = unwrapped(dtype)
        if (
            type(tensor) is tl.tensor
            and type(wanted) is tl.dtype
            and fp_downcast_rounding is None
            and not unwrapped(bitcast)
        ):
            data = cast_to(tensor, wanted)
            if data is not None:
                return tensor if data is tensor.handle.data else tensor_of(data, wanted, sizes_of(tensor))
        return rest(tensor, dtype, fp_downcast_rounding, bitcast, **more)

    return to


def indexed(rest: Function) -> Function:
    """`x[:, None]` and the like: a new axis of one."""

    def get(tensor: Any, slices: Any, **more: Any) -> Any:
        sizes = sizes_of(tensor)
        if sizes and type(slices) is tuple:
            whole = sum(1 for one in slices if type(one) is slice and one == WHOLE)
            if whole <= len(sizes) and whole + sum(1 for one in slices if one is None) == len(slices):
                data = tensor.handle.data[slices]
                return tensor_of(data, tensor.dtype, data.shape)
        return rest(tensor, slices, **more)

    return get


def ranges(rest: Function) -> Function:
    """`tl.arange`, made once for each length."""
    known: dict[tuple[int, int], np.ndarray] = {}

    def arange(start: Any, end: Any, **more: Any) -> Any:
        key = (unwrapped(start), unwrapped(end))
        data = known.get(key)
        if data is not None and not more:
            return tensor_of(data, tl.int32, data.shape)
        made = rest(start, end, **more)
        if not more and type(key[0]) is int and type(key[1]) is int:
            known[key] = made.handle.data.copy()
            known[key].flags.writeable = False
        return made

    return arange
