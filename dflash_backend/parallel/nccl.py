"""NCCL: what ranks on GPUs exchange, queued on the current stream as any kernel is, in CUDA graphs as outside of them.

NCCL's C functions are called directly and not by torch.distributed. Its process group adds a stream of its own, events
that its watchdog asks for while graphs are captured, and an end of the process when it takes a rank for lost: here
heartbeats decide that (`links.py`), and `abort` ends what waits.

NCCL reduces each number in one place and gives all ranks that result, so all have the same bits; `join` looks whether
that holds. In which order terms are added follows from where a number lies in the tensor. With `ordered` it does not:
terms are gathered and added in the order of ranks, as `SharedSum` does.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from dflash_backend.config import ConfigError
from dflash_backend.parallel.shard import Shard
from dflash_backend.parallel.sums import add_terms

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


_log = logging.getLogger(__name__)

JOIN_S = 60.0
"""How long ranks may take to find each other once all have loaded."""
LOOK_S = 0.1
ABORT_S = 5.0
"""How long work that waits for a lost rank may take to end once it is told to. After that only the process' end helps,
and a new engine takes its place."""
PROBE_NUMBERS = 4096


class Collectives(Protocol):
    """As `Communicator`."""

    def sum(self, x: torch.Tensor) -> None: ...

    def broadcast(self, x: torch.Tensor) -> None: ...

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None: ...

    def abort(self) -> None: ...


Connect = Callable[[], Collectives]
"""Meets all other ranks. It may wait for ever for one that is lost."""


class GpuSum:
    """As `links.Reduce`. num_bytes: of all terms that were given; those of a captured graph count once."""

    def __init__(self, shard: Shard, device: torch.device, connect: Connect, ordered: bool = False) -> None:
        """device: this rank's. `join` comes before the first sum."""
        self._shard = shard
        self._device = device
        self._connect = connect
        # The sum of two terms has no order.
        self._ordered = ordered and shard.size > 2
        self._group: Collectives | None = None
        self.num_bytes = 0

    @classmethod
    def by_nccl(cls, shard: Shard, device: torch.device, nccl: Nccl, unique_id: bytes, ordered: bool) -> GpuSum:
        """unique_id: as rank 0 has made it."""

        def connect() -> Communicator:
            torch.cuda.set_device(device)
            return Communicator(nccl, unique_id, shard.rank, shard.size)

        return cls(shard, device, connect, ordered)

    def join(self, lost: Callable[[], str] = lambda: "") -> None:
        """Meet the other ranks, which do the same now, and see that sums are equal on all. lost: why a rank is lost,
        empty while none is. Raises `RuntimeError` when one does not come."""
        found: list[Collectives | Exception] = []

        def connect() -> None:
            try:
                found.append(self._connect())
            except Exception as error:  # noqa: BLE001, raised below
                found.append(error)

        # It cannot be interrupted, so it waits in a thread that ends with the process.
        thread = threading.Thread(target=connect, name="nccl-join", daemon=True)
        thread.start()
        deadline = time.monotonic() + JOIN_S
        while thread.is_alive():
            thread.join(LOOK_S)
            if reason := lost():
                raise RuntimeError(reason)
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"the ranks did not find each other by NCCL within {JOIN_S:g} s: see that the machines reach each "
                    "other (NCCL_SOCKET_IFNAME names the network), and what NCCL_DEBUG=INFO says"
                )
        if isinstance(found[0], Exception):
            raise RuntimeError(f"the ranks did not find each other by NCCL: {found[0]}") from found[0]
        self._group = found[0]
        self._check()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.num_bytes += x.nbytes
        x = x.contiguous()
        if not self._ordered:
            self._joined.sum(x)
            return x
        add_terms(tuple(self._gathered(x)), x)
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.num_bytes += x.nbytes
        found = self._gathered(x.contiguous())
        return list(found) if self._shard.rank == 0 else []

    def broadcast(self, x: torch.Tensor) -> None:
        """What rank 0 has in `x`, which is contiguous, on all ranks."""
        self._joined.broadcast(x)

    def abort(self) -> None:
        """End what waits for a rank that is lost: a kernel that waits for it would do so for ever, and with it the
        thread that waits for the device. Where that does not help, this process ends."""
        group = self._group
        if group is None:
            return
        thread = threading.Thread(target=group.abort, name="nccl-abort", daemon=True)
        thread.start()
        thread.join(ABORT_S)
        if thread.is_alive():
            _log.critical("work that waits for a lost rank does not end, so this process does; a new one may start")
            os._exit(1)

    @property
    def _joined(self) -> Collectives:
        assert self._group is not None, "join comes first"
        return self._group

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(self._shard.size, *x.shape)
        self._joined.all_gather(x, out)
        return out

    def _check(self) -> None:
        """Raises `RuntimeError` on rank 0 where a sum differs between ranks: each chooses its experts by such sums, so
        they would add terms of different ones. It is the first exchange of each kind too, at which NCCL connects, as it
        may not while a graph is captured."""
        generator = torch.Generator().manual_seed(self._shard.rank)
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(PROBE_NUMBERS, generator=generator).to(self._device, dtype)
            self.broadcast(x.clone())
            rows = self.gather(self(x))
            if any(not torch.equal(row, rows[0]) for row in rows[1:]):
                raise RuntimeError(
                    "a sum by NCCL has other bits on some ranks, and ranks must agree on them: update NCCL and the "
                    "driver"
                )
