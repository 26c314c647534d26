"""A GPU that is not there: tensors that say `cuda` over the CPU's memory, under torch's rules for devices.

Where there is no GPU this shows what would fail on one for another reason than numbers: operations over tensors of both
devices, `numpy()` of the device's, waits for the device within a step or a capture, and what else a capture forbids.
Kernels do not run, and what they would have written is zeros, so no result means anything. A captured graph is not
replayed. It cannot show races, wrong numbers, memory that is used again too early, or time.

    import benchmarks.gpu.fake_device as fake; fake.install("rules")      # before models are made

With "compile" every kernel is compiled as on such a GPU, into Triton's cache, and large tensors are not computed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode

from benchmarks.gpu import timing
from benchmarks.gpu.compile_table import GPUS
from benchmarks.gpu.counting_driver import KernelCounts, use_driver
from benchmarks.gpu.pack import ARCH_VARIABLE

Mode = Literal["rules", "compile"]
MODES: tuple[Mode, ...] = ("rules", "compile")
GIB = 1 << 30
# An H100, as far as this project asks.
PROPERTIES = SimpleNamespace(
    name="a GPU that is not there", major=9, minor=0, multi_processor_count=132, total_memory=80 * GIB,
    shared_memory_per_block_optin=227 << 10, shared_memory_per_multiprocessor=228 << 10, L2_cache_size=50 << 20,
)  # fmt: skip
# Address space of the CPU stands for it, of which nothing is written.
FREE_BYTES = 24 * GIB
# Tensors with more elements are not computed where kernels are compiled alone.
LARGE = 1 << 20
# What moves data between devices, or asks about a tensor and not for its data.
ANYWHERE = {
    "copy_", "to", "cpu", "cuda", "type", "type_as", "data_ptr", "size", "stride", "dim", "ndimension", "numel",
    "element_size", "storage_offset", "untyped_storage", "is_contiguous", "is_floating_point", "is_inference",
    "is_pinned", "is_set_to", "__get__", "__set__", "__len__", "__hash__", "__repr__", "__format__", "as_subclass",
    "is_tensor",
}  # fmt: skip
# What reads values of the device, so that the host waits for it.
READS = {
    "item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__contains__", "is_nonzero", "nonzero",
    "unique", "masked_select", "equal", "allclose", "bincount", "histc",
}  # fmt: skip
INDEXING = {"__getitem__", "__setitem__"}
EMPTY = {"empty", "empty_like", "new_empty", "empty_strided"}
IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "and", "or", "xor")}
# Not computed over large tensors: products, random numbers, and what goes through a vocabulary.
COSTLY = {
    "linear", "matmul", "__matmul__", "mm", "addmm", "bmm", "scaled_dot_product_attention", "_scaled_mm", "randn",
    "rand", "randint", "zeros", "ones", "full", "sort", "softmax", "cumsum", "argmax", "masked_fill", "gather",
    "exponential", "div", "__truediv__", "mul", "__mul__", "add", "__add__", "float", "max",
}  # fmt: skip


class RuleError(Exception):
    """What a GPU does not allow, or what a step must not do. No RuntimeError, which torch raises: an engine goes on
    without graphs after one of these in a capture, and here it is to be seen."""


class _State:
    """mode: None until `install`. captures, steps: how deep in them the program is. pinned: addresses of memory."""

    mode: Mode | None = None
    captures = 0
    steps = 0

    def __init__(self) -> None:
        self.pinned: set[int] = set()


STATE = _State()
COUNTS = KernelCounts()
DEVICE = torch.device("cuda", 0)
_raw = torch._C.DisableTorchFunctionSubclass


class DeviceTensor(torch.Tensor):
    """A tensor of the GPU that is not there."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The GPU."""
        return DEVICE

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """True."""
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        """False."""
        return False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every operation over such a tensor."""
        return _run(func, args, kwargs or {})


class _Rules(TorchFunctionMode):
    """Every operation over other tensors, which may make one of the device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def wait(what: str) -> None:
    """The host waits for the device. Raises `RuleError` within a capture or a step."""
    if STATE.captures:
        raise RuleError(f"CUDA error: operation not permitted when stream is capturing: {what}")
    if STATE.steps:
        raise RuleError(f"the host waits for the device within a step: {what}")


def _forbid(what: str) -> None:
    """What a capture does not allow though the host waits for nothing."""
    if STATE.captures:
        raise RuleError(f"CUDA error: operation not permitted when stream is capturing: {what}")


def _map(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """A value with its tensors changed, within tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: _map(change, each) for name, each in value.items()}
    if isinstance(value, list) or type(value) is tuple:
        return type(value)(_map(change, each) for each in value)
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        changed = [_map(change, each) for each in value]
        # torch's own results take one iterable, named tuples a value for each field.
        return type(value)(changed) if type(value).__module__ == "torch.return_types" else type(value)(*changed)
    return value


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    _map(note, value)
    return found


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(torch.Tensor) if isinstance(tensor, DeviceTensor) else tensor


def _on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if isinstance(tensor, DeviceTensor) or tensor.is_meta else tensor.as_subclass(DeviceTensor)


def _kind(device: Any) -> str:
    return "cuda" if isinstance(device, int) else torch.device(device).type


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation: the rules that it must keep, then its result, on the device that it belongs to."""
    with _raw():
        name = getattr(func, "__name__", "")
        own = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if own is not None and name in ("to", "cpu", "cuda") and func in (
            torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda,
        ):  # fmt: skip
            return _move(name, own, list(args[1:]), dict(kwargs))
        if name in ("pin_memory", "is_pinned") and own is not None:
            return _pin(own) if name == "pin_memory" else _is_pinned(own)
        operands = _tensors((args, kwargs))
        _check(name, args, kwargs, operands)
        kwargs = dict(kwargs)
        pinned, device = kwargs.pop("pin_memory", False), kwargs.get("device")
        if pinned:
            _forbid("an allocation of pinned memory")
        here = any(isinstance(tensor, DeviceTensor) for tensor in operands)
        if device is not None:
            here = _kind(device) == "cuda"
            kwargs["device"] = torch.device("cpu") if here else device
        result = _compute(func, name, args, kwargs, here)
        if pinned:
            STATE.pinned.add(result.untyped_storage().data_ptr())
        if not here or result is NotImplemented:
            return result
        return own if own is not None and _is_in_place(name) else _map(_on_device, result)


def _is_in_place(name: str) -> bool:
    """Whether an operation's result is its first operand."""
    return name in IN_PLACE or (name.endswith("_") and not name.startswith("_"))


def _compute(func: Any, name: str, args: Any, kwargs: dict[str, Any], here: bool) -> Any:
    args, kwargs = _map(_plain, args), _map(_plain, kwargs)
    if STATE.mode == "compile" and here:
        if _is_in_place(name) and args[0].numel() > LARGE and args[0].is_floating_point():
            return args[0]
        if name in COSTLY:
            shapes = _shapes_of(func, args, kwargs)
            if any(tensor.numel() > LARGE for tensor in (*_tensors(shapes), *_tensors((args, kwargs)))):
                return _map(
                    lambda tensor: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype), shapes
                )
    result = func(*args, **kwargs)
    if name in EMPTY and not (result.numel() > LARGE and result.is_floating_point()) and not result.is_meta:
        result.zero_()  # a kernel would have written it: ids in it are looked up
    return result


def _shapes_of(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What an operation gives, without data."""
    kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
    if "device" in kwargs:
        kwargs["device"] = torch.device("meta")
    return func(*_map(_without_data, args), **_map(_without_data, kwargs))


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


def _uninitialised(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    # Integers may be looked up.
    return made if made.is_floating_point() and made.numel() > LARGE else made.zero_()


def _check(name: str, args: Any, kwargs: dict[str, Any], operands: list[torch.Tensor]) -> None:
    """Raises what torch raises of tensors on two devices, and `RuleError`."""
    there = [tensor for tensor in operands if isinstance(tensor, DeviceTensor)]
    if not there:
        return
    if name in ("numpy", "__array__"):
        raise RuleError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
    if name in READS:
        wait(f"{name} of a tensor of the device")
    if name == "copy_":
        _check_copy(*operands[:2])
    if name in ANYWHERE:
        return
    others = [tensor for tensor in operands if not isinstance(tensor, DeviceTensor)]
    if name in INDEXING:
        _check_index(name, args, others)
        return
    if name == "repeat_interleave" and len(there) > 1 and kwargs.get("output_size") is None:
        wait("repeat_interleave by a tensor whose sum the host does not know")
    if any(tensor.dim() for tensor in others):
        raise RuleError(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
            f"(of {name})"
        )


def _check_index(name: str, args: Any, others: list[torch.Tensor]) -> None:
    if not isinstance(args[0], DeviceTensor):
        raise RuleError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if any(isinstance(each, torch.Tensor) and each.dtype in (torch.bool, torch.uint8) for each in index):
        wait(f"{name} by a mask")
    if any(tensor.dim() for tensor in others):
        wait(f"{name} with a tensor of the host")


def _check_copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """A copy between the devices needs pinned memory of the host, or waits."""
    on_host = [tensor for tensor in (target, source) if not isinstance(tensor, DeviceTensor)]
    if on_host and not _is_pinned(on_host[0]):
        wait("a copy from or to memory of the host that is not pinned")


def _is_pinned(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, DeviceTensor) and tensor.untyped_storage().data_ptr() in STATE.pinned


def _pin(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DeviceTensor):
        raise RuleError("cannot pin 'torch.cuda.Tensor' only dense CPU tensors can be pinned")
    _forbid("an allocation of pinned memory")
    copy = tensor.clone()
    STATE.pinned.add(copy.untyped_storage().data_ptr())
    return copy


def _move(name: str, own: torch.Tensor, rest: list[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """`to`, `cpu` and `cuda`: a copy where the device or the dtype changes, and the rules of copies between devices."""
    here = isinstance(own, DeviceTensor)
    target = {"cpu": False, "cuda": True, "to": here}[name]
    dtype = kwargs.get("dtype")
    for each in (*rest, kwargs.get("device")) if name == "to" else ():
        if isinstance(each, torch.Tensor):
            target, dtype = isinstance(each, DeviceTensor), each.dtype
        elif isinstance(each, torch.dtype):
            dtype = each
        elif isinstance(each, str | torch.device):
            if _kind(each) == "meta":
                return _plain(own).to("meta")
            target = _kind(each) == "cuda"
    if target == here and dtype in (None, own.dtype) and not kwargs.get("copy", False):
        return own
    if here and not target:
        wait(f"{name} from the device to the host")
    elif target and not here:
        non_blocking = kwargs.get("non_blocking", False)
        if not (non_blocking and _is_pinned(own)):
            wait(f"{name} to the device from memory of the host that is not pinned")
    raw = _plain(own)
    if STATE.mode == "compile" and raw.numel() > LARGE and raw.is_floating_point():
        copy = torch.empty_like(raw, dtype=dtype or raw.dtype)
    else:
        copy = raw.to(dtype or raw.dtype, copy=True)
    return _on_device(copy) if target else copy


class _Event:
    """An event, at which the device has always arrived."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.at = 0.0

    def record(self, stream: Any = None) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        _forbid("a wait for an event")

    def query(self) -> bool:
        _forbid("a look at an event")
        return True

    def wait(self, stream: Any = None) -> None:
        pass

    def elapsed_time(self, other: _Event) -> float:
        return max(other.at - self.at, 1e-9) * 1e3


class _Stream:
    """A stream that has always run what it was given."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def synchronize(self) -> None:
        wait("for a stream")

    def wait_stream(self, other: Any) -> None:
        pass

    wait_event = wait_stream

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()


class _Graph:
    """A captured graph, of which nothing runs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.captured = False

    def capture_begin(self, pool: Any = None, **options: Any) -> None:
        _forbid("another capture")
        STATE.captures += 1

    def capture_end(self) -> None:
        STATE.captures -= 1
        self.captured = True

    def replay(self) -> None:
        _forbid("a replay of another graph")
        if not self.captured:
            raise RuleError("Called CUDAGraph::replay without a preceding successful capture.")

    def pool(self) -> tuple[int, int]:
        return (0, 0)

    def reset(self) -> None:
        self.captured = False


@contextmanager
def _capture(graph: _Graph, pool: Any = None, stream: Any = None, **options: Any) -> Iterator[None]:
    graph.capture_begin(pool)
    try:
        yield
    finally:
        graph.capture_end()


@contextmanager
def _on_stream(stream: Any) -> Iterator[None]:
    yield


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


CUDA: dict[str, Any] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "get_device_properties": lambda *args: PROPERTIES,
    "get_device_capability": lambda *args: (PROPERTIES.major, PROPERTIES.minor),
    "get_device_name": lambda *args: PROPERTIES.name,
    "mem_get_info": lambda *args: (FREE_BYTES, PROPERTIES.total_memory),
    "memory_allocated": lambda *args: 0,
    "max_memory_allocated": lambda *args: GIB,
    "memory_reserved": lambda *args: GIB,
    "graph_pool_handle": lambda: (0, 0),
    "current_stream": lambda *args: _Stream(),
    "synchronize": lambda *args: wait("torch.cuda.synchronize"),
    "is_current_stream_capturing": lambda: STATE.captures > 0,
    "Stream": _Stream,
    "Event": _Event,
    "CUDAGraph": _Graph,
    "graph": _capture,
    "stream": _on_stream,
    **dict.fromkeys(("init", "set_device", "set_stream", "empty_cache", "reset_peak_memory_stats"), _nothing),
}


class _Generator(torch.Generator):
    """Random numbers of any device, by the CPU's generator."""

    def __new__(cls, device: Any = None) -> _Generator:
        return super().__new__(cls)


def _be(arch: int) -> None:
    """Have the properties of a GPU of this compute capability. Raises `ValueError` for one that is not known."""
    if arch not in GPUS:
        raise ValueError(f"no GPU of compute capability {arch} is known here; there are {', '.join(map(str, GPUS))}")
    gpu = GPUS[arch]
    PROPERTIES.major, PROPERTIES.minor = divmod(arch, 10)
    PROPERTIES.multi_processor_count = gpu.num_sms
    PROPERTIES.shared_memory_per_block_optin = gpu.shared_bytes
    PROPERTIES.shared_memory_per_multiprocessor = gpu.sm_shared_bytes


def _build_launcher(kernel: Any) -> None:
    """Build the module that launches a kernel, where Triton has one for each signature, and do not load it: it needs
    the driver."""
    from triton.backends.nvidia import driver
    from triton.runtime import build

    if hasattr(driver, "make_launcher") and hasattr(build, "_load_module_from_path"):
        build._load_module_from_path = lambda name, path: SimpleNamespace(launch=None)
        driver.CudaLauncher(kernel.src, kernel.metadata)


def _no_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """In place of cuDNN's."""
    if causal and query.shape[2] != key.shape[2]:
        raise RuleError("a causal mask of cuDNN's is square")
    return torch.empty_like(query), query.new_empty(*query.shape[:3], 1, dtype=torch.float32)


def install(mode: Mode) -> None:
    """Put the device in place, for the rest of the process. Sizes become those of a CPU, but where kernels are
    compiled. Raises `RuntimeError` where kernels are interpreted."""
    from dflash_backend import device
    from dflash_backend.attention import cudnn_rows, long_rows
    from dflash_backend.worker import graphs
    from dflash_backend.worker.runner import ModelRunner

    STATE.mode = mode
    if mode == "rules":
        use_driver(COUNTS)
        timing.use_tiny_sizes()
    else:
        _be(int(os.environ.get(ARCH_VARIABLE, "90")))
        use_driver(COUNTS, _build_launcher, int(os.environ.get(ARCH_VARIABLE, "90")))
    for name, value in CUDA.items():
        # A function of its own for each name: the profiler loads what looks functions up by what they are.
        setattr(torch.cuda, name, value if isinstance(value, type) else partial(value))
    torch.Generator = _Generator  # type: ignore[misc]
    graphs.borrowed = lambda tensor: tensor  # its memory would be shared by graphs
    device._check_compiler = _nothing
    # No numbers are right here, and what packages are asked for must break no rule all the same.
    long_rows.trial = lambda *needed: None
    cudnn_rows.attention_of_cudnn = _no_attention
    submit = ModelRunner.submit

    def step(runner: ModelRunner, plan: Any) -> None:
        STATE.steps += 1
        try:
            submit(runner, plan)
        finally:
            STATE.steps -= 1

    ModelRunner.submit = step  # type: ignore[method-assign, assignment]
    _Rules().__enter__()
