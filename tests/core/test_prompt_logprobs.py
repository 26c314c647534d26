"""Log-probabilities of prompts in the core: all positions are computed, and each is sent once."""

from __future__ import annotations

from dflash_backend.core.engine import EngineCore
from dflash_backend.core.plan import ModelRunnerOutput, RequestResult, SchedulerOutput
from dflash_backend.core.request import Request
from dflash_backend.messages import TokenLogprobs
from tests.core.toy_engine import PROMPT, crowd, make_config, make_request
from tests.core.toy_worker import ToyWorker


def entry(position: int) -> TokenLogprobs:
    """Stands for the log-probability of the token at this position."""
    return TokenLogprobs([position], [-0.5], [1])


class PromptWorker(ToyWorker):
    """A toy that answers the rows of requests that ask with an entry for each position of the prompt behind theirs."""

    def submit(self, plan: SchedulerOutput) -> None:
        super().submit(plan)
        self.rows = {row.request_id: row for row in plan.rows}
        new = {request.request_id: request for request in plan.new_requests}
        self.news = {**getattr(self, "news", {}), **new}

    def collect_results(self) -> ModelRunnerOutput:
        result = super().collect_results()
        return ModelRunnerOutput(result.step_id, [self._with_prompt(row) for row in result.rows])

    def _with_prompt(self, result: RequestResult) -> RequestResult:
        row, new = self.rows[result.request_id], self.news[result.request_id]
        if new.sampling.prompt_logprobs is None:
            return result
        end = min(row.num_computed + row.num_new + 1, new.num_prompt_tokens)
        entries = [entry(position) for position in range(row.num_computed + 1, end)]
        return RequestResult(result.request_id, result.token_ids, result.num_accepted, None, entries)


def sent(core: EngineCore) -> dict[str, list[int]]:
    """The positions that each request was sent, once all have ended."""
    found: dict[str, list[int]] = {}
    while core.has_unfinished():
        for delta in core.step().deltas:
            found.setdefault(delta.request_id, []).extend(one.token_ids[0] for one in delta.prompt_logprobs)
    return found


def test_they_come_with_the_chunks_that_compute_them() -> None:
    config = make_config(max_num_batched_tokens=12)
    core = EngineCore(config, PromptWorker(config))
    prompt = [*range(30, 70)]
    core.add_request(make_request("r", prompt, max_tokens=2, prompt_logprobs=0))
    first = core.step().deltas
    assert [delta.token_ids for delta in first] == [[]]
    assert [one.token_ids[0] for one in first[0].prompt_logprobs] == [*range(1, len(first[0].prompt_logprobs) + 1)]
    rest = sent(core)["r"]
    assert len(first[0].prompt_logprobs) + len(rest) == len(prompt) - 1


def test_each_comes_once_though_requests_are_preempted_and_find_their_blocks() -> None:
    config = make_config(num_blocks=16)
    core = EngineCore(config, PromptWorker(config))
    requests = crowd(prompt_logprobs=0)
    for request in requests:
        core.add_request(request)
    found = sent(core)
    assert core.stats().num_preemptions > 0
    assert found == {request.request_id: [*range(1, len(PROMPT) + 1)] for request in requests}


def test_what_is_computed_again_is_not_sent_again() -> None:
    request = Request.from_generation_request(make_request("r", PROMPT, prompt_logprobs=0), make_config(), 0, 0.0)
    first, again = [entry(1), entry(2)], [entry(1), entry(2), entry(3)]
    assert request.take_prompt_logprobs(0, first) == first
    assert request.take_prompt_logprobs(0, again) == [entry(3)]
    assert request.take_prompt_logprobs(3, [entry(4)]) == [entry(4)]


def test_a_resumed_request_that_has_them_all_asks_for_none_and_takes_prefix_hits() -> None:
    request = Request.from_generation_request(make_request("r", [1, 2, 3], prompt_logprobs=0), make_config(), 0, 0.0)
    assert request.to_new_request().sampling.prompt_logprobs == 0
    request.take_prompt_logprobs(0, [entry(1), entry(2)])
    assert not request.wants_prompt_logprobs
    assert request.to_new_request().sampling.prompt_logprobs is None
