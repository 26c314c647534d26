"""The step loop on a toy worker: accounting, stop conditions, errors, deadlines, seeds and counters."""

from __future__ import annotations

import pytest
from toy_core import EOS, Engine, ToyWorker, greedy_continuation, make_config, make_request, run_alone

from dflash_backend.core.engine import EngineCore, RequestError
from dflash_backend.core.plan import RequestResult, StepPlan, StepResult
from dflash_backend.core.request import derive_seed
from dflash_backend.messages import TokenLogprobs
from dflash_backend.spec_stats import SpecDecodingStats

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize("k", [0, 1, 3])
def test_greedy_output_is_the_targets_own(k: int, seed: int) -> None:
    (output,) = Engine(make_config(num_speculative_tokens=k)).run(make_request("a", PROMPT, max_tokens=30, seed=seed))
    assert output.token_ids == greedy_continuation(PROMPT, 30)
    assert output.finish_reason == "length"


def test_a_step_without_requests_does_nothing() -> None:
    engine = Engine(make_config())
    assert engine.core.step().deltas == []
    assert engine.worker.plans == []


def test_decode_runs_the_anchor_and_all_drafts() -> None:
    engine = Engine(make_config(num_speculative_tokens=3))
    engine.run(make_request("a", PROMPT, max_tokens=9, seed=3))  # every draft stands
    prefill, first, second = engine.rows_of("a")
    assert (prefill.num_computed, prefill.num_new, prefill.num_draft, prefill.num_next_draft) == (0, 9, 0, 3)
    assert (first.num_computed, first.num_new, first.num_draft, first.num_next_draft) == (9, 1, 3, 3)
    assert (second.num_computed, second.num_new, second.num_draft) == (13, 1, 3)
    assert prefill.sample
    assert first.sample


def test_a_request_drafts_no_more_when_its_next_token_is_its_last() -> None:
    engine = Engine(make_config(num_speculative_tokens=3))
    engine.run(make_request("one", PROMPT, max_tokens=1), make_request("two", PROMPT, max_tokens=2))
    assert [row.num_next_draft for row in engine.rows_of("one")] == [0]
    assert [row.num_next_draft for row in engine.rows_of("two")] == [3, 0]


def test_accepted_tokens_past_max_tokens_are_dropped() -> None:
    (output,) = Engine(make_config()).run(make_request("a", PROMPT, max_tokens=3, seed=3))
    assert output.token_ids == greedy_continuation(PROMPT, 3)
    assert output.stats is not None
    assert output.stats.num_output_tokens == 3


def test_tokens_past_a_stop_token_are_dropped_and_the_stop_token_is_sent() -> None:
    expected = greedy_continuation(PROMPT, 30)
    stop = expected[5]
    at = expected.index(stop) + 1
    stopped = make_request("a", PROMPT, max_tokens=30, stop_token_ids=(stop,))
    ended = make_request("b", PROMPT, max_tokens=30, eos_token_ids=(stop,))
    ignoring = make_request("c", PROMPT, max_tokens=30, eos_token_ids=(stop,), ignore_eos=True)
    a, b, c = Engine(make_config()).run(stopped, ended, ignoring)
    assert (a.token_ids, a.finish_reason) == (expected[:at], "stop")
    assert (b.token_ids, b.finish_reason) == (expected[:at], "stop")
    assert (c.token_ids, c.finish_reason) == (expected, "length")


def test_no_stop_before_min_tokens() -> None:
    expected = greedy_continuation(PROMPT, 30)
    stop = expected[2]
    later = next((i + 1 for i in range(7, 30) if expected[i] == stop), 30)
    (output,) = Engine(make_config()).run(
        make_request("a", PROMPT, max_tokens=30, min_tokens=8, stop_token_ids=(stop,), seed=3)
    )
    assert output.token_ids == expected[:later]


def test_a_stop_on_the_last_allowed_token_is_a_stop() -> None:
    expected = greedy_continuation(PROMPT, 4)
    assert expected[3] not in expected[:3]
    (output,) = Engine(make_config()).run(make_request("a", PROMPT, max_tokens=4, stop_token_ids=(expected[3],)))
    assert output.finish_reason == "stop"


def test_output_ends_at_max_model_len() -> None:
    (output,) = Engine(make_config(max_model_len=20)).run(make_request("a", PROMPT, max_tokens=100))
    assert output.token_ids == greedy_continuation(PROMPT, 11)
    assert output.finish_reason == "length"


def test_stats_of_a_request_count_what_it_did() -> None:
    engine = Engine(make_config(num_speculative_tokens=3))
    engine.add(make_request("a", PROMPT, max_tokens=9, seed=3))
    engine.clock.now = 2.5
    (output,) = [engine.outputs["a"]]
    while engine.core.has_unfinished():
        engine.step()
    stats = output.stats
    assert stats is not None
    assert (stats.num_prompt_tokens, stats.num_output_tokens, stats.num_cached_tokens) == (9, 9, 0)
    assert stats.spec_decoding == SpecDecodingStats(2, 6, 6, [2, 2, 2])
    assert stats.spec_decoding.acceptance_length == 4.0
    assert stats.queue_time_s == 2.5
    total = engine.core.stats()
    assert total.spec_decoding == stats.spec_decoding
    assert (total.num_prompt_tokens, total.num_generation_tokens, total.num_steps) == (9, 9, 3)
    assert (total.num_requests_running, total.num_requests_waiting, total.kv_cache_usage) == (0, 0, 0.0)


def test_a_request_that_turns_speculation_off_never_drafts() -> None:
    engine = Engine(make_config(num_speculative_tokens=3))
    off, on = engine.run(
        make_request("off", PROMPT, num_speculative_tokens=0), make_request("on", PROMPT, num_speculative_tokens=2)
    )
    assert all(row.num_draft == row.num_next_draft == 0 for row in engine.rows_of("off"))
    assert {row.num_draft for row in engine.rows_of("on")} == {0, 2}
    assert off.token_ids == on.token_ids


@pytest.mark.parametrize(
    ("request_changes", "limit_changes", "message"),
    [
        ({"prompt": []}, {}, "the prompt is empty"),
        ({"prompt": [1] * 20}, {"max_model_len": 20}, r"20 tokens.*max_model_len \(20\); shorten it to at most 19"),
        ({"num_speculative_tokens": 4}, {}, "num_speculative_tokens is 4; this server allows 0 to 3"),
        ({"num_speculative_tokens": 1}, {"num_speculative_tokens": 0}, "this server allows 0 to 0"),
        ({"max_tokens": 100}, {"num_blocks": 10}, r"up to \d+ KV blocks of 4 tokens.*10 in all.*kv_cache_gb"),
    ],
)
def test_what_can_never_run_is_refused_with_its_numbers(
    request_changes: dict[str, object], limit_changes: dict[str, int], message: str
) -> None:
    engine = Engine(make_config(**limit_changes))
    prompt = request_changes.pop("prompt", PROMPT)
    assert isinstance(prompt, list)
    with pytest.raises(RequestError, match=message) as error:
        engine.add(make_request("a", prompt, **request_changes))
    assert error.value.status == "INVALID_ARGUMENT"
    assert not engine.core.has_unfinished()


def test_the_longest_prompt_that_is_taken_yields_one_token() -> None:
    (output,) = Engine(make_config(max_model_len=20)).run(make_request("a", [1] * 19, max_tokens=5))
    assert len(output.token_ids) == 1


@pytest.mark.parametrize("k", [0, 1, 3, 7])
@pytest.mark.parametrize("prompt_len", [1, 4, 9, 30])
@pytest.mark.parametrize("drafter_max_len", [12, 25, 128])
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_a_pool_that_admission_calls_enough_is_enough_alone(
    k: int, prompt_len: int, drafter_max_len: int, seed: int
) -> None:
    request = make_request("a", list(range(1, prompt_len + 1)), max_tokens=21, seed=seed)
    for num_blocks in range(1, 64):
        config = make_config(
            num_blocks=num_blocks,
            block_size=2,
            num_speculative_tokens=k,
            drafter_max_len=drafter_max_len,
            max_model_len=45,
            enable_prefix_caching=False,
        )
        engine = Engine(config)
        try:
            engine.add(request)
        except RequestError:
            continue
        while engine.core.has_unfinished():
            engine.step()
        assert engine.outputs["a"].token_ids == run_alone(request, config).token_ids
        return
    raise AssertionError("never admitted")


def test_a_full_queue_is_unavailable_and_queues_nothing() -> None:
    engine = Engine(make_config(max_queue_size=2, max_num_seqs=1))
    for name in "abc":
        engine.add(make_request(name, PROMPT))
    with pytest.raises(RequestError, match="3 requests wait already and max_queue_size is 2") as error:
        engine.add(make_request("d", PROMPT))
    assert error.value.status == "UNAVAILABLE"
    assert "d" not in engine.core.scheduler.waiting
    engine.step()
    with pytest.raises(RequestError, match="2 requests wait already"):
        engine.add(make_request("d", PROMPT))
    engine.core.abort(["b"])
    engine.run(make_request("d", PROMPT))


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    engine = Engine(make_config())
    engine.add(make_request("a", PROMPT))
    engine.step()
    with pytest.raises(RequestError, match="'a' is in progress"):
        engine.add(make_request("a", PROMPT))
    engine.core.abort(["a"])
    (output,) = engine.run(make_request("a", PROMPT))
    assert output.token_ids == greedy_continuation(PROMPT, 16)


def test_limits_that_cannot_hold_a_decode_row_are_refused() -> None:
    config = make_config(num_speculative_tokens=15, max_num_batched_tokens=15)
    with pytest.raises(ValueError, match=r"batched_tokens is 15 and num_speculative_tokens is 15.*at least 16"):
        EngineCore(config, ToyWorker(config))
    Engine(make_config(num_speculative_tokens=15, max_num_batched_tokens=16)).run(make_request("a", PROMPT))


def test_a_drafter_without_a_length_is_refused() -> None:
    config = make_config(drafter_max_len=0)
    with pytest.raises(ValueError, match="maximum length is 0"):
        EngineCore(config, ToyWorker(config))


def test_an_abort_frees_blocks_at_once_and_sends_nothing() -> None:
    engine = Engine(make_config(max_num_seqs=1))
    engine.add(make_request("runs", PROMPT))
    engine.add(make_request("waits", PROMPT))
    engine.step()
    sent = list(engine.outputs["runs"].token_ids)
    engine.core.abort(["runs", "waits", "never seen"])
    engine.core.check_invariants()
    assert engine.core.scheduler.kv.pool.usage == 0.0
    assert engine.core.step().deltas == []
    assert engine.outputs["runs"].token_ids == sent
    engine.run(make_request("next", PROMPT))
    assert engine.worker.held_ids == {"next"}, "the worker was told to forget what it had held, and no more"


def test_every_delta_of_a_request_with_stop_strings_has_stats_and_an_abort_ends_it() -> None:
    engine = Engine(make_config(max_num_seqs=1))
    engine.add(make_request("runs", PROMPT, stop=("x",)))
    engine.add(make_request("waits", PROMPT))
    for _ in range(2):
        engine.step()
        output = engine.outputs["runs"]
        assert output.stats is not None
        assert output.stats.num_output_tokens == len(output.token_ids) > 0
    engine.core.abort(["runs", "never seen", "runs"], {"runs": 1, "never seen": 2})
    engine.core.check_invariants()
    engine.step()
    assert engine.outputs["waits"].token_ids
    assert engine.outputs["waits"].stats is None


def test_a_deadline_ends_a_request_with_what_it_has() -> None:
    engine = Engine(make_config(max_num_seqs=1))
    engine.add(make_request("runs", PROMPT, max_tokens=50, deadline_s=2.0, seed=0))
    engine.add(make_request("waits", PROMPT, deadline_s=2.0))
    engine.add(make_request("has time", PROMPT, deadline_s=1000.0))
    engine.step()
    engine.clock.now = 1.99
    engine.step()
    assert engine.outputs["runs"].finish_reason is None
    engine.clock.now = 2.0
    engine.step()
    runs, waits = engine.outputs["runs"], engine.outputs["waits"]
    assert (runs.finish_reason, runs.token_ids) == ("abort", greedy_continuation(PROMPT, len(runs.token_ids)))
    assert runs.token_ids
    assert (waits.finish_reason, waits.token_ids) == ("abort", [])
    assert waits.stats is not None
    assert waits.stats.queue_time_s == 2.0
    while engine.core.has_unfinished():
        engine.step()
    assert engine.outputs["has time"].finish_reason == "length"


def test_the_deadline_of_a_finished_request_does_not_end_its_ids_next_user() -> None:
    engine = Engine(make_config())
    engine.run(make_request("a", PROMPT, deadline_s=5.0))
    engine.clock.now = 4.0
    engine.add(make_request("a", PROMPT, deadline_s=5.0))
    engine.clock.now = 6.0
    engine.step()
    assert engine.outputs["a"].finish_reason is None


def test_seeds_are_the_requests_own_or_follow_from_engine_seed_and_arrival() -> None:
    engine = Engine(make_config(seed=7))
    engine.run(make_request("own", PROMPT, seed=99), make_request("x", PROMPT, seed=None))
    seeds = {new.request_id: new.seed for plan in engine.worker.plans for new in plan.new_requests}
    assert seeds == {"own": 99, "x": derive_seed(7, 1)}


def test_derived_seeds_differ_and_have_63_bits() -> None:
    seeds = {derive_seed(engine_seed, arrival) for engine_seed in range(20) for arrival in range(500)}
    assert len(seeds) == 10_000
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_sampled_output_does_not_depend_on_what_else_runs() -> None:
    config = make_config(max_num_batched_tokens=13)
    requests = [
        make_request(f"r{i}", PROMPT[: 1 + i % 9], temperature=1.0, seed=i, max_tokens=20, eos_token_ids=(EOS,))
        for i in range(12)
    ]
    together = Engine(config).run(*requests)
    for request, output in zip(requests, together, strict=True):
        assert output.token_ids == run_alone(request, config).token_ids


class _TellingWorker(ToyWorker):
    """A toy that says of each token how likely it was: always the same. Counts the tokens that it yielded."""

    num_tokens = 0

    def _run(self, plan: StepPlan) -> StepResult:
        result = super()._run(plan)
        self.num_tokens += sum(len(row.token_ids) for row in result.rows)
        return StepResult(result.step_id, [self._tell(row) for row in result.rows])

    def _tell(self, row: RequestResult) -> RequestResult:
        logprobs = [TokenLogprobs([token_id], [-0.5], [1]) for token_id in row.token_ids]
        return RequestResult(row.request_id, row.token_ids, row.num_accepted, logprobs)


def test_logprobs_are_cut_with_the_tokens_at_the_end_of_a_request() -> None:
    config = make_config()
    worker = _TellingWorker(config)
    core = EngineCore(config, worker)
    continuation = greedy_continuation(PROMPT, 12)
    core.add_request(make_request("long", PROMPT, max_tokens=11))
    core.add_request(make_request("stopped", PROMPT, stop_token_ids=(continuation[5],), max_tokens=12))
    told: dict[str, list[int]] = {"long": [], "stopped": []}
    while core.has_unfinished():
        for delta in core.step().deltas:
            assert delta.logprobs is not None
            assert [entry.token_ids[0] for entry in delta.logprobs] == delta.token_ids
            told[delta.request_id] += delta.token_ids
    assert told["long"] == continuation[:11]
    assert told["stopped"] == continuation[: continuation.index(continuation[5]) + 1]
    assert worker.num_tokens > len(told["long"]) + len(told["stopped"])


def test_a_request_for_several_completions_is_refused() -> None:
    core = EngineCore(make_config(), ToyWorker(make_config()))
    with pytest.raises(RequestError, match="n is 2; the engine makes one completion of a request") as caught:
        core.add_request(make_request("a", PROMPT, n=2))
    assert caught.value.status == "INVALID_ARGUMENT"
    assert not core.has_unfinished()


class _WrongWorker:
    """Answers a step with whatever it was given."""

    overlaps = False

    def __init__(self, rows: list[RequestResult]) -> None:
        self._rows = rows
        self._step_id = 0

    def submit(self, plan: StepPlan) -> None:
        self._step_id = plan.step_id

    def reset(self) -> None:
        raise AssertionError("nothing has failed")

    def collect(self) -> StepResult:
        return StepResult(self._step_id, self._rows)


def test_an_answer_without_the_rows_of_the_plan_stops_the_engine() -> None:
    core = EngineCore(make_config(), _WrongWorker([]))
    core.add_request(make_request("a", PROMPT))
    with pytest.raises(RuntimeError, match="the worker answered step 1 with 0 rows"):
        core.step()


@pytest.mark.parametrize(
    "rows",
    [
        [RequestResult("b", [1], 0)],
        [RequestResult("a", [], 0)],
        [RequestResult("a", [1, 2], 1)],
        [RequestResult("a", [1, 2], 0)],
        [RequestResult("a", [1], 0, [])],
    ],
)
def test_an_answer_that_does_not_fit_its_row_ends_that_request_alone(rows: list[RequestResult]) -> None:
    core = EngineCore(make_config(), _WrongWorker([*rows, RequestResult("other", [1], 0)]))
    core.add_request(make_request("a", PROMPT))
    core.add_request(make_request("other", PROMPT))
    outputs = core.step()
    (delta,) = outputs.deltas
    assert (delta.request_id, delta.token_ids) == ("other", [1])
    (failed,) = outputs.rejected
    assert (failed.request_id, failed.status) == ("a", "INTERNAL")
    assert "the worker answered" in failed.message
    core.check_invariants()
