"""`worker.logits` on made-up logits: rows that ask for nothing keep theirs, and ties have a rank that is said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from dflash_backend.core.plan import NewRequest, SchedulerOutput
from dflash_backend.messages import SamplingParams, TokenLogprobs
from dflash_backend.worker.batch import BatchTraits, HostBatch
from dflash_backend.worker.logits import PendingLogprobs, SpecialRows
from dflash_backend.worker.state import RequestStates, StateTensors
from dflash_backend.worker.step_ops import CpuStepOps

OPS = CpuStepOps()
VOCAB = 11
K = 3
PROMPT = [1, 2, 2]
OUTPUT = [3, 4, 3]


def make_batch(asked: list[dict[str, Any]], num_draft: int = K) -> tuple[Rows, RequestStates]:
    """A decode row with drafts 5, 3, 5 for each set of sampling parameters."""
    state = StateTensors.allocate(32, 32, K, 4, VOCAB, torch.device("cpu"))
    requests = RequestStates(state, VOCAB)
    names = [str(i) for i in range(len(asked))]
    sampling = [SamplingParams(**({"temperature": 0.0} | changes)) for changes in asked]
    new = [
        NewRequest(name, PROMPT + OUTPUT, len(PROMPT), each, (0,), 0)
        for name, each in zip(names, sampling, strict=True)
    ]
    requests.update(SchedulerOutput(0, [], new))
    index = np.array([requests.records[name].index for name in names])
    state.tokens[index, 6 : 6 + K] = torch.tensor([5, 3, 5])
    position = np.full_like(index, 6)
    drafts = np.full_like(index, num_draft)
    return Rows(names, index, drafts, position), requests


@dataclass(frozen=True)
class Rows:
    """Decode rows of these requests, at these indices, with so many drafts each after the token before `position`."""

    names: list[str]
    req_idx: np.ndarray
    num_draft: np.ndarray
    position: np.ndarray


def apply_processors(
    logits: torch.Tensor, rows: Rows, requests: RequestStates, ops: CpuStepOps | None = None
) -> torch.Tensor:
    ones, none = np.ones_like(rows.req_idx), np.zeros_like(rows.req_idx)
    columns = rows.req_idx, rows.position - 1, none, ones, rows.num_draft, none, ones
    batch = HostBatch(rows.names, np.stack(columns, axis=1), BatchTraits(False, False))
    every = SpecialRows(batch, requests, None, np.arange(len(rows.names)))
    return every.processed(logits, ops or CpuStepOps())


def random_logits(num_rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(num_rows * (K + 1), VOCAB, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize(
    "changes", [{}, {"temperature": 1.0, "top_p": 0.5}, {"min_tokens": 3}, {"logprobs": 5}, {"logit_bias": {99: 5.0}}]
)
def test_a_batch_in_which_no_request_asks_gets_its_logits_back_untouched(changes: dict[str, Any]) -> None:
    """`min_tokens` of 3 are there already, and 99 is no token."""
    logits = random_logits(2)
    assert apply_processors(logits, *make_batch([changes, {}])) is logits


def test_only_rows_that_ask_are_changed_and_the_models_logits_never() -> None:
    logits = random_logits(3, torch.bfloat16)
    before = logits.clone()
    processed = apply_processors(logits, *make_batch([{}, {"presence_penalty": 1.0}, {}]))
    assert torch.equal(logits, before)
    assert torch.equal(processed[:4], before[:4].float())
    assert torch.equal(processed[8:], before[8:].float())
    assert not torch.equal(processed[4:8], before[4:8].float())


def test_a_distribution_counts_the_drafts_before_it_as_output() -> None:
    processed = apply_processors(
        torch.zeros(K + 1, VOCAB), *make_batch([{"frequency_penalty": 1.0, "presence_penalty": 0.25}])
    )
    expected = torch.zeros(K + 1, VOCAB)
    expected[:, 4] = -1.25
    expected[:, 3] = torch.tensor([-2.25, -2.25, -3.25, -3.25])
    expected[:, 5] = torch.tensor([0.0, -1.25, -1.25, -2.25])
    assert torch.equal(processed, expected)


def test_repetition_divides_what_is_positive_and_multiplies_what_is_not() -> None:
    logits = torch.stack([torch.ones(VOCAB), -torch.ones(VOCAB), torch.ones(VOCAB), torch.ones(VOCAB)])
    processed = apply_processors(logits, *make_batch([{"repetition_penalty": 2.0}]))
    seen = torch.zeros(K + 1, VOCAB, dtype=torch.bool)
    seen[:, 1:5] = True
    seen[1:, 5] = True
    assert torch.equal(processed, torch.where(seen, torch.where(logits > 0, logits / 2, logits * 2), logits))


def test_a_bias_comes_before_the_penalties() -> None:
    """A token of the prompt with a bias of 3: 1 becomes 4, which the penalty halves; the other way round it is 3.5."""
    processed = apply_processors(
        torch.ones(K + 1, VOCAB), *make_batch([{"logit_bias": {2: 3.0}, "repetition_penalty": 2.0}])
    )
    assert processed[:, 2].tolist() == [2.0] * (K + 1)


def test_many_penalised_rows_get_the_same_as_one() -> None:
    num_rows = 11
    changes = {"repetition_penalty": 1.3, "frequency_penalty": 0.5}
    alone = apply_processors(random_logits(1), *make_batch([changes]))
    together = apply_processors(random_logits(1).repeat(num_rows, 1), *make_batch([changes] * num_rows))
    assert torch.equal(together, alone.repeat(num_rows, 1))


def test_a_request_at_the_index_of_another_begins_without_its_counts() -> None:
    metadata, requests = make_batch([{"frequency_penalty": 1.0}])
    apply_processors(torch.zeros(K + 1, VOCAB), metadata, requests)
    sampling = SamplingParams(temperature=0.0, frequency_penalty=1.0)
    requests.update(SchedulerOutput(1, [], [NewRequest("next", [8, 9], 1, sampling, (0,), 0)], ["0"]))
    assert requests.records["next"].index == int(metadata.req_idx[0])
    position = np.array([2])
    after = Rows(["next"], metadata.req_idx, np.array([0]), position)
    assert apply_processors(torch.zeros(1, VOCAB), after, requests)[0].tolist() == [
        -float(i == 9) for i in range(VOCAB)
    ]


def test_tokens_are_counted_once_however_often_a_row_is_read() -> None:
    """Drafts of the first step are not counted: of these one was accepted, and another token follows it."""
    metadata, requests = make_batch([{"frequency_penalty": 1.0}])
    for _ in range(2):
        apply_processors(torch.zeros(K + 1, VOCAB), metadata, requests)
    requests.state.tokens[metadata.req_idx[0], 6:9] = torch.tensor([5, 7, 1])
    position = np.array([8])
    after = Rows(["0"], metadata.req_idx, np.array([1]), position)
    found = apply_processors(torch.zeros(2, VOCAB), after, requests)
    expected = torch.zeros(2, VOCAB)
    expected[:, [3, 4, 5, 7]] = torch.tensor([-2.0, -1.0, -1.0, -1.0])
    expected[1, 1] = -1.0
    assert torch.equal(found, expected)


def test_stop_tokens_are_hidden_up_to_min_tokens_even_with_a_bias() -> None:
    changes = {"min_tokens": 5, "stop_token_ids": (7,), "logit_bias": {7: 100.0, 8: 2.0}}
    processed = apply_processors(torch.zeros(K + 1, VOCAB), *make_batch([changes]))
    assert processed[:, 0].isinf().tolist() == processed[:, 7].isinf().tolist() == [True, True, False, False]
    assert processed[2:, 7].tolist() == [100.0, 100.0]
    assert processed[:, 8].tolist() == [2.0] * 4


def test_penalties_are_told_the_most_drafts_of_their_rows_wherever_that_row_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """By which kernels are launched: with fewer, the logits behind a row's last drafts would stay as they are."""
    metadata, requests = make_batch([{"presence_penalty": 1.0}, {}, {"presence_penalty": 0.5}])
    metadata.num_draft[:2] = 1, K + 2
    seen, ops = [], CpuStepOps()
    monkeypatch.setattr(ops, "penalise", lambda logits, rows, state: seen.append(rows))
    apply_processors(random_logits(3), metadata, requests, ops)
    assert [rows.most_draft for rows in seen] == [K]
    assert seen[0].numbers[1:].tolist() == [[0, 2], [3, 3], [1, K], [0, K + 5]]


def hidden(changes: dict[str, Any]) -> list[list[int]]:
    """The hidden tokens of a row and its drafts 5, 3, 5 behind the output 3, 4, 3."""
    processed = apply_processors(torch.zeros(K + 1, VOCAB), *make_batch([changes]))
    return [row.isneginf().nonzero()[:, 0].tolist() for row in processed]


def test_all_tokens_but_those_allowed_are_hidden() -> None:
    processed = apply_processors(random_logits(2), *make_batch([{"allowed_token_ids": (2, 9)}, {}]))
    assert processed[: K + 1].isfinite().nonzero()[:, 1].tolist() == [2, 9] * (K + 1)
    assert torch.equal(processed[:, [2, 9]], random_logits(2)[:, [2, 9]])
    assert torch.equal(processed[K + 1 :], random_logits(2)[K + 1 :])


def test_a_bias_does_not_bring_back_a_token_that_is_not_allowed() -> None:
    assert hidden({"allowed_token_ids": (2, 9), "logit_bias": {4: 100.0}})[0] == [0, 1, 3, 4, 5, 6, 7, 8, 10]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (((7,),), [[7]] * 4),
        (((3, 7),), [[7], [], [7], []]),
        (((4, 3, 7), (9, 3, 7), (3, 4, 3, 8)), [[7, 8], [], [], []]),
        (((4, 3, 5, 7),), [[], [7], [], []]),
        (((3, 5, 3, 5, 7),), [[], [], [], [7]]),
        # The prompt 1, 2, 2 is no part of the output.
        (((2, 3, 4, 3, 7), (2, 2, 7)), [[], [], [], []]),
        # Two words with the same end, one of which is there.
        (((3, 7), (5, 7)), [[7]] * 4),
    ],
)
def test_a_bad_words_last_token_is_hidden_behind_the_others_in_the_output_or_the_drafts(
    words: tuple[tuple[int, ...], ...], expected: list[list[int]]
) -> None:
    assert hidden({"bad_words_token_ids": words}) == expected


def entry_of(logits: torch.Tensor, num_top: int, token: int) -> TokenLogprobs:
    """What a row without drafts gets that chose `token`."""
    pending = PendingLogprobs.of(
        logits, torch.tensor([token]), rows=[2], lens=[1], num_top=[num_top], named=[[]], ops=OPS
    )
    return pending.entries([[], [], [token]])[2][0]


def test_ranks_count_what_is_at_least_as_likely_and_positions_among_the_most_likely() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, :4] = torch.tensor([1.0, 3.0, 3.0, 5.0])
    entry = entry_of(logits, 2, 0)
    assert entry.token_ids[:2] == [0, 3]
    assert entry.ranks == [4, 1, 2]
    entry = entry_of(logits, 2, 3)
    assert (entry.token_ids[0], entry.ranks) == (3, [1, 2])
    entry = entry_of(logits, 3, 1)
    assert (entry.token_ids, entry.ranks) == ([1, 3, 2], [2, 1, 3])


def test_each_row_gets_the_entries_of_its_own_tokens_though_some_of_its_drafts_are_rejected() -> None:
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0))
    chosen = [3, 4, 5, 6, 7]
    pending = PendingLogprobs.of(
        logits, torch.tensor(chosen), [1, 3], lens=[3, 2], num_top=[0, 2], named=[[], []], ops=OPS
    )
    found = pending.entries([[9], [3], [8, 8], [6, 7]])
    own = logits.log_softmax(dim=1)
    assert {row: [entry.token_ids[0] for entry in entries] for row, entries in found.items()} == {1: [3], 3: [6, 7]}
    first, last = found[1][0], found[3][1]
    assert (len(first.token_ids), len(last.token_ids) >= 2) == (1, True)
    torch.testing.assert_close(torch.tensor([first.logprobs[0], last.logprobs[0]]), own[[0, 4], [3, 7]])


def test_rows_get_the_tokens_that_their_requests_name_in_place_of_the_likeliest() -> None:
    """One row names two tokens, one of which it chose once; the other wants the likeliest."""
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1))
    chosen = [3, 4, 5, 6]
    named: list[list[int]] = [[], [5, 1]]
    pending = PendingLogprobs.of(
        logits, torch.tensor(chosen), [0, 2], lens=[2, 2], num_top=[1, 0], named=named, ops=OPS
    )
    found = pending.entries([[3, 4], [], [5, 6]])
    own = logits.log_softmax(dim=1)
    assert [entry.token_ids for entry in found[2]] == [[5, 1], [6, 5, 1]]
    assert {len(entry.token_ids) for entry in found[0]} <= {1, 2}
    torch.testing.assert_close(torch.tensor(found[2][1].logprobs), own[3, [6, 5, 1]])
    assert found[2][1].ranks == [int((own[3] >= own[3, token]).sum()) for token in (6, 5, 1)]


def test_more_logprobs_than_the_vocabulary_has_are_all_of_it() -> None:
    assert sorted(entry_of(random_logits(1)[:1], 20, 4).token_ids) == list(range(VOCAB))
