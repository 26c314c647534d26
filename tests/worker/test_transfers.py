"""Arrays go to the device as one copy, and numbers come back, in buffers that are used in turn."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dflash_backend.worker.transfers import ALIGNMENT, Downloader, Uploader

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
