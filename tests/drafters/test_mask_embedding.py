"""`mask_embedding.pt` is read as data: what is not the mask token's vector is one clear error, and nothing runs."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_backend.checkpoints import CheckpointError
from dflash_backend.drafters.dflash.mask_embedding import load_mask_embedding

HIDDEN = 8
MASK_TOKEN_ID = 96
VECTOR = torch.linspace(-1, 1, HIDDEN)


def load(path: Path) -> torch.Tensor:
    return load_mask_embedding(path, MASK_TOKEN_ID, HIDDEN)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mask_embedding.pt"


@pytest.mark.parametrize(
    "content",
    [
        VECTOR,
        VECTOR[None],
        torch.nn.Parameter(VECTOR),
        {"embedding": VECTOR},
        {"mask_embedding": VECTOR[None], "mask_token_id": MASK_TOKEN_ID, "step": 7},
        {"embedding": VECTOR, "mask_token_id": torch.tensor(MASK_TOKEN_ID)},
    ],
    ids=["vector", "row", "parameter", "embedding", "mask_embedding", "id as tensor"],
)
def test_every_published_form_is_read(content: Any, path: Path) -> None:
    torch.save(content, path)
    vector = load(path)
    assert torch.equal(vector, VECTOR)
    assert not vector.requires_grad


def test_the_dtype_is_kept(path: Path) -> None:
    torch.save(VECTOR.bfloat16(), path)
    assert load(path).dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (torch.zeros(9), r"tensor of shape \[9\]"),
        (torch.zeros(2, HIDDEN), r"tensor of shape \[2, 8\]"),
        (torch.zeros(()), r"tensor of shape \[\]"),
        (torch.zeros(1).expand(2**40), r"tensor of shape \[1099511627776\]"),
        (torch.zeros(HIDDEN, dtype=torch.int64), "tensor of torch.int64"),
        (torch.zeros(HIDDEN).to_sparse(), "torch.sparse_coo"),
        (torch.zeros(HIDDEN, device="meta"), "mask_embedding.pt holds a tensor|cannot be read"),
        (VECTOR.clone().index_fill(0, torch.tensor(3), float("nan")), "not finite"),
        (VECTOR.clone().index_fill(0, torch.tensor(3), float("inf")), "not finite"),
        ({"embedding": VECTOR, "mask_token_id": 7}, "a mask_token_id of 7"),
        ({"embedding": VECTOR, "mask_token_id": "96"}, "a mask_token_id of '96'"),
        ({"embedding": VECTOR, "mask_token_id": None}, "a mask_token_id of None"),
        ({"weight": VECTOR}, "a dictionary with the keys 'weight'"),
        ({"embedding": VECTOR, "mask_embedding": VECTOR}, "the keys 'embedding', 'mask_embedding'"),
        ({}, r"the keys \(none\)"),
        ({"embedding": [1.0] * HIDDEN}, "a value of type list"),
        ("not a tensor", "a value of type str"),
    ],
)
def test_what_is_not_the_vector_is_refused_with_what_is_expected(content: Any, message: str, path: Path) -> None:
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert r"shape [8] or [1, 8]" in str(caught.value)
    assert "mask_token_id (96)" in str(caught.value)


class Touches:
    """Unpickled with everything allowed, this creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_pickle_with_code_is_refused_and_not_run(path: Path) -> None:
    trace = path.with_name("ran")
    for write in (torch.save, lambda content, to: to.write_bytes(pickle.dumps(content))):
        write({"embedding": Touches(trace)}, path)
        with pytest.raises(CheckpointError, match="cannot be read.*expected a floating-point tensor"):
            load(path)
        assert not trace.exists()
    pickle.loads(pickle.dumps(Touches(trace)))
    assert trace.exists(), "the file would have run"


def test_a_row_that_carries_its_whole_table_is_refused_before_it_is_read(path: Path) -> None:
    table = torch.zeros(20_000, HIDDEN)
    torch.save(table[MASK_TOKEN_ID], path)
    with pytest.raises(CheckpointError, match=r"has 64\d\d\d\d bytes; .* at most 262208\. .* must be cloned"):
        load(path)


def test_a_missing_file_is_said_so(path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read: .*No such file"):
        load(path)


def test_damaged_files_load_or_give_one_error(path: Path) -> None:
    rng = np.random.default_rng(4)
    errors = []
    for legacy in (False, True):
        torch.save({"embedding": VECTOR, "mask_token_id": 96}, path, _use_new_zipfile_serialization=not legacy)
        whole = np.frombuffer(path.read_bytes(), dtype=np.uint8)
        for _ in range(150):
            damaged = whole[: rng.integers(0, len(whole) + 1)] if rng.random() < 0.2 else whole.copy()
            if len(damaged) == len(whole):
                damaged = damaged.copy()
                damaged[rng.integers(0, len(whole), rng.integers(1, 6))] = rng.integers(0, 256)
            path.write_bytes(damaged.tobytes())
            try:
                assert load(path).shape == (HIDDEN,)
            except CheckpointError as error:
                errors.append(str(error))
    assert len(errors) > 50
    assert not [error for error in errors if "\n" in error or "Traceback" in error]
