"""Compile kernels for a GPU that need not be here: with their real arguments, and without running them.

The interpreter takes kernels that the compiler refuses, such as a variable of two types. Run by the tests as a process
of its own, since a kernel is either interpreted or compiled from its definition on:

    python -m tests.kernels.compile_only MODULE ...

imports each MODULE, whose `launches()` calls the kernels' functions with tensors on the CPU, and prints the module and
each kernel's name once it has been compiled for Hopper, whose shared memory it must fit. What the functions return is
as undefined as any memory that was not written.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dflash_kernels.launcher import OPTIONS
from dflash_kernels.paged_attention_launch import HOPPER

ROOT = Path(__file__).resolve().parents[2]
TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float64: "fp64",
}


def compile_launch(kernel: Any, *args: Any, grid: object = None, warmup: bool = False, **kwargs: Any) -> None:
    """Stands in for `JITFunction.run`: compiles what this launch would run, for one H100 or H200."""
    shared = compiled_for(90, kernel, *args, **kwargs).metadata.shared
    assert shared <= HOPPER.shared_bytes, f"{kernel.__name__} takes {shared} bytes of shared memory"
    print(kernel.__name__)


def compiled_for(arch: int, kernel: Any, *args: Any, **kwargs: Any) -> Any:
    """What Triton makes of a launch for GPUs of a compute capability."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    for index, param in enumerate(kernel.params):
        value = values.get(param.name, param.default if param.has_default else None)
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if param.is_constexpr or value is None or (is_number and value == 1 and not param.do_not_specialize):
            signature[param.name] = "constexpr"
            constants[param.name] = value
        elif isinstance(value, torch.Tensor):
            signature[param.name] = "*" + TYPES[value.dtype]
            if value.data_ptr() % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif is_number:
            signature[param.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not param.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif hasattr(value, "block_shape"):  # a descriptor of a tensor
            signature[param.name] = f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}>"
        else:
            signature[param.name] = "i1" if isinstance(value, bool) else "fp32"
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def compiled_kernels(modules: Sequence[str]) -> dict[str, set[str]]:
    """Names of the kernels that each module's launches compile. Raises `AssertionError` with the compiler's message
    when one does not compile."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compile_only", *modules]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, set[str]] = {module: set() for module in modules}
    for line in done.stdout.splitlines():
        module, _, name = line.partition(" ")
        found[module].add(name)
    return found


def main(modules: Sequence[str]) -> None:
    """Compile everything that the modules launch."""
    from triton.runtime.jit import JITFunction

    current = ""

    def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
        print(current, end=" ")
        compile_launch(kernel, *args, **kwargs)

    # Before the kernels are imported, which keep it.
    JITFunction.run = run
    for current in modules:
        importlib.import_module(current).launches()


if __name__ == "__main__":
    main(sys.argv[1:])
