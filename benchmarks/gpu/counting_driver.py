"""A driver for Triton that compiles and runs nothing: it counts the kernels that would be compiled, and launches.

Triton's own binder decides which launches share a compiled kernel, so what is counted is what a GPU would compile.
Tensors lie on the CPU, and those that kernels would have written are zeros. A process that has installed it can run no
kernel any more.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from dflash_kernels.launcher import clear_launches


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel that would be compiled: its name and the constants that set it apart from others of that name."""

    name: str
    constants: tuple[tuple[str, Any], ...]

    def describe(self) -> str:
        """One line for a report."""
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in self.constants)})"


class _CountedKernel:
    """Stands in for a compiled kernel."""

    function = 1
    packed_metadata = ()

    def __init__(self, name: str, launches: Counter[str]) -> None:
        self.name = name
        self._launches = launches

    def launch_metadata(self, *arguments: object) -> None:
        return None

    def run(self, *arguments: object) -> None:
        self._launches[self.name] += 1


@dataclass
class KernelCounts:
    """What has happened since the driver was installed, or since `take_compiled`."""

    compiled: list[CompiledKernel] = field(default_factory=list)
    launches: Counter[str] = field(default_factory=Counter)
    _kernels: set[Any] = field(default_factory=set)

    def start_process(self) -> None:
        """Let nothing be compiled, as in a new process."""
        for kernel in self._kernels:
            kernel.device_caches.clear()
        self._kernels.clear()
        clear_launches()
        self.compiled.clear()

    def count_compilation(
        self, kernel: Any, key: str, signature: Any, device: int, constants: dict[Any, Any], *rest: object
    ) -> _CountedKernel:
        """Stands in for `JITFunction._do_compile`."""
        name = kernel.fn.__name__
        named = {kernel.params[path[0]].name: value for path, value in constants.items()}
        self.compiled.append(CompiledKernel(name, tuple(sorted(named.items()))))
        self._kernels.add(kernel)
        stand_in = _CountedKernel(name, self.launches)
        kernel.device_caches[device][0][key] = stand_in
        return stand_in

    def take_compiled(self) -> list[CompiledKernel]:
        """The kernels since the last call."""
        taken, self.compiled = self.compiled, []
        return taken


class _Utils:
    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132}


class _Driver:
    """A GPU, as far as Triton asks: by default an H100 or H200."""

    utils = _Utils()

    def __init__(self, arch: int = 90) -> None:
        self._arch = arch

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._arch, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def install() -> KernelCounts:
    """Put the driver in place of the GPU's. Raises `RuntimeError` where kernels are interpreted."""
    counts = KernelCounts()
    use_driver(counts)
    _fill_new_tensors()
    return counts


def use_driver(counts: KernelCounts, compiled: Callable[[Any], None] | None = None, arch: int = 90) -> None:
    """As `install`, over any tensors. With `compiled` kernels are compiled all the same, for a compute capability and
    into Triton's cache; it is called with each."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("with TRITON_INTERPRET=1 no kernel has a compiled form that could be counted")
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(_Driver(arch))
    really = JITFunction._do_compile

    def compile_one(kernel: Any, key: str, *arguments: Any) -> Any:
        if compiled is not None:
            compiled(really(kernel, key, *arguments))
        return counts.count_compilation(kernel, key, *arguments)

    JITFunction._do_compile = compile_one


def _fill_new_tensors() -> None:
    """Let torch's uninitialised tensors be zeros: no kernel writes them, and token ids among them are looked up."""

    def zeroed(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*arguments: Any, **options: Any) -> torch.Tensor:
            tensor = make(*arguments, **options)
            return tensor if tensor.is_meta else tensor.zero_()

        return made

    torch.empty, torch.empty_like = zeroed(torch.empty), zeroed(torch.empty_like)
    torch.Tensor.new_empty = zeroed(torch.Tensor.new_empty)  # type: ignore[method-assign]
