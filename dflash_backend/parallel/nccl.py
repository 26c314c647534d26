"""NCCL by its C functions: what ranks on GPUs exchange, queued on the current stream as any kernel is.

Called directly and not by torch.distributed, whose process group adds a stream of its own, events that its watchdog
asks for while graphs are captured, and an end of the process when it takes a rank for lost: here heartbeats decide that
(`rank_links.py`), and `abort` ends what waits.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dflash_backend.config import ConfigError

LIBRARY = "libnccl.so.2"
MIN_VERSION = 21800
"""2.18, the first whose collectives may be captured beside others that are not, with several graphs in a pool. As NCCL
numbers versions: 10000 x major + 100 x minor + patch."""
ID_BYTES = 128
SUM = 0
DTYPES = {
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
"""`ncclDataType_t`."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * ID_BYTES),)


_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_FUNCTIONS: dict[str, list[Any]] = {
    "ncclGetVersion": [ctypes.POINTER(_INT)],
    "ncclGetUniqueId": [ctypes.POINTER(_UniqueId)],
    "ncclCommInitRank": [ctypes.POINTER(_POINTER), _INT, _UniqueId, _INT],
    "ncclAllReduce": [_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER],
    "ncclBroadcast": [_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER],
    "ncclAllGather": [_POINTER, _POINTER, _SIZE, _INT, _POINTER, _POINTER],
    "ncclCommAbort": [_POINTER],
}


class NcclError(RuntimeError):
    """A function of NCCL failed."""


class Nccl:
    """The library."""

    def __init__(self, path: str) -> None:
        """Raises `OSError` where there is none at that path, or by that name."""
        self._library = ctypes.CDLL(path)
        for name, arguments in _FUNCTIONS.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, _INT
        self._library.ncclGetErrorString.argtypes = [_INT]
        self._library.ncclGetErrorString.restype = ctypes.c_char_p

    def call(self, name: str, *arguments: Any) -> None:
        """Raises `NcclError` with NCCL's words."""
        status = getattr(self._library, name)(*arguments)
        if status:
            words = self._library.ncclGetErrorString(status).decode(errors="replace")
            raise NcclError(f"{name}: {words} (with NCCL_DEBUG=WARN in the environment NCCL says more)")

    def version(self) -> int:
        """As `MIN_VERSION`."""
        number = _INT()
        self.call("ncclGetVersion", ctypes.byref(number))
        return number.value

    def unique_id(self) -> bytes:
        """By which the ranks of one group find each other: made by one of them, which listens from then on."""
        found = _UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(found))
        return bytes(found)


class Communicator:
    """One rank of a group. What it is asked for is queued on the current stream of the device that was set when it was
    made. All ranks ask for the same, in the same order."""

    def __init__(self, nccl: Nccl, unique_id: bytes, rank: int, size: int) -> None:
        """Waits for all other ranks. Raises `NcclError`."""
        self._nccl = nccl
        self._handle = _POINTER()
        self._is_aborted = False
        own_id = _UniqueId.from_buffer_copy(unique_id)
        nccl.call("ncclCommInitRank", ctypes.byref(self._handle), size, own_id, rank)

    def sum(self, x: torch.Tensor) -> None:
        """The sum over ranks, in place of `x`, which is contiguous."""
        self._nccl.call("ncclAllReduce", x.data_ptr(), x.data_ptr(), x.numel(), DTYPES[x.dtype], SUM, *self._where())

    def broadcast(self, x: torch.Tensor) -> None:
        """What rank 0 has in `x`, which is contiguous, on all."""
        self._nccl.call("ncclBroadcast", x.data_ptr(), x.data_ptr(), x.nbytes, DTYPES[torch.uint8], 0, *self._where())

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """What each rank has in `x`, in the order of ranks; both are contiguous, and `out` has `size` times as much."""
        self._nccl.call("ncclAllGather", x.data_ptr(), out.data_ptr(), x.nbytes, DTYPES[torch.uint8], *self._where())

    def abort(self) -> None:
        """End what waits for another rank, from any thread. What is asked for later raises `NcclError`. It waits for
        no thread that is in a call: that one may wait for a lost rank, which this ends."""
        self._is_aborted = True
        self._nccl.call("ncclCommAbort", self._handle)

    def _where(self) -> tuple[ctypes.c_void_p, int]:
        if self._is_aborted:  # its memory is given back, so NCCL must not see it again
            raise NcclError("the ranks' group was ended, since one of them is lost")
        return self._handle, current_stream()


def current_stream() -> int:
    """The handle of the stream that kernels are queued on."""
    return torch.cuda.current_stream().cuda_stream


def load_nccl() -> Nccl:
    """The library that torch has loaded, or that of a package. Raises `ConfigError` with what to install."""
    reasons = []
    for path in _paths():
        try:
            nccl = Nccl(path)
            version = nccl.version()
        except (OSError, AttributeError, NcclError) as error:
            reasons.append(f"{path}: {error}")
            continue
        if version >= MIN_VERSION:
            return nccl
        reasons.append(f"{path} is of version {version}, and {MIN_VERSION} or later is needed")
    raise ConfigError(
        "ranks on GPUs take their sums by NCCL, and it cannot be used here: install a build of torch for CUDA, which "
        f"brings it, or put the folder of {LIBRARY} in LD_LIBRARY_PATH ({'; '.join(reasons)})"
    )


def _paths() -> Iterator[str]:
    """Where the library may be, by its name first: torch for CUDA has it loaded then."""
    yield LIBRARY
    found = importlib.util.find_spec("nvidia")
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        if (path := Path(folder) / "nccl/lib" / LIBRARY).exists():
            yield str(path)
