"""Exchanges the weights of two drafters in place: captured graphs read them at the addresses that they were captured
with."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import torch

# Of a drafter: what is the engine's own (`_vocabulary`: of a head that ranks share), where its checkpoint lies, and
# what says where a tensor beside it lies.
_NOT_OF_THE_DRAFTER = frozenset({"target", "caches", "backend", "ops", "path", "address", "described", "_vocabulary"})
# What is taken of two tensors at a time, so that no memory is asked for once the first has changed.
PIECE_BYTES = 8 << 20
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


def exchange_weights(one: Any, other: Any) -> None:
    """Give each drafter the values of the other's tensors. Raises `ValueError` where they differ in anything else: then
    graphs of the one cannot run the other; and `torch.OutOfMemoryError`. Both change nothing."""
    pairs = paired_tensors(one, other)
    devices = {mine.device for mine, _ in pairs}
    kept = {device: torch.empty(PIECE_BYTES, dtype=torch.uint8, device=device) for device in devices}
    for mine, theirs in pairs:
        for first in range(0, len(mine), PIECE_BYTES):
            here, there = mine[first : first + PIECE_BYTES], theirs[first : first + PIECE_BYTES]
            piece = kept[mine.device][: len(here)]
            piece.copy_(here)
            here.copy_(there)
            there.copy_(piece)


def paired_tensors(one: Any, other: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The memory, uint8, of the tensors of two drafters that are at the same places in them, without what they share,
    such as the target's head. Raises `ValueError`, which names the place, where the drafters are not alike."""
    leaves, others = dict(_leaves(one, "", frozenset())), dict(_leaves(other, "", frozenset()))
    for place in sorted(leaves.keys() ^ others.keys()):
        raise ValueError(f"{place} is in one of them only")
    pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for place, value in leaves.items():
        another = others[place]
        if isinstance(value, torch.Tensor) and isinstance(another, torch.Tensor):
            if (value.shape, value.dtype, value.stride()) != (another.shape, another.dtype, another.stride()):
                raise ValueError(f"{place} is {_form(value)} in one and {_form(another)} in the other")
            if value.data_ptr() != another.data_ptr():
                mine, theirs = _storage(value), _storage(another)
                if len(mine) != len(theirs):
                    raise ValueError(f"{place} lies in {len(mine)} bytes in one and in {len(theirs)} in the other")
                # Once, also where several are views of the same memory.
                pairs.setdefault(mine.data_ptr(), (mine, theirs))
        elif value != another:
            raise ValueError(f"{place} is {value!r} in one and {another!r} in the other")
    return list(pairs.values())


def _storage(tensor: torch.Tensor) -> torch.Tensor:
    """The memory that a tensor lies in: uint8 `[bytes]`."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _leaves(value: Any, place: str, within: frozenset[int]) -> Iterator[tuple[str, Any]]:
    """The tensors and plain values below `value`, by their places; a function by its name and what it encloses. Raises
    `ValueError` for an object that cannot be looked into."""
    if isinstance(value, (torch.Tensor, *_PLAIN)):
        yield place, value
        return
    if id(value) in within:
        return
    for name, each in _parts(value, place):
        if name not in _NOT_OF_THE_DRAFTER:
            yield from _leaves(each, f"{place}.{name}" if place else name, within | {id(value)})


def _parts(value: Any, place: str) -> list[tuple[str, Any]]:
    """What an object holds, by name."""
    if isinstance(value, dict):
        return [(str(key), each) for key, each in value.items()]
    if isinstance(value, (list, tuple)):
        return [(str(index), each) for index, each in enumerate(value)]
    if isinstance(value, (set, frozenset)):
        return [("values", str(sorted(map(str, value))))]
    if isinstance(value, functools.partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    if isinstance(value, types.MethodType):
        return [("func", value.__func__), ("self", value.__self__)]
    if isinstance(value, types.FunctionType):
        enclosed = [(str(index), cell.cell_contents) for index, cell in enumerate(value.__closure__ or ())]
        return [("name", value.__qualname__), *enclosed]
    if isinstance(value, (type, types.BuiltinFunctionType)):
        return [("name", value.__qualname__)]
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    if not slots and not hasattr(value, "__dict__"):
        raise ValueError(f"{place} is a {type(value).__name__}, whose weights cannot be found")
    found = {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})
    return [("type", type(value).__qualname__), *found.items()]
