"""On a CPU a row whose answer ends with the step proposes no drafts, and every other row proposes as it would have."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import pytest

from dflash_backend import LLM
from dflash_backend.core.plan import DraftOutput, SchedulerOutput
from dflash_backend.core.request import Request
from dflash_backend.messages import StructuredOutputs
from dflash_backend.worker.step_ops import CpuStepOps
from load_tests.prompts import load_prompts
from tests.core.toy_engine import make_config, make_request
from tests.worker.engines import Outputs, engine, on_device_runner


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Of their answers the drafter guesses most."""
    encode = LLM(draft="").tokenizer.encode
    return [encode(row.prompt) for row in load_prompts(6)]


@dataclass
class Watched:
    """What each step's plan asks to draft of rows that yield tokens, and what was drafted, by request."""

    monkeypatch: pytest.MonkeyPatch
    asked: dict[str, tuple[int, int]] = field(default_factory=dict)
    made: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        store = CpuStepOps.store_drafts

        def note(ops: CpuStepOps, drafts: Any, batch: Any, state: Any) -> None:
            self.made |= zip(batch.req_idx.tolist(), batch.num_next_draft.tolist(), strict=True)
            store(ops, drafts, batch, state)

        self.monkeypatch.setattr(CpuStepOps, "store_drafts", note)

    def follow(self, runner: Any) -> None:
        submit, collect_drafts = runner.submit, runner.collect_drafts

        def submitted(plan: SchedulerOutput) -> None:
            self.plan = plan
            submit(plan)

        def collected(ended: Collection[str]) -> DraftOutput:
            self.made.clear()
            drafts: DraftOutput = collect_drafts(ended)
            index = {name: record.index for name, record in runner.requests.records.items()}
            self.asked = {
                row.request_id: (row.num_next_draft, self.made.get(index[row.request_id], 0))
                for row in self.plan.rows
                if row.num_next_draft
            }
            return drafts

        self.monkeypatch.setattr(runner, "submit", submitted)
        self.monkeypatch.setattr(runner, "collect_drafts", collected)


def ways_to_end(stop: int) -> list[dict[str, Any]]:
    """Parameters of six requests; `stop` is a token that comes."""
    return [
        {"max_tokens": 21, "ignore_eos": True},
        {"max_tokens": 25, "stop_token_ids": [stop]},
        {"max_tokens": 25, "stop_token_ids": [stop], "min_tokens": 12},
        {"max_tokens": 17, "temperature": 0.8, "seed": 5},
        {"max_tokens": 40, "ignore_eos": True, "temperature": 1.0, "seed": 6},
        {"max_tokens": 23, "num_speculative_tokens": 2},
    ]


@pytest.mark.parametrize("chunk", [None, 16])
@pytest.mark.usefixtures("single_thread")
def test_rows_that_end_propose_nothing_and_all_others_what_the_plan_asks(
    prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, chunk: int | None
) -> None:
    """The oracle is the core, which ends the requests. Chunks have rows that choose no token."""
    built = engine(max_num_seqs=4, kv_cache_gb=0.2, max_model_len=256, max_prefill_tokens_per_step=chunk)
    first = Outputs(built)
    first.add("0", prompts[0], max_tokens=12, temperature=0.0, ignore_eos=True)
    tokens = first.finish()["0"]
    watched = Watched(monkeypatch)
    watched.follow(built.runner)
    outputs = Outputs(built)
    for number, sampling in enumerate(ways_to_end(tokens[5])):
        prompt = prompts[0] if number < 3 else prompts[number]
        outputs.add(str(number), prompt, eos_token_ids=(tokens[9],), **({"temperature": 0.0} | sampling))
    ended, went_on = set(), 0
    while outputs.core.has_unfinished():
        outputs.step()
        outputs.core.collect_drafts()
        for name, (asked, made) in watched.asked.items():
            # A request that was preempted meanwhile has not ended either.
            has_ended = name in outputs.reasons
            assert made == (0 if has_ended else asked), (name, asked)
            ended |= {name} if has_ended else set()
            went_on += not has_ended
    assert len(outputs.reasons) == 6
    assert {outputs.reasons[name] for name in ended} == {"stop", "length"}, ended
    assert went_on >= 10


@pytest.mark.usefixtures("single_thread")
def test_the_answers_are_those_of_steps_that_draft_for_every_row(prompts: list[list[int]]) -> None:
    """Those of a GPU, where the host learns of a step's tokens when the drafts are made."""
    texts = []
    for of_device in (False, True):
        built = engine(max_num_seqs=4, kv_cache_gb=0.2, max_model_len=256)
        outputs = Outputs(on_device_runner(built, overlap=False, padded=False) if of_device else built)
        for number, sampling in enumerate(ways_to_end(0)):
            outputs.add(str(number), prompts[number], eos_token_ids=(1,), **({"temperature": 0.0} | sampling))
        texts.append(outputs.finish())
    assert texts[0] == texts[1]


PROMPT = [5, 6]


def appended(tokens: list[int], num_before: int, max_model_len: int, **sampling: Any) -> tuple[int, str | None]:
    """How many of a step's tokens a request keeps that has yielded some before, and why its answer ends there."""
    request = Request.from_generation_request(make_request("a", PROMPT, **sampling), make_config(), 0, 0.0)
    request.token_ids += [8] * num_before
    kept, reason = request.append(tokens, max_model_len)
    assert request.token_ids == [*PROMPT, *[8] * num_before, *kept]
    assert kept == tokens[: len(kept)]
    return len(kept), reason


@pytest.mark.parametrize(
    ("sampling", "tokens", "num_before", "expected"),
    [
        ({"max_tokens": 5}, [8, 8], 2, (2, None)),
        ({"max_tokens": 5}, [8, 8, 8, 8], 2, (3, "length")),
        ({"max_tokens": 5}, [8, 2, 8], 2, (2, "stop")),
        ({"max_tokens": 5}, [8, 8, 2], 2, (3, "stop")),
        ({"max_tokens": 4}, [8, 8, 2], 2, (2, "length")),
        ({"max_tokens": 9, "ignore_eos": True}, [8, 2, 8], 0, (3, None)),
        ({"max_tokens": 9, "ignore_eos": True, "stop_token_ids": [2]}, [8, 2, 8], 0, (2, "stop")),
        ({"max_tokens": 9, "min_tokens": 3}, [8, 2, 8, 2, 8], 0, (4, "stop")),
        ({"max_tokens": 9, "min_tokens": 3}, [8, 8, 2], 0, (3, "stop")),
        ({"max_tokens": 9, "min_tokens": 3, "structured_outputs": "json"}, [2], 0, (1, "stop")),
        ({"max_tokens": 9, "ignore_eos": True, "structured_outputs": "json"}, [2], 0, (1, "stop")),
    ],
)
def test_an_answer_ends_at_its_first_stop_or_at_its_length(
    sampling: dict[str, Any], tokens: list[int], num_before: int, expected: tuple[int, str | None]
) -> None:
    if sampling.pop("structured_outputs", None):
        sampling["structured_outputs"] = StructuredOutputs("json", "{}")
    assert appended(tokens, num_before, 128, eos_token_ids=(2,), **sampling) == expected


def test_a_lower_limit_than_the_requests_own_ends_an_answer_sooner() -> None:
    assert appended([8, 8, 8], 3, 5 + len(PROMPT), max_tokens=9) == (2, "length")
    assert appended([8, 8, 8], 3, 50, max_tokens=9) == (3, None)
