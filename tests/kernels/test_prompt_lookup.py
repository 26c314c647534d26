"""Drafts that are looked up are those that plain Python finds, by the kernel and by its reference."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from dflash_kernels.prompt_lookup import prompt_lookup, prompt_lookup_reference
from tests.kernels.inputs import DEVICE

Lookup = Callable[..., tuple[torch.Tensor, torch.Tensor]]
FORMS = [prompt_lookup] if torch.cuda.is_available() else [prompt_lookup_reference, prompt_lookup]
STALE = 7


@pytest.fixture(params=FORMS, ids=lambda form: form.__name__)
def look_up(request: pytest.FixtureRequest) -> Lookup:
    return request.param


def by_hand(text: list[int], k: int, min_ngram: int, max_ngram: int) -> list[int]:
    """The drafts behind `text`, whose last token is the anchor."""
    period = 1
    for n in range(min(max_ngram, len(text) - 1), min_ngram - 1, -1):
        ends = [end for end in range(n, len(text)) if text[end - n : end] == text[-n:]]
        if ends:
            period = len(text) - ends[-1]
            break
    longer = list(text)
    for _ in range(k):
        longer.append(longer[-period])
    return longer[len(text) :]


def one(look_up: Lookup, text: list[int], k: int = 4, min_ngram: int = 2, max_ngram: int = 5) -> list[int]:
    """The drafts of one request, behind whose text lies what would match as well."""
    tokens = torch.tensor([[*text, *text, *[STALE] * k]], device=DEVICE)
    return rows(look_up, tokens, [len(text) - 1], [0], [k], k, min_ngram, max_ngram)[0]


def rows(
    look_up: Lookup,
    tokens: torch.Tensor,
    anchors: list[int],
    req_idx: list[int],
    num_drafts: list[int],
    k: int,
    min_ngram: int,
    max_ngram: int,
) -> list[list[int]]:
    """The drafts of each row."""
    computed, index, count = (torch.tensor(x, dtype=torch.int32).to(DEVICE) for x in (anchors, req_idx, num_drafts))
    before = tokens.clone()
    drafts, matched = look_up(tokens, computed, index, count, k, min_ngram, max_ngram)
    assert drafts.dtype == torch.int64
    assert matched.dtype == torch.float32
    assert torch.equal(tokens, before)
    return drafts.tolist()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 9, 1, 2], [3, 4, 5, 6]),
        # At the very start, and with the text's end inside the drafts: it goes on as if it repeated.
        ([1, 2, 1, 2], [1, 2, 1, 2]),
        ([1, 2, 3, 1, 2], [3, 1, 2, 3]),
        # The n-gram overlaps the one that it matches.
        ([8, 4, 4, 4], [4, 4, 4, 4]),
        ([1, 2, 1, 2, 1], [2, 1, 2, 1]),
        # The latest of several that match, and the longest before the latest.
        ([1, 2, 3, 1, 2, 4, 9, 9, 1, 2], [4, 9, 9, 1]),
        ([6, 1, 2, 3, 5, 1, 2, 4, 8, 6, 1, 2], [3, 5, 1, 2]),
        # Longer than the longest n-gram that is looked at, and then the latest.
        ([1, 2, 3, 4, 5, 6, 0, 9, 2, 3, 4, 5, 6, 8, 1, 2, 3, 4, 5, 6], [8, 1, 2, 3]),
        # Shorter than the shortest: the anchor is repeated.
        ([1, 2, 3, 9, 2], [2, 2, 2, 2]),
        ([1, 2, 3, 4, 5], [5, 5, 5, 5]),
        ([5], [5, 5, 5, 5]),
        ([5, 5], [5, 5, 5, 5]),
    ],
)
def test_drafts_are_what_followed_the_latest_of_the_longest_matches(
    look_up: Lookup, text: list[int], expected: list[int]
) -> None:
    assert one(look_up, text) == expected == by_hand(text, 4, 2, 5)


@pytest.mark.parametrize(("min_ngram", "max_ngram", "expected"), [(1, 5, 3), (1, 1, 4), (2, 2, 3), (3, 5, 2)])
def test_the_bounds_of_n_are_kept(look_up: Lookup, min_ngram: int, max_ngram: int, expected: int) -> None:
    assert one(look_up, [1, 2, 3, 9, 2, 4, 8, 1, 2], 1, min_ngram, max_ngram) == [expected]


@pytest.mark.parametrize(("k", "min_ngram", "max_ngram"), [(1, 1, 1), (3, 1, 4), (5, 2, 5), (8, 2, 3), (15, 3, 9)])
@pytest.mark.parametrize("vocab", [1, 2, 5, 40])
def test_random_rows_draft_what_plain_python_drafts(
    look_up: Lookup, k: int, min_ngram: int, max_ngram: int, vocab: int
) -> None:
    """Short and long texts in one batch, rows that do not draft, padding rows, and requests that have run past the
    width of the tokens. The longest text takes more than one block of the kernel."""
    rng = np.random.default_rng(k + 100 * vocab)
    num_requests, max_len = 12, 1400
    tokens = rng.integers(vocab, size=(num_requests, max_len))
    anchors = np.minimum(rng.integers(1, 2 * rng.choice([2, 10, 60, 700], num_requests)) - 1, max_len - 1)
    anchors[:2] = max_len - 1, max_len + 3
    index = rng.permutation(num_requests)
    index[rng.random(num_requests) < 0.2] = -1
    num_drafts = rng.integers(0, k + 1, num_requests)
    found = rows(
        look_up,
        torch.from_numpy(tokens).to(DEVICE),
        anchors.tolist(),
        index.tolist(),
        num_drafts.tolist(),
        k,
        min_ngram,
        max_ngram,
    )
    for row, (request, count) in enumerate(zip(index.tolist(), num_drafts.tolist(), strict=True)):
        text = tokens[request, : min(anchors[request], max_len - 1) + 1].tolist()
        drafts = request >= 0 and count > 0
        assert found[row] == (by_hand(text, k, min_ngram, max_ngram) if drafts else [0] * k), row


def test_a_cpu_looks_up_32_rows_of_2000_tokens_in_less_than_a_millisecond() -> None:
    """The fastest of many, since other work may have the core: as it is, about a quarter of that."""
    rng = np.random.default_rng(0)
    tokens = torch.from_numpy(np.minimum(rng.geometric(1 / 128, (32, 2100)), 1023))
    rows, ends = torch.arange(32, dtype=torch.int32), torch.full((32,), 1999, dtype=torch.int32)
    seconds = []
    for _ in range(100):
        started = time.perf_counter()
        prompt_lookup_reference(tokens, ends, rows, ends, 5, 2, 5)
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 1e-3


def test_no_rows_and_rows_of_padding_alone_draft_nothing(look_up: Lookup) -> None:
    tokens = torch.ones(1, 8, dtype=torch.int64, device=DEVICE)
    assert rows(look_up, tokens, [3], [], [], 3, 2, 5) == []
    assert rows(look_up, tokens, [3], [-1, -1], [0, 0], 3, 2, 5) == [[0] * 3] * 2
