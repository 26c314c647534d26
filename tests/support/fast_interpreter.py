"""Makes Triton's interpreter spend less on what is the same at every call; what kernels compute stays as it is.

Triton 3.9's interpreter replaces the functions of `triton.language` at each launch and, again, at each call of one
jit'd function by another, where the second finds all replaced and looks through the module for nothing. It also builds
its table of element types at each look into it, reckons shapes anew for each value, and looks for integers that
overflow by six more operations of its own, and asks of each pair of operands what type and shape they have in common,
which nearly all have from the start. Together that is most of the time of the tests with kernels. The operations that
kernels use most are done in one step: `tests/support/fast_operations.py` and `tests/support/fast_memory.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from tests.support import fast_operations as fast
from tests.support.fast_memory import loaded, stored

# What another version of Triton may not have; its interpreter then stays as it is.
NEEDED = (
    "_patch_lang",
    "_patch_attr",
    "_LangPatchScope",
    "_get_np_dtype",
    "TensorHandle",
    "interpreter_semantic",
    "interpreter_builder",
    "_interpreter",
)
BROADCASTS = "broadcast_impl_value"
CHECKS_OVERFLOW = "binary_op_sanitize_overflow_impl"
CHECKS_TYPES = "binary_op_type_checking_impl"
# A type that a number of Python is taken into, whose kind is not a lower one. Others are left to Triton.
TAKES = dict.fromkeys(("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"), (int,))
TAKES |= {"fp32": (int, float), "fp64": (int, float)}
OPERATIONS = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def install() -> None:
    """Speed up the interpreter in this process, once."""
    if all(hasattr(interpreter, name) for name in NEEDED) and not hasattr(interpreter._patch_lang, "is_fast"):
        interpreter._patch_lang = _patched_once(interpreter._patch_lang)
        interpreter._get_np_dtype = _read_once(interpreter._get_np_dtype)
        tl.block_type.__init__ = _checked_once(tl.block_type.__init__)
        tl.dtype.sizes = ()  # of a type that is no block's
        tl.tensor.__init__ = _init_tensor
        if hasattr(TritonSemantic, BROADCASTS):
            setattr(TritonSemantic, BROADCASTS, _of_other_shapes(getattr(TritonSemantic, BROADCASTS)))
        if hasattr(TritonSemantic, CHECKS_OVERFLOW):
            setattr(TritonSemantic, CHECKS_OVERFLOW, _overflow_seen_at_once(getattr(TritonSemantic, CHECKS_OVERFLOW)))
        if hasattr(TritonSemantic, CHECKS_TYPES):
            setattr(TritonSemantic, CHECKS_TYPES, _of_other_types(getattr(TritonSemantic, CHECKS_TYPES)))
        interpreter._patch_attr = _patch_attr
        tl.dtype.__eq__ = _same_at_once(tl.dtype.__eq__)


def _patched_once(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`patch`, at a function's first call only; the language stays replaced, as the interpreter itself leaves it after
    a call within a kernel."""
    seen: set[Any] = set()

    def patch_lang(function: Any) -> Any:
        if function not in seen:
            seen.add(function)
            patch(function)
        return interpreter._LangPatchScope()

    patch_lang.is_fast = True  # type: ignore[attr-defined]
    return patch_lang


def _patch_attr(obj: Any, name: str, member: Callable[..., Any], builder: Any, scope: Any) -> None:
    """Replace a function of the language by one that says who interprets it. What Triton has around the function only
    checks that it was said."""
    function = member.__wrapped__ if getattr(member, "__code__", None) is _BUILTIN else member  # type: ignore[attr-defined]

    def interpreted(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return function(*args, **kwargs)

    scope.set_attr(obj, name, fast_version(obj, name, interpreted))


def fast_version(obj: Any, name: str, rest: Callable[..., Any]) -> Callable[..., Any]:
    """What does a function of the language, or an operator of its tensors, in one step; `rest` where nothing does."""
    wrap = (OPERATORS if obj is tl.tensor else FUNCTIONS if obj in (tl, tl.core) else {}).get(name)
    if wrap is None:
        return rest
    quick = wrap(rest)
    quick.triton_s = rest  # type: ignore[attr-defined]
    return quick


# How each is done: a sum, a product or a difference of integers is looked at for overflow.
OPERATORS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "__add__": fast.added,
    "__radd__": partial(fast.arithmetic, np.add, is_reversed=True, checks="add"),
    "__sub__": partial(fast.arithmetic, np.subtract, is_reversed=False, checks="sub"),
    "__rsub__": partial(fast.arithmetic, np.subtract, is_reversed=True, checks="sub"),
    "__mul__": partial(fast.arithmetic, np.multiply, is_reversed=False, checks="mul"),
    "__rmul__": partial(fast.arithmetic, np.multiply, is_reversed=True, checks="mul"),
    "__truediv__": partial(fast.of_kinds, np.divide, kinds=fast.FLOATS),
    "__floordiv__": partial(fast.of_kinds, fast.divided_down, kinds=fast.INTEGERS),
    "__mod__": partial(fast.of_kinds, np.fmod, kinds=fast.INTEGERS),
    "__lt__": partial(fast.compared, np.less),
    "__le__": partial(fast.compared, np.less_equal),
    "__gt__": partial(fast.compared, np.greater),
    "__ge__": partial(fast.compared, np.greater_equal),
    "__eq__": partial(fast.compared, np.equal),
    "__ne__": partial(fast.compared, np.not_equal),
    "__and__": partial(fast.logical, np.bitwise_and),
    "__or__": partial(fast.logical, np.bitwise_or),
    "__getitem__": fast.indexed,
    "to": fast.cast,
}
FUNCTIONS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "arange": fast.ranges,
    "where": fast.chosen,
    "cast": fast.cast,
    "load": loaded,
    "store": stored,
}


_BUILTIN = tl.core.builtin(lambda: None).__code__


def _same_at_once(equal: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda self, other: self is other or equal(self, other)


def _of_other_types(check: Callable[..., Any]) -> Callable[..., Any]:
    """`check`, but for two tensors of one type of numbers, which stay as they are, and for such a tensor and a number
    that its type takes."""
    kinds = {*TAKES, "int1"}

    def check_types(
        self: Any, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False, *rest: Any, **more: Any
    ) -> Any:
        if type(lhs) is tl.tensor and type(lhs.dtype) is tl.dtype and not rest and not more:
            name = lhs.dtype.name
            if type(rhs) is tl.tensor:
                if type(rhs.dtype) is tl.dtype and rhs.dtype.name == name and name in kinds:
                    return self.broadcast_impl_value(lhs, rhs)
            elif type(rhs) in TAKES.get(name, ()):
                return self.broadcast_impl_value(lhs, self._cast_to_computation_type(rhs, lhs.dtype))
        return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, *rest, **more)

    return check_types


def _read_once(get_dtype: Callable[[Any], np.dtype[Any]]) -> Callable[[Any], np.dtype[Any]]:
    """`get_dtype` with what it said of each element type."""
    pointer = np.dtype(np.uint64)
    known: dict[str, np.dtype[Any]] = {}

    def get_np_dtype(kind: Any) -> np.dtype[Any]:
        element = kind.element_ty if isinstance(kind, tl.block_type) else kind
        if isinstance(element, tl.pointer_type):
            return pointer
        found = known.get(element.name)
        if found is None:
            found = known[element.name] = get_dtype(element)
        return found

    return get_np_dtype


def _checked_once(init: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    """`init` of the type of a block, run once for each element type and shape."""
    known: dict[tuple[str, tuple[Any, ...]], dict[str, Any]] = {}

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if type(size) is tl.constexpr else size for size in shape])
        attributes = known.get((element_ty.name, sizes))
        if attributes is None:
            init(self, element_ty, shape)
            attributes = known[element_ty.name, sizes] = dict(vars(self))
            attributes["tensor_shape"] = tl.tuple([tl.constexpr(size) for size in sizes])
            attributes["sizes"] = sizes
        vars(self).update(attributes)
        self.element_ty = element_ty

    return init_block_type


_SCALAR_SHAPE, _ONE = tl.tuple([]), tl.constexpr(1)


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    if type.is_block():
        self.shape, self.numel = type.tensor_shape, tl.constexpr(type.numel)
    else:
        self.shape, self.numel = _SCALAR_SHAPE, _ONE


def _of_other_shapes(broadcast: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """`broadcast`, but for two blocks of one shape or two scalars, which stay as they are."""

    def broadcast_two(self: Any, lhs: Any, rhs: Any) -> Any:
        if getattr(lhs.type, "sizes", ()) == getattr(rhs.type, "sizes", ()):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    return broadcast_two


def _overflow_seen_at_once(check: Callable[[Any, Any, Any, Any], None]) -> Callable[[Any, Any, Any, Any], None]:
    """`check` that two blocks of integers overflow in no operation, by one operation of NumPy on 64 bits."""

    def look(self: Any, lhs: Any, rhs: Any, operation: Callable[..., Any]) -> None:
        kind = lhs.type.scalar
        values = [getattr(side.handle, "data", None) for side in (lhs, rhs)]
        if not all(isinstance(value, np.ndarray) for value in values) or operation.__name__ not in OPERATIONS:
            return check(self, lhs, rhs, operation)
        if kind.int_bitwidth >= 64 or not self.builder.options.sanitize_overflow:
            return None
        found = OPERATIONS[operation.__name__](*values, dtype=np.int64, casting="unsafe")
        if found.size and (found.max() > kind.get_int_max_value() or found.min() < kind.get_int_min_value()):
            raise AssertionError(f"int{kind.int_bitwidth} overflow detected for operation {operation.__name__}")
        return None

    return look
