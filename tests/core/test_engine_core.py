"""The step loop on a toy worker: accounting, stop conditions, errors, deadlines, seeds and counters."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import replace

import pytest

from checks.core_state import check_core
from dflash_backend.core.engine import EngineCore, RequestError
from dflash_backend.core.plan import DraftOutput, ModelRunnerOutput, RequestResult
from dflash_backend.core.request import derive_seed
from dflash_backend.messages import ErrorStatus, RequestFailed, TokenLogprobs
from dflash_backend.spec_stats import SpecDecodingStats
from tests.core.toy_engine import PROMPT, Engine, make_config, make_request
from tests.core.toy_model import ALL_ACCEPTED, NONE_ACCEPTED, expected_output, greedy_continuation
from tests.core.toy_worker import ToyWorker


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize(("k", "budget"), [(0, 256), (1, 256), (3, 256), (15, 16)])
def test_greedy_output_is_the_targets_own(k: int, budget: int, seed: int) -> None:
    engine = Engine(make_config(num_speculative_tokens=k, max_num_batched_tokens=budget))
    (output,) = engine.run(make_request("a", PROMPT, max_tokens=30, seed=seed))
    assert output.token_ids == greedy_continuation(PROMPT, 30)
    assert output.finish_reason == "length"


def test_a_step_without_requests_does_nothing() -> None:
    engine = Engine(make_config())
    assert engine.core.step().deltas == []
    assert engine.worker.plans == []


def test_decode_runs_the_anchor_and_all_drafts() -> None:
    engine = Engine(make_config())
    engine.run(make_request("a", PROMPT, max_tokens=9, seed=ALL_ACCEPTED))
    rows = [(row.num_computed, row.num_new, row.num_draft, row.num_next_draft) for row in engine.rows_of("a")]
    assert rows == [(0, 9, 0, 3), (9, 1, 3, 3), (13, 1, 3, 3)]
    assert all(row.sample for row in engine.rows_of("a"))


def test_a_request_drafts_no_more_when_its_next_token_is_its_last() -> None:
    engine = Engine(make_config())
    engine.run(make_request("one", PROMPT, max_tokens=1), make_request("two", PROMPT, max_tokens=2))
    assert [row.num_next_draft for row in engine.rows_of("one")] == [0]
    assert [row.num_next_draft for row in engine.rows_of("two")] == [3, 0]


@pytest.mark.parametrize(
    ("max_model_len", "prompt_len", "max_tokens", "num_output"), [(128, 9, 3, 3), (20, 9, 100, 11), (20, 19, 5, 1)]
)
def test_accepted_tokens_past_a_limit_are_dropped(
    max_model_len: int, prompt_len: int, max_tokens: int, num_output: int
) -> None:
    prompt = [1] * prompt_len
    engine = Engine(make_config(max_model_len=max_model_len))
    (output,) = engine.run(make_request("a", prompt, max_tokens=max_tokens, seed=ALL_ACCEPTED))
    assert (output.token_ids, output.finish_reason) == (greedy_continuation(prompt, num_output), "length")
    assert output.stats.num_output_tokens == num_output


@pytest.mark.parametrize(
    ("stop_field", "stop_at", "sampling", "num_output", "finish_reason"),
    [
        ("stop_token_ids", 5, {}, 6, "stop"),
        ("eos_token_ids", 5, {}, 6, "stop"),
        ("eos_token_ids", 5, {"ignore_eos": True}, 30, "length"),
        ("stop_token_ids", 3, {"max_tokens": 4}, 4, "stop"),
        ("stop_token_ids", 2, {"min_tokens": 8}, 30, "length"),
        ("stop_token_ids", 3, {"min_tokens": 8}, 8, "stop"),  # it comes again as the eighth
    ],
)
def test_a_stop_token_is_sent_and_ends_the_output(
    stop_field: str, stop_at: int, sampling: dict[str, object], num_output: int, finish_reason: str
) -> None:
    expected = greedy_continuation(PROMPT, 30)
    request = make_request("a", PROMPT, **({"max_tokens": 30, stop_field: (expected[stop_at],)} | sampling))
    (output,) = Engine(make_config()).run(request)
    assert (output.token_ids, output.finish_reason) == (expected[:num_output], finish_reason)


def test_stats_of_a_request_count_what_it_did() -> None:
    engine = Engine(make_config())
    engine.add(make_request("a", PROMPT, max_tokens=9, seed=ALL_ACCEPTED))
    engine.clock.now = 2.5
    engine.run()
    stats = engine.outputs["a"].stats
    assert (stats.num_prompt_tokens, stats.num_output_tokens, stats.num_cached_tokens) == (9, 9, 0)
    assert stats.spec_decoding == SpecDecodingStats(2, 6, 6, [2, 2, 2])
    assert stats.spec_decoding.acceptance_length == 4.0
    assert stats.queue_time_s == 2.5
    total = engine.core.stats()
    assert total.spec_decoding == stats.spec_decoding
    assert (total.num_prompt_tokens, total.num_generation_tokens, total.num_steps) == (9, 9, 3)
    assert (total.num_requests_running, total.num_requests_waiting, total.kv_cache_usage) == (0, 0, 0.0)


def test_a_request_that_turns_speculation_off_never_drafts() -> None:
    engine = Engine(make_config())
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
        ({"n": 2}, {}, "n is 2; the engine makes one completion of a request"),
        ({"max_tokens": 100}, {"num_blocks": 10}, r"up to \d+ KV blocks of 4 tokens.*10 in all.*kv_cache_gb"),
    ],
)
def test_what_can_never_run_is_refused_with_its_numbers(
    request_changes: dict[str, object], limit_changes: dict[str, int], message: str
) -> None:
    engine = Engine(make_config(**limit_changes))
    with pytest.raises(RequestError, match=message) as error:
        engine.add(make_request("a", **({"prompt": PROMPT} | request_changes)))
    assert error.value.status == "INVALID_ARGUMENT"
    assert not engine.core.has_unfinished()


@pytest.mark.parametrize("k", [0, 1, 3, 7])
@pytest.mark.parametrize("prompt_len", [1, 4, 9, 30])
@pytest.mark.parametrize("drafter_max_len", [12, 25, 128])
@pytest.mark.parametrize("lookahead_base", [1, 0, None])
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_a_pool_that_admission_calls_enough_is_enough_alone(
    k: int, prompt_len: int, drafter_max_len: int, lookahead_base: int | None, seed: int
) -> None:
    request = make_request("a", list(range(1, prompt_len + 1)), max_tokens=21, seed=seed)
    for num_blocks in range(1, 64):
        config = make_config(
            num_blocks=num_blocks,
            block_size=2,
            num_speculative_tokens=k,
            lookahead_base=lookahead_base,
            drafter_max_len=drafter_max_len,
            max_model_len=45,
            enable_prefix_caching=False,
        )
        engine = Engine(config)
        with contextlib.suppress(RequestError):
            assert engine.run(request)[0].token_ids == expected_output(request, config)[0]
            return
    raise AssertionError("never admitted")


def test_a_full_queue_is_unavailable_and_queues_nothing() -> None:
    engine = Engine(make_config(max_queue_size=2, max_num_seqs=1))
    engine.add(*[make_request(name, PROMPT) for name in "abc"])
    with pytest.raises(RequestError, match="3 requests wait already and max_queue_size is 2") as error:
        engine.add(make_request("d", PROMPT))
    assert error.value.status == "UNAVAILABLE"
    assert "d" not in engine.scheduler.waiting
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_speculative_tokens": 15, "max_num_batched_tokens": 15},
            r"batched_tokens is 15 and num_speculative_tokens is 15.*at least 16",
        ),
        ({"drafter_max_len": 0}, "maximum length is 0"),
    ],
)
def test_limits_that_cannot_hold_a_decode_row_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(make_config(**changes))


def test_an_abort_frees_blocks_at_once_and_sends_nothing() -> None:
    engine = Engine(make_config(max_num_seqs=1))
    engine.add(make_request("runs", PROMPT), make_request("waits", PROMPT))
    engine.step()
    sent = list(engine.outputs["runs"].token_ids)
    engine.core.abort(["runs", "waits", "never seen"])
    check_core(engine.core)
    assert engine.pool.usage == 0.0
    assert engine.core.step().deltas == []
    assert engine.outputs["runs"].token_ids == sent
    engine.run(make_request("next", PROMPT))
    assert engine.worker.held_ids == {"next"}, "the worker was told to remove what it had held, and no more"


def test_every_delta_of_a_request_with_stop_strings_has_stats_and_an_abort_ends_it() -> None:
    engine = Engine(make_config(max_num_seqs=1))
    engine.add(make_request("runs", PROMPT, stop=("x",)), make_request("waits", PROMPT))
    for _ in range(2):
        engine.step()
        output = engine.outputs["runs"]
        assert output.stats.num_output_tokens == len(output.token_ids) > 0
    engine.core.abort(["runs", "never seen", "runs"], {"runs": 1, "never seen": 2})
    check_core(engine.core)
    engine.clock.now = 1.5
    engine.step()
    assert engine.outputs["waits"].token_ids
    assert engine.outputs["waits"].stats.queue_time_s == 1.5, "the first tokens say how long it waited"
    engine.step()
    assert engine.outputs["waits"].finish_reason is None
    assert engine.outputs["waits"].stats is None


def test_a_deadline_ends_a_request_with_what_it_has() -> None:
    engine = Engine(make_config(max_num_seqs=1))
    engine.add(make_request("runs", PROMPT, max_tokens=50, deadline_s=2.0, seed=NONE_ACCEPTED))
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
    assert waits.stats.queue_time_s == 2.0
    engine.run()
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


class _LogprobsWorker(ToyWorker):
    """A toy that says of each token how likely it was: always the same. Counts the tokens that it yielded."""

    num_tokens = 0

    def _accept(self, *args: object) -> RequestResult:
        result = super()._accept(*args)
        self.num_tokens += len(result.token_ids)
        return replace(result, logprobs=[TokenLogprobs([token_id], [-0.5], [1]) for token_id in result.token_ids])


def test_logprobs_end_with_the_tokens_of_a_request() -> None:
    worker = _LogprobsWorker(make_config())
    core = EngineCore(make_config(), worker)
    continuation = greedy_continuation(PROMPT, 12)
    core.add_request(make_request("long", PROMPT, max_tokens=11))
    core.add_request(make_request("stopped", PROMPT, stop_token_ids=(continuation[5],), max_tokens=12))
    outputs: dict[str, list[int]] = {"long": [], "stopped": []}
    while core.has_unfinished():
        for delta in core.step().deltas:
            assert [entry.token_ids[0] for entry in delta.logprobs] == delta.token_ids
            outputs[delta.request_id] += delta.token_ids
    assert outputs == {"long": continuation[:11], "stopped": continuation[:6]}
    assert worker.num_tokens > 11 + 6


class _WrongWorker(ToyWorker):
    """Answers a step with these rows, whatever they are."""

    def __init__(self, *rows: RequestResult) -> None:
        super().__init__(make_config())
        self._rows = list(rows)

    def reset(self) -> None:
        raise AssertionError("nothing has failed")

    def collect_results(self) -> ModelRunnerOutput:
        return ModelRunnerOutput(super().collect_results().step_id, self._rows)


@pytest.mark.parametrize("status", ["INVALID_ARGUMENT", "UNAVAILABLE", "INTERNAL"])
def test_a_row_that_cannot_go_on_ends_with_its_own_status(status: ErrorStatus) -> None:
    row = RequestResult("a", [1], 0, error="its grammar is wrong", error_status=status)
    engine = Engine(make_config(), worker=_WrongWorker(row))
    engine.core.add_request(make_request("a", PROMPT))
    outputs = engine.core.step()
    assert outputs.failed == [RequestFailed("a", status, "its grammar is wrong")]


def test_an_answer_without_the_rows_of_the_plan_stops_the_engine() -> None:
    engine = Engine(make_config(), worker=_WrongWorker())
    engine.add(make_request("a", PROMPT))
    with pytest.raises(RuntimeError, match="the worker answered step 1 with 0 rows"):
        engine.step()


@pytest.mark.parametrize(
    "wrong",
    [
        RequestResult("b", [1], 0),
        RequestResult("a", [], 0),
        RequestResult("a", [1, 2], 1),
        RequestResult("a", [1, 2], 0),
        RequestResult("a", [1], 0, []),
    ],
)
def test_an_answer_that_does_not_fit_its_row_ends_that_request_alone(wrong: RequestResult) -> None:
    engine = Engine(make_config(), worker=_WrongWorker(wrong, RequestResult("other", [1], 0)))
    engine.add(make_request("a", PROMPT), make_request("other", PROMPT))
    engine.step()
    assert (engine.outputs["a"].token_ids, engine.outputs["other"].token_ids) == ([], [1])
    (failed,) = engine.failed
    assert (failed.request_id, failed.status) == ("a", "INTERNAL")
    assert "the worker answered" in failed.message


def test_the_counts_of_the_engine_are_those_of_its_requests_and_of_the_worker() -> None:
    """Unlike requests over a pool that is too small for them: what each was told adds up to what the engine counts."""
    engine = Engine(make_config(num_blocks=24))
    requests = [
        make_request(f"r{i}", [*PROMPT, *range(20 + i, 20 + 2 * i)], max_tokens=5 + 4 * i, seed=i) for i in range(5)
    ]
    engine.add(*requests)
    seen_usage = []
    while engine.core.has_unfinished():
        engine.step()
        stats = engine.core.stats()
        used = {block for request in engine.scheduler.running.values() for block in request.block_ids}
        seen_usage.append(len(used) / 24)
        assert stats.kv_cache_usage == pytest.approx(len(used) / 24)
        assert (stats.num_requests_running, stats.num_requests_waiting) == (
            len(engine.running),
            engine.core.num_waiting,
        )
    total, each = engine.core.stats(), [engine.outputs[request.request_id].stats for request in requests]
    told = [stats for stats in each if stats is not None]
    assert len(told) == 5
    assert total.num_generation_tokens == sum(5 + 4 * i for i in range(5)) == sum(one.num_output_tokens for one in told)
    assert total.num_preemptions == sum(one.num_preemptions for one in told) > 0
    assert total.num_steps == engine.worker.num_steps
    assert max(seen_usage) > 0.9
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert getattr(total.spec_decoding, name) == sum(getattr(one.spec_decoding, name) for one in told) > 0


class _RefusingDrafts(ToyWorker):
    """Says with the drafts of its second step that request "a" cannot go on."""

    def collect_drafts(self, ended: Collection[str]) -> DraftOutput:
        drafts = super().collect_drafts(ended)
        errors: dict[str, tuple[str, ErrorStatus]] = {"a": ("its grammar ends", "INVALID_ARGUMENT")}
        return replace(drafts, errors=errors if drafts.step_id == 2 else {})


@pytest.mark.parametrize("ends", [False, True])
def test_a_request_that_cannot_go_on_after_its_drafts_ends_and_the_others_do_not(ends: bool) -> None:
    """One that has ended with the step's tokens is whole."""
    config = make_config()
    engine = Engine(config, worker=_RefusingDrafts(config))
    engine.add(make_request("a", PROMPT, max_tokens=2 if ends else 30), make_request("b", [9, *PROMPT], max_tokens=12))
    while engine.core.has_unfinished():
        engine.step()
    refused = [] if ends else [RequestFailed("a", "INVALID_ARGUMENT", "its grammar ends")]
    assert engine.failed == refused
    assert engine.outputs["a"].finish_reason == ("length" if ends else None)
    assert engine.outputs["b"].token_ids == greedy_continuation([9, *PROMPT], 12)
