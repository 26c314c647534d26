"""Rows that ask for more than a graph does stay in the padded step of the others, and get what they get without one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from dflash_backend.messages import StructuredOutputs
from dflash_backend.worker.batch import ForwardBatch
from dflash_backend.worker.graphs import capture_sizes
from dflash_backend.worker.runner import ModelRunner
from dflash_backend.worker.step import SpecDecodeModel
from dflash_backend.worker.step_ops import CpuStepOps
from tests.support.scale import by_night
from tests.worker.engines import Outputs, engine, on_device_runner

pytestmark = pytest.mark.usefixtures("single_thread")
COUNT, EOS = 8, (2,)
SPECIAL: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 3},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    "bias": {"logit_bias": {7: 3.0, 9: -2.0}},
    "min_tokens": {"min_tokens": 12, "stop_token_ids": tuple(range(30, 90))},
    "allowed": {"allowed_token_ids": tuple(range(5, 40)), "bad_words_token_ids": ((6, 7), (9,))},
    "filters": {"logprobs": 1, "temperature": 0.9, "seed": 5, "top_k": 9, "top_p": 0.9, "frequency_penalty": 0.2},
}
GRAMMAR = {"structured_outputs": StructuredOutputs("regex", "[a-z]{3,9}(-[0-9]{2}){1,3}")}


class Replayed:
    """A padded step as a graph runs it: with the memory of its capture, at the same addresses in each replay, and
    nothing in Python between the parts of a graph. `replays`: how often each number of rows was run."""

    def __init__(self, model: SpecDecodeModel, replays: Counter[int]) -> None:
        self._model, self._replays = model, replays
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None
        self.at = "begin"

    def verify(self, step: ForwardBatch, *_: object) -> ForwardBatch:
        assert self.at == "begin", "the first graph was queued twice"
        self.at = "verified"
        self._replays[step.num_rows] += 1
        step = self._model.verify(step)
        assert isinstance(step.logits, torch.Tensor)
        if self._kept is None:
            self._kept = step.logits, step.target_tokens
        # A graph writes to the memory that it was captured with.
        for kept, found in zip(self._kept, (step.logits, step.target_tokens), strict=True):
            kept.copy_(found)
        step.logits, step.target_tokens = self._kept
        return step

    def accept(self, step: ForwardBatch) -> None:
        assert self.at == "verified", "the second graph was queued without the first"
        self.at = "accepted"
        self._model.accept(step)

    def draft(self, step: ForwardBatch, *_: object) -> None:
        assert self.at == "accepted", "the third graph was queued without the second"
        self.at = "begin"
        self._model.draft(step)


def replaying(overlap: bool = True, **settings: Any) -> tuple[Any, Counter[int], list[int]]:
    """An engine with the steps of a GPU, its padded steps as graphs run them; how often each was run, and the rows of
    the steps that ran without."""
    built = on_device_runner(engine(**{"kv_write_guard": False, "max_num_seqs": COUNT, **settings}), overlap=overlap)
    runner, replays, without = built.runner, Counter[int](), []
    assert isinstance(runner, ModelRunner)

    def make(inputs: ForwardBatch) -> Replayed:
        return Replayed(runner.model, replays)

    runner.graphs.make(make, capture_sizes(COUNT), True, lambda message, fraction: None)
    send = runner.layouts.send_ragged
    runner.layouts.send_ragged = lambda batch: (without.append(batch), send(batch))[1]  # type: ignore[method-assign]
    return built, replays, without


def run(built: Any, special: dict[str, Any], prompts: int = 5, **more: Any) -> Outputs:
    """Eight requests together, the fourth of which is special."""
    outputs = Outputs(built)
    for i in range(COUNT):
        sampling = {"temperature": (0.0, 0.8)[i % 2], "seed": i, "ignore_eos": i != 3, **(special if i == 3 else {})}
        outputs.add(str(i), list(range(5 + i, 5 + i + prompts)), eos_token_ids=EOS, max_tokens=20, **sampling, **more)
    outputs.finish()
    assert outputs.failed == []
    return outputs


@pytest.fixture(scope="module")
def plain(settings: dict[str, Any]) -> Callable[[bool], tuple[Outputs, int]]:
    """What the same requests get where none is special, which is run once, and how often their graph was replayed."""

    @cache
    def once(overlap: bool) -> tuple[Outputs, int]:
        built, replays, _ = replaying(overlap, **{**settings, "max_num_seqs": COUNT})
        return run(built, {}), replays[COUNT]

    return once


def assert_same_logprobs(found: Outputs, expected: Outputs) -> None:
    ids = {key: [entry.token_ids for entry in entries] for key, entries in found.logprobs.items()}
    assert ids == {key: [entry.token_ids for entry in entries] for key, entries in expected.logprobs.items()}
    for key, entries in found.logprobs.items():
        for entry, other in zip(entries, expected.logprobs[key], strict=True):
            assert entry.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize("overlap", [by_night(False), True])
@pytest.mark.parametrize("name", SPECIAL)
def test_a_special_request_leaves_the_others_in_their_graph_and_gets_what_it_gets_without_one(
    settings: dict[str, Any], plain: Callable[[bool], tuple[Outputs, int]], name: str, overlap: bool
) -> None:
    expected = run(engine(**{**settings, "max_num_seqs": COUNT}), SPECIAL[name])
    others, num_replays = plain(overlap)
    built, replays, without = replaying(overlap, **{**settings, "max_num_seqs": COUNT})
    found = run(built, SPECIAL[name])
    assert found.tokens == expected.tokens
    assert found.reasons == expected.reasons
    assert_same_logprobs(found, expected)
    assert all(not batch.decode_only for batch in without), "every step of decode rows alone is a graph"
    for key in others.tokens.keys() - {"3"}:
        assert found.tokens[key] == others.tokens[key]
    assert replays[COUNT] >= num_replays > 0


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [by_night(False), True])
def test_a_request_with_a_grammar_leaves_the_others_in_their_graph(overlap: bool) -> None:
    sizes = {"kv_cache_gb": 0.2, "max_num_seqs": COUNT, "max_model_len": 128}
    special = GRAMMAR | {"logprobs": 2, "repetition_penalty": 1.1}
    for asked in (GRAMMAR, special):
        expected = run(engine(**sizes), asked, prompts=40)
        built, replays, without = replaying(overlap, **sizes)
        found = run(built, asked, prompts=40)
        assert found.tokens == expected.tokens
        assert found.reasons == expected.reasons
        assert_same_logprobs(found, expected)
        assert set(found.logprobs) == ({"3"} if "logprobs" in asked else set())
        assert all(not batch.decode_only for batch in without)
        assert replays[COUNT] > 0


def test_every_row_special_in_its_own_way_beside_one_that_is_not(settings: dict[str, Any]) -> None:
    texts = []
    for built in (
        engine(**{**settings, "max_num_seqs": COUNT}),
        replaying(**{**settings, "max_num_seqs": COUNT})[0],
    ):
        outputs = Outputs(built)
        for i, name in enumerate([*SPECIAL, None]):
            sampling = {"temperature": 0.0, "ignore_eos": True, **(SPECIAL[name] if name else {})}
            outputs.add(str(i), [9 + i] * (1 + 2 * i), k=(None, 0, 3)[i % 3], max_tokens=10 + i, **sampling)
        texts.append((outputs.finish(), outputs.reasons))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("others", [0, 1])
def test_a_step_whose_rows_all_choose_later_chooses_once(others: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU: the target's own tokens and those after penalties take a pass over the vocabulary each."""
    widths: list[int] = []
    argmax = CpuStepOps.argmax
    counted = staticmethod(lambda logits: (widths.append(len(logits)), argmax(logits))[1])
    monkeypatch.setattr(CpuStepOps, "argmax", counted)
    built = engine(max_num_seqs=4, max_model_len=128, kv_cache_gb=0.1)
    outputs = Outputs(built)
    for i in range(3):
        penalty = {} if i < others else {"frequency_penalty": 0.3}
        outputs.add(str(i), list(range(5 + i, 12 + i)), k=0, max_tokens=8, temperature=0.0, ignore_eos=True, **penalty)
    outputs.finish()
    # Of three requests' 8 tokens each: once, and with one that is not penalised the other two's again.
    assert sum(widths) == (24 if others == 0 else 24 + 16)


def test_rows_that_all_ask_for_log_probabilities_alone_have_the_tokens_of_rows_that_do_not() -> None:
    texts = []
    for asked in ({}, {"logprobs": 2}):
        outputs = Outputs(engine(max_num_seqs=4, max_model_len=128, kv_cache_gb=0.1))
        for i in range(3):
            prompt, temperature = list(range(5 + i, 12 + i)), (0.0, 0.9, 0.0)[i]
            outputs.add(str(i), prompt, max_tokens=8, temperature=temperature, seed=i, ignore_eos=True, **asked)
        texts.append(outputs.finish())
    assert texts[0] == texts[1]
    assert any(token for tokens in texts[0].values() for token in tokens)
