"""Arrays go to the device as one copy, and numbers come back, in buffers that are used in turn."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from dflash_backend.worker import transfers
from dflash_backend.worker.transfers import ALIGNMENT, Downloader, Uploader, fetch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_arrays_arrive_with_their_types_at_round_addresses() -> None:
    arrays = [
        np.arange(5, dtype=np.int64),
        np.array([0.5, -1.0, 2.0], dtype=np.float32),
        np.zeros(0, dtype=np.int32),
        np.arange(7, dtype=np.int32),
    ]
    sent = Uploader(256, DEVICE).send(arrays)
    for array, tensor in zip(arrays, sent, strict=True):
        assert tensor.data_ptr() % ALIGNMENT == 0
        assert torch.equal(tensor.cpu(), torch.from_numpy(array))


def test_the_next_copy_goes_to_the_same_place() -> None:
    """Which a captured graph counts on."""
    uploader = Uploader(64, DEVICE)
    first = uploader.send([np.arange(4, dtype=np.int64)])[0]
    for start in range(1, 4):
        assert uploader.send([np.arange(start, start + 4, dtype=np.int64)])[0].data_ptr() == first.data_ptr()
    assert first.tolist() == [3, 4, 5, 6]


def test_a_buffer_grows_only_when_told_to() -> None:
    array = np.arange(100, dtype=np.int64)
    assert Uploader(64, DEVICE, grows=True).send([array])[0].tolist() == list(range(100))
    with pytest.raises(ValueError, match="800 bytes of a step's layout do not fit the 64"):
        Uploader(64, DEVICE).send([array])


def test_two_downloads_can_be_on_their_way() -> None:
    downloader = Downloader(8, DEVICE)
    numbers = torch.arange(3, device=DEVICE)
    first = downloader.begin(numbers)
    numbers += 10  # the device comes to this after the copy
    second = downloader.begin(numbers)
    assert first.wait().tolist() == [0, 1, 2]
    assert second.wait().tolist() == [10, 11, 12]


class OnDevice(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    device = torch.device("cuda")  # type: ignore[assignment]


class Event:
    """Keeps what `watched` was when the device came to it, and when the host waited for it."""

    watched: torch.Tensor
    log: ClassVar[list[tuple[str, list[int]]]] = []

    def record(self) -> None:
        self.log.append(("recorded", self.watched.tolist()))

    def synchronize(self) -> None:
        self.log.append(("waited", self.watched.tolist()))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[int]]]:
    """What happens to events, with a device that runs each copy at once."""

    def made(make: Callable[..., torch.Tensor], *shape: Any, dtype: torch.dtype, **where: Any) -> torch.Tensor:
        Event.watched = make(*shape, dtype=dtype)
        return Event.watched

    stand_in = SimpleNamespace(
        zeros=partial(made, torch.zeros), empty=partial(made, torch.zeros), from_numpy=torch.from_numpy,
        uint8=torch.uint8, int64=torch.int64, cuda=SimpleNamespace(Event=Event),
    )  # fmt: skip
    monkeypatch.setattr(transfers, "torch", stand_in)
    monkeypatch.setattr(Event, "log", [])
    return Event.log


def test_the_host_reads_what_comes_after_the_copy(log: list[tuple[str, list[int]]]) -> None:
    """An event that is recorded before the copy is over before it."""
    numbers = torch.arange(1, 4).as_subclass(OnDevice)
    assert fetch(numbers).wait().tolist() == [1, 2, 3]
    assert log == [("recorded", [1, 2, 3]), ("waited", [1, 2, 3])]
    log.clear()
    downloader = Downloader(3, torch.device("cuda"))
    for host in downloader._hosts:
        Event.watched = host
        assert downloader.begin(numbers).wait().tolist() == [1, 2, 3]
    assert log == [("recorded", [1, 2, 3]), ("waited", [1, 2, 3])] * len(downloader._hosts)


def test_a_buffer_of_the_host_is_not_written_before_its_last_copy_is_over(log: list[tuple[str, list[int]]]) -> None:
    uploader = Uploader(ALIGNMENT, torch.device("cuda"))
    for number in range(1, 1 + transfers.MAX_STEPS_IN_FLIGHT):
        Event.watched = uploader.buffer
        uploader.send([np.array([number], dtype=np.uint8)])
    assert [(name, numbers[0]) for name, numbers in log] == [("recorded", 1), ("recorded", 2)]
    log.clear()
    Event.watched = uploader._turns[0].host
    uploader.send([np.array([9], dtype=np.uint8)])
    assert [(name, numbers[0]) for name, numbers in log] == [("waited", 1), ("recorded", 9)]
