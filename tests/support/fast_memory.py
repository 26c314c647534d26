"""`tl.load` and `tl.store` for Triton's interpreter in the tests, in one step each where they are plain."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from tests.support.fast_operations import (
    KINDS,
    Function,
    Sizes,
    cast_to,
    filled,
    is_number,
    joint,
    sizes_of,
    tensor_of,
    unwrapped,
)

# Types of elements that are loaded and stored as their bits. Bits of one are loaded as bytes: that is left to Triton.
STORED = {name: kind.numpy for name, kind in KINDS.items()}
STORED |= {"fp16": np.dtype(np.float16), "bf16": np.dtype(np.uint16)}


def pointed_at(pointer: Any) -> Any:
    """The type of element behind a pointer, None where Triton has to look at it."""
    if type(pointer) is not tl.tensor or type(pointer.dtype) is not tl.pointer_type:
        return None
    element = pointer.dtype.element_ty
    return element if type(element) is tl.dtype and element.name in STORED else None


def broadcast(data: Any, sizes: Sizes) -> Any:
    shape = sizes or (1,)
    return data if data.shape == shape else np.broadcast_to(data, shape)


def mask_for(mask: Any, sizes: Sizes) -> Any:
    """Where elements are accessed, over all of a pointer's sizes; None where the mask is not of bits or is larger."""
    if mask is None:
        return filled(np.bool_, sizes, 1)
    if type(mask) is not tl.tensor or mask.dtype.name != "int1" or mask.handle.data.dtype != np.bool_:
        return None
    return broadcast(mask.handle.data, sizes) if joint(sizes, sizes_of(mask)) == sizes else None


def other_for(other: Any, element: Any, sizes: Sizes) -> Any:
    """What is loaded where the mask has none, over all of a pointer's sizes; None where that is for Triton to say."""
    dtype = STORED[element.name]
    if other is None or (type(other) is int and other == 0):
        return filled(dtype, sizes, 0)
    kind = KINDS.get(element.name)
    if kind is not None and kind.takes_number(other):
        return np.full(sizes or (1,), other, dtype=dtype)
    if is_number(other) and other.dtype.name == element.name and joint(sizes, sizes_of(other)) == sizes:
        return broadcast(other.handle.data, sizes)
    if type(other) is float and repr(other) == "0.0":
        return filled(dtype, sizes, 0)
    return None


def loaded(rest: Function) -> Function:
    """`tl.load` of numbers through pointers of the result's sizes."""
    policies: set[tuple[Any, ...]] = set()

    def load(pointer: Any, mask: Any = None, other: Any = None, **policy: Any) -> Any:
        mask, other = unwrapped(mask), unwrapped(other)
        key = tuple(policy.items()) if policy else ()
        element = pointed_at(pointer)
        if element is None or (policy and key not in policies) or (mask is None and other is not None):
            found = rest(pointer, mask, other, **policy)
            policies.add(key)  # one that Triton took
            return found
        sizes = sizes_of(pointer)
        wanted, missing = mask_for(mask, sizes), other_for(other, element, sizes)
        if wanted is None or missing is None:
            return rest(pointer, mask, other, **policy)
        dtype = STORED[element.name]
        data = interpreter._interpreter.load(broadcast(pointer.handle.data, sizes), wanted, missing, dtype)
        return tensor_of(data, element, sizes)

    return load


def stored(rest: Function) -> Function:
    """`tl.store` of numbers that are of the pointer's type, or become one in a step."""
    policies: set[tuple[Any, ...]] = set()

    def store(pointer: Any, value: Any, mask: Any = None, **policy: Any) -> Any:
        mask = unwrapped(mask)
        key = tuple(policy.items()) if policy else ()
        element = pointed_at(pointer)
        if element is None or pointer.dtype.const or type(value) is not tl.tensor or (policy and key not in policies):
            found = rest(pointer, value, mask, **policy)
            policies.add(key)
            return found
        sizes = sizes_of(pointer)
        wanted, data = mask_for(mask, sizes), cast_to(value, element)
        if wanted is None or data is None or joint(sizes, sizes_of(value)) != sizes:
            return rest(pointer, value, mask, **policy)
        interpreter._interpreter.store(broadcast(pointer.handle.data, sizes), broadcast(data, sizes), wanted)
        return None

    return store
