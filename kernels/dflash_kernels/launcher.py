"""Launches of kernels with less of the host's time: a step that no graph covers launches hundreds.

Triton finds the compiled kernel of each launch anew: it binds the arguments, says of each what it is specialised for,
and makes a text of the options to look it up by. Here the same facts are looked at by a function that is made for the
types of the arguments: which integers are 1 or multiples of 16, that all others fit 32 bits, and that all pointers are
round. A launch of which more would have to be known, and each first one of its kind, goes Triton's way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dflash_kernels.triton_import import triton

ALIGNMENT = 16
# What launches here say besides arguments and constants.
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
_ALL: list[CachedRun] = []


def cached_launches(kernel: Any) -> Any:
    """A decorator for a kernel, above `triton.jit`, whose constants come last and have no defaults; launches name them.
    Interpreted kernels, and those of a Triton whose launches are unlike those that are known here, are left as they
    are."""
    if not isinstance(kernel, triton.JITFunction) or not hasattr(triton, "knobs"):
        return kernel
    constant = [param.is_constexpr for param in kernel.params]
    if constant != sorted(constant) or any(param.has_default for param in kernel.params):
        raise TypeError(
            f"{kernel.fn.__name__}: the constants of a kernel come last, and its parameters have no defaults"
        )
    kernel.run = CachedRun(kernel)
    return kernel


def clear_launches() -> None:
    """Look every kernel up anew, as in a new process."""
    for run in _ALL:
        run.clear()


class CachedRun:
    """Stands in for `JITFunction.run`, which is `by_triton`. kernels: those that were found, by what a launch is looked
    up by."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.by_triton: Callable[..., Any] = kernel.run
        self._find: dict[tuple[type, ...], Callable[..., Any]] = {}
        self._runtime = [param for param in kernel.params if not param.is_constexpr]
        self._constants = [param.name for param in kernel.params if param.is_constexpr]
        self._driver: Any = None
        self.kernels: dict[Any, Any] = {}
        _ALL.append(self)

    def clear(self) -> None:
        self.kernels.clear()
        self._driver = None

    def __call__(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        """As `JITFunction.run`; returns None where Triton's way was not taken."""
        if warmup or not isinstance(grid, tuple):
            return self.by_triton(*args, grid=grid, warmup=warmup, **kwargs)
        driver, kinds = self._driver, tuple(map(type, args))
        if driver is None:
            return self._first(args, grid, kwargs, kinds)
        device = driver.get_current_device()
        try:
            key = self._find[kinds](device, kwargs, *args)
            run, compiled, function, metadata, constants = self.kernels[key]
        except KeyError:
            return self._first(args, grid, kwargs, kinds)
        stream = driver.get_current_stream(device)
        hooks = triton.knobs.runtime
        bound = args + constants
        run(
            *(grid if len(grid) == 3 else (*grid, 1, 1)[:3]),
            stream,
            function,
            metadata,
            compiled.launch_metadata(grid, stream, *bound),
            hooks.launch_enter_hook,
            hooks.launch_exit_hook,
            *bound,
        )
        return None

    def _first(self, args: tuple[Any, ...], grid: Any, options: dict[str, Any], kinds: tuple[type, ...]) -> Any:
        """A launch by Triton, after which others of its kind are found."""
        compiled = self.by_triton(*args, grid=grid, warmup=False, **options)
        # Where a constant is not named, the launch is not one of those that are known here.
        named = len(args) == len(self._runtime) and all(name in options for name in self._constants)
        if compiled is None or not named or self._kernel.pre_run_hooks:
            return compiled
        self._driver = triton.runtime.driver.active
        if kinds not in self._find:
            self._find[kinds] = self._made_for(kinds)
        key = self._find[kinds](self._driver.get_current_device(), options, *args)
        if key is not None:
            constants = tuple(options[name] for name in self._constants)
            self.kernels[key] = (compiled.run, compiled, compiled.function, compiled.packed_metadata, constants)
        return compiled

    def _made_for(self, kinds: tuple[type, ...]) -> Callable[..., Any]:
        """A function of device, options and arguments of these types that gives what a kernel is looked up by; None
        where Triton must look."""
        names = [f"a{i}" for i in range(len(kinds))]
        pointers, integers, facts = [], [], []
        for name, kind, param in zip(names, kinds, self._runtime, strict=True):
            if hasattr(kind, "data_ptr"):
                facts.append(f"{name}.dtype")
                if not (param.do_not_specialize or param.do_not_specialize_on_alignment):
                    pointers.append(f"{name}.data_ptr()")
            elif kind is int:
                integers.append(name)
                if not param.do_not_specialize:
                    facts.append(f"0 if {name} == 1 else 1 if {name} % {ALIGNMENT} == 0 else 2")
            elif kind not in (float, bool, type(None)):
                return lambda *arguments: None
        if pointers:
            each = ", ".join(f"{pointer} % {ALIGNMENT} == 0" for pointer in pointers)
            facts.append(f"({each},) if ({' | '.join(pointers)}) % {ALIGNMENT} else 0")
        constants = [f"o[{name!r}]" for name in self._constants]
        given = [f"o.get({name!r})" for name in OPTIONS]
        key = ", ".join(["device", "kinds", *constants, *given, *facts])
        # With an option that is not known here, there is one more than those that are.
        known = " + ".join(f"({name!r} in o)" for name in OPTIONS)
        odd = f"len(o) != {len(constants)} + {known}" + (f" or ({' | '.join(integers)}) >> 31" if integers else "")
        source = f"lambda device, o, {', '.join(names)}: None if {odd} else ({key})"
        made: Callable[..., Any] = eval(source, {"kinds": kinds})
        return made
