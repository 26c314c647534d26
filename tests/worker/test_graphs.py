"""Padded decode steps: what a captured graph runs, here operation by operation."""

from __future__ import annotations

import dataclasses
import gc
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from dflash_backend.core.plan import DraftBudget, ScheduledRequest
from dflash_backend.models.peers import Peers
from dflash_backend.worker import graphs
from dflash_backend.worker.batch import BatchTraits, ForwardBatch, HostBatch
from dflash_backend.worker.graphs import (
    CAPTURE_STRIDE,
    TOKEN_SIZES,
    capture_shapes,
    capture_sizes,
    warm_up,
)
from dflash_backend.worker.runner import ModelRunner
from dflash_backend.worker.step import SpecDecodeModel
from dflash_kernels import measured_linear
from tests.worker.engines import Outputs, engine, memory, on_device_runner, unchanged, unpacked

pytestmark = pytest.mark.usefixtures("single_thread", "inference_mode")
PROMPTS = {"a": [1, 2, 3, 4, 5, 6], "b": [9, 8, 7], "c": [5] * 11}


@pytest.fixture
def pair(settings: dict[str, Any]) -> dict[str, Any]:
    return settings | {"max_num_seqs": 16}


def decoding(pair: dict[str, Any], **sampling: dict[str, Any]) -> tuple[ModelRunner, list[ScheduledRequest]]:
    """A runner that has run the prompts, and the decode rows that come next, whose blocks it has."""
    built = on_device_runner(engine(**pair), overlap=False)
    outputs = Outputs(built)
    for name, prompt in PROMPTS.items():
        outputs.add(
            name, prompt, **{"max_tokens": 30, "temperature": 0.0, "ignore_eos": True, **sampling.get(name, {})}
        )
    outputs.step()
    plan = built.core.scheduler.plan(0.0, in_flight=False)
    assert plan is not None
    assert isinstance(built.runner, ModelRunner)
    built.runner.requests.update(plan)
    return built.runner, plan.rows


def rows_like(runner: ModelRunner, rows: list[ScheduledRequest], count: int) -> HostBatch:
    """`count` rows for choosing a padded step by."""
    return HostBatch.of(rows_of(rows, count), runner.requests)


def rows_of(rows: list[ScheduledRequest], count: int) -> list[ScheduledRequest]:
    """`count` of these rows, again and again."""
    return (rows * count)[:count]


def test_capture_sizes_are_small_steps_first_then_every_eighth_and_the_most() -> None:
    assert capture_sizes(1) == [1]
    assert capture_sizes(6) == [1, 2, 4, 6]
    assert capture_sizes(32) == [1, 2, 4, 8, 16, 24, 32]
    assert capture_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert capture_sizes(32, 4) == [1, 2, 4, 8, 16, 24, 32]
    assert capture_sizes(256) == [1, 2, 4, *range(8, 257, 8)]


# Microseconds that an H200 takes for a layer's products, by rows: every multiple of 16 from 128 to 512.
TIMES = (
    "119.7 126.9 130.5 140.9 152.0 145.6 165.2 156.9 156.8 182.9 179.7 186.2 187.3 "
    "215.0 221.2 214.8 209.9 239.9 274.3 245.8 261.2 259.3 261.2 269.7 271.7"
)
PRODUCTS = dict(zip(range(128, 513, 16), map(float, TIMES.split()), strict=True))


def test_no_size_has_a_cheaper_larger_one_and_padding_to_the_next_costs_little() -> None:
    for size in TOKEN_SIZES:
        assert all(PRODUCTS[size] < time for larger, time in PRODUCTS.items() if larger > size), size
    for num_tokens, time in PRODUCTS.items():
        padded = min(size for size in TOKEN_SIZES if size >= num_tokens)
        assert PRODUCTS[padded] < 1.05 * time, num_tokens


def test_sizes_of_steps_with_all_drafts_follow_what_products_cost() -> None:
    assert capture_sizes(64, 16) == [1, 2, 4, 8, 9, 10, 13, 16, 18, 20, 24, 27, *range(32, 65, 4)]
    assert capture_sizes(128, 16)[-9:] == [*range(64, 129, 8)]
    assert capture_sizes(64, 8) == [1, 2, 4, 8, 16, 18, 20, 26, 32, 36, 40, 48, 54, 59, 64]
    assert capture_sizes(41, 5) == [1, 2, 4, 8, 14, 20, 25, 28, 32, 37, 41]
    assert capture_sizes(18, 14) == [1, 2, 4, 9, 10, 11, 14, 18]
    assert capture_sizes(16, 24) == [1, 2, 4, 5, 6, 8, 10, 12, 13, 16]
    # Two sizes that differ by a row are both of the list, or the step has few rows.
    assert capture_sizes(64, 10)[-4:] == [51, 55, 59, 64]
    assert capture_sizes(64, 24)[-4:] == [51, 55, 59, 64]


@pytest.mark.parametrize("width", [1, 2, 3, 5, 6, 7, 10, 11, 13, 15, 16, 17, 24, 32, 64, 600])
def test_sizes_lie_eight_rows_apart_at_most_and_have_those_of_the_list(width: int) -> None:
    for max_rows in (1, 2, 3, 7, 9, 40, 64, 65, 256):
        sizes = capture_sizes(max_rows, width)
        assert sizes == sorted(set(sizes))
        assert (sizes[0], sizes[-1]) == (1, max_rows)
        assert max((high - low for low, high in pairwise(sizes)), default=0) <= CAPTURE_STRIDE
        assert {size for tokens in TOKEN_SIZES if 1 <= (size := tokens // width) <= max_rows} <= set(sizes)


@pytest.mark.parametrize("k", [0, 1, 3, 5, 7, 15, 23, 31])
def test_padding_is_a_quarter_of_a_steps_tokens_at_most_once_they_take_the_time(k: int) -> None:
    sizes = capture_sizes(256, k + 1)
    assert sizes == sorted(set(sizes))
    for count in range(1, 257):
        padded = min(size for size in sizes if size >= count)
        assert padded * (k + 1) <= max(256, 1.25 * count * (k + 1)), count
    assert capture_sizes(20, 16) == [1, 2, 4, 8, 9, 10, 13, 16, 18, 20]
    assert capture_sizes(12, 256) == [*range(1, 13)]  # a row of more tokens than sizes are apart


def test_steps_with_the_most_drafts_have_more_sizes_than_those_with_fewer(pair: dict[str, Any]) -> None:
    coarse, fine = set(capture_sizes(24)), set(capture_sizes(24, 8))
    assert fine > coarse
    for shapes in ([], capture_shapes(7)):
        built = on_device_runner(engine(**pair | {"max_num_seqs": 24}), overlap=False)
        runner = built.runner
        assert isinstance(runner, ModelRunner)
        runner.prepare(use_graphs=False, progress=lambda message, fraction: None, shapes=shapes)
        found: dict[tuple[int, int], set[int]] = {}
        for step in runner.graphs.steps(sampled=False):
            drafts = step.inputs.num_tokens // step.inputs.num_rows - 1, step.inputs.draft_width
            found.setdefault(drafts, set()).add(step.inputs.num_rows)
        assert found == {shape: fine if shape == (7, 7) else coarse for shape in shapes or [(7, 7)]}


@pytest.mark.parametrize(("k", "budget"), [(3, None), (7, None), (7, 5)])
def test_a_padded_step_does_what_the_ragged_step_does(pair: dict[str, Any], k: int, budget: int | None) -> None:
    """Rows with drafts, with fewer of them and with none, greedy and sampled, with 5 padding rows; all drafts are
    verified, or some."""
    runner, plan_rows = decoding(pair, a={"k": k}, b={"k": 3, "temperature": 0.7, "seed": 3}, c={"k": 0})
    # Four rows have just as many tokens as the budget takes.
    shape, size = ((k, k), 8) if budget is None else ((1, k), 4)
    runner.prepare(use_graphs=False, progress=lambda message, fraction: None, shapes=[shape])
    drafts = None if budget is None else DraftBudget(budget, 1.0, [0.1 * i for i in range(7)], [0.5, 0.0, 0.0])
    runner.model.state.confidence.normal_(generator=torch.Generator().manual_seed(3))
    rows = HostBatch.of(plan_rows, runner.requests, drafts)
    before = [tensor.clone() for tensor in memory(runner)]

    inputs = runner.layouts.send_ragged(rows)
    ragged = unpacked(runner, runner.model.run(inputs))
    after_ragged = [tensor.clone() for tensor in memory(runner)]

    for tensor, value in zip(memory(runner), before, strict=True):
        tensor.copy_(value)
    step = runner.graphs.find(rows)
    assert step is not None
    assert step.inputs.num_rows == 4
    step = next(step for step in runner.graphs.steps(sampled=True) if step.inputs.num_rows == size)
    runner.layouts.send_padded(rows, size, step.inputs.num_tokens)
    padded = unpacked(runner, step.run())

    assert sum(padded[1]) == (k + 3 if budget is None else budget)
    for ours, theirs in zip(ragged[:3], padded[:3], strict=True):
        assert ours[:3] == theirs[:3]
    assert ragged[3][:3].tolist() == padded[3][:3].tolist()
    for ours, theirs in zip(memory(runner), after_ragged, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert any(not torch.equal(ours, theirs) for ours, theirs in zip(after_ragged, before, strict=True))


@pytest.mark.parametrize("sampled", [False, True])
def test_padding_rows_leave_kv_and_state_as_they_are_to_the_bit(pair: dict[str, Any], sampled: bool) -> None:
    """A graph has rows for every size up to its own, most of which are padding in a smaller step."""
    runner, _ = decoding(pair, b={"temperature": 0.7, "seed": 3})
    with unchanged(memory(runner)):
        for step in runner.graphs.steps(sampled):
            runner.layouts.send_nothing(step.inputs.num_rows, step.inputs.num_tokens)
            step.run()


def test_the_smallest_step_that_fits_is_taken(pair: dict[str, Any]) -> None:
    runner, rows = decoding(pair)
    for count, size in [(1, 1), (3, 4), (5, 8), (9, 16), (16, 16)]:
        step = runner.graphs.find(rows_like(runner, rows, count))
        assert step is not None
        assert step.inputs.num_rows == size


def test_a_step_that_would_be_mostly_padding_is_run_without_a_graph(pair: dict[str, Any]) -> None:
    """As when memory sufficed for the largest graphs alone."""
    runner, rows = decoding(pair)
    runner.prepare(use_graphs=False, progress=lambda message, fraction: None, sizes=[16])
    assert runner.graphs.find(rows_like(runner, rows, 7)) is None
    assert runner.graphs.find(rows_like(runner, rows, 8)) is not None


def test_rows_without_drafts_are_not_widened_to_many_tokens(
    pair: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "CHEAP_TOKENS", 64)
    runner, rows = decoding(pair, a={"k": 0}, b={"k": 0}, c={"k": 0})
    assert runner.model.decode_query_len == 8
    assert runner.graphs.find(rows_like(runner, rows, 8)) is not None
    assert runner.graphs.find(rows_like(runner, rows, 9)) is None


def test_a_step_proposes_parts_of_all_drafts_and_verifies_most_or_all_of_them() -> None:
    assert capture_shapes(15) == [(0, 0), (2, 3), (3, 3), (5, 7), (10, 15), (15, 15)]
    assert capture_shapes(7) == [(0, 0), (1, 1), (2, 3), (5, 7), (7, 7)]
    assert capture_shapes(3) == [(0, 0), (1, 1), (2, 3), (3, 3)]
    assert capture_shapes(1) == [(0, 0), (1, 1)]
    assert capture_shapes(0) == [(0, 0)]


def test_the_step_with_the_fewest_tokens_that_fits_is_taken(pair: dict[str, Any]) -> None:
    runner, rows = decoding(pair, a={"k": 0}, b={"k": 3})
    runner.prepare(use_graphs=False, progress=lambda message, fraction: None, shapes=capture_shapes(7))
    rows = [*rows[:2], msgspec.structs.replace(rows[2], num_draft=1)]
    # The first neither verifies nor proposes; the second verifies 3 and proposes 3; the third proposes 7.
    for chosen, num_tokens, width in [(rows[:1], 1, 0), (rows[:2], 6, 3), (rows[2:], 6, 7)]:
        step = runner.graphs.find(HostBatch.of(chosen, runner.requests))
        assert step is not None
        assert (step.inputs.num_tokens, step.inputs.draft_width) == (num_tokens, width)


def test_a_step_of_rows_without_drafts_takes_no_row_with_drafts(pair: dict[str, Any]) -> None:
    """Its attention expects one token of each row, also where there are fewer rows than tokens."""
    runner, rows = decoding(pair)
    runner.prepare(use_graphs=False, progress=lambda message, fraction: None, shapes=[(0, 0)])
    row = msgspec.structs.replace(rows[0], num_draft=2, num_next_draft=0)
    assert runner.graphs.find(HostBatch.of([row], runner.requests)) is None
    assert runner.graphs.find(HostBatch.of([msgspec.structs.replace(row, num_draft=0)], runner.requests)) is not None


def test_a_budget_makes_a_step_small(pair: dict[str, Any]) -> None:
    runner, rows = decoding(pair)
    runner.prepare(use_graphs=False, progress=lambda message, fraction: None, shapes=capture_shapes(7))
    rows = [msgspec.structs.replace(row, num_next_draft=3) for row in rows_of(rows, 8)]
    sizes = []
    for num_drafts in (56, 24, 16, 17):
        batch = HostBatch.of(rows, runner.requests, DraftBudget(num_drafts, 0.0, [0.0] * 7, [0.0] * 8))
        step = runner.graphs.find(batch)
        assert step is not None
        sizes.append(step.inputs.num_tokens)
    assert sizes == [64, 48, 24, 48]


def test_a_row_of_one_token_that_begins_to_draft_is_run_in_a_step_that_drafts(pair: dict[str, Any]) -> None:
    runner, rows = decoding(pair)
    runner.prepare(use_graphs=False, progress=lambda message, fraction: None, shapes=capture_shapes(7))
    row = msgspec.structs.replace(rows[0], num_draft=0)
    step = runner.graphs.find(HostBatch.of([row], runner.requests))
    assert step is not None
    assert step.inputs.traits.drafts
    resting = msgspec.structs.replace(row, num_next_draft=0)
    step = runner.graphs.find(HostBatch.of([resting], runner.requests))
    assert step is not None
    assert (step.inputs.num_tokens, step.inputs.traits.drafts) == (1, False)


def test_no_padded_step_has_more_tokens_than_a_step_may_have(pair: dict[str, Any]) -> None:
    built = on_device_runner(engine(**pair, max_num_batched_tokens=39))
    assert isinstance(built.runner, ModelRunner)
    assert sorted(step.inputs.num_rows for step in built.runner.graphs.steps(sampled=True)) == [1, 2, 4]


def test_warming_up_leaves_kv_and_state_as_they_are_to_the_bit(pair: dict[str, Any]) -> None:
    runner, _ = decoding(pair, b={"temperature": 0.7, "seed": 3})
    with unchanged(memory(runner)):
        warm_up(runner.model, runner.layouts, max_tokens=64, draft_widths=[0, 3])


def test_the_largest_steps_are_made_first_and_what_has_no_memory_is_left_out(
    pair: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    runner, rows = decoding(pair)
    tried: list[tuple[int, bool]] = []
    messages: list[str] = []

    def make(inputs: ForwardBatch) -> SpecDecodeModel | None:
        """Memory for four steps."""
        tried.append((inputs.num_rows, inputs.traits.sampled))
        return runner.model if len(tried) <= 4 else None

    runner.graphs.make(make, capture_sizes(16), True, lambda message, fraction: messages.append(message))
    assert tried[:4] == [(16, True), (16, False), (8, True), (8, False)]
    assert len(tried) == len(messages) == 10
    assert messages[0] == "CUDA graphs: sampled steps of 16 rows"
    assert [step.inputs.num_rows for step in runner.graphs.steps(sampled=True)] == [16, 8]
    assert "6 of 10 CUDA graphs are missing, the largest for sampled steps of 4 rows" in caplog.text
    step = runner.graphs.find(rows_like(runner, rows, 3))
    assert step is not None
    assert step.inputs.num_rows == 8


def test_an_engine_that_cannot_capture_serves_without_graphs_and_says_so(
    pair: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner, rows = decoding(pair)
    prepare = {"use_graphs": True, "serves": False, "progress": lambda message, fraction: None}
    collections: list[str] = []

    captured: list[ForwardBatch] = []
    measured: list[bool] = []

    def refuse(self: graphs.GraphCapturer, inputs: ForwardBatch) -> SpecDecodeModel:
        """All but the first."""
        assert not gc.isenabled()
        measured.append(measured_linear._State.measuring)
        if not captured:
            captured.append(inputs)
            return runner.model
        raise graphs.CaptureError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs.GraphCapturer, "__init__", lambda *_: None)
    monkeypatch.setattr(graphs.GraphCapturer, "__call__", refuse)
    monkeypatch.setattr(gc, "collect", lambda: collections.append("all"))
    monkeypatch.setattr(runner, "device", torch.device("cuda"))
    monkeypatch.setattr(measured_linear._State, "wanted", True)
    backend = runner.model.backend
    monkeypatch.setattr(backend, "capabilities", dataclasses.replace(backend.capabilities, capturable=True))
    runner.prepare(**prepare)
    monkeypatch.undo()
    assert gc.isenabled()
    assert collections == ["all"]
    assert measured == [True] * 2
    assert not measured_linear._State.measuring
    assert runner.graphs.num_steps == 0
    assert runner.graphs.find(rows_like(runner, rows, 3)) is None
    assert "cannot be captured here (operation not permitted when stream is capturing)" in caplog.text


class FakeDevice:
    """What `GraphCapturer` asks of a device, as `torch.cuda` says it: events has what was done, in order. free: bytes
    that are free, before and after torch gives back what it keeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, errors: list[Exception], free: tuple[int, int]) -> None:
        self.events: list[str] = []
        self._errors, self._free = errors, free
        layout = SimpleNamespace(
            synchronize=lambda: self.events.append("layout is there"),
            wait_stream=lambda stream: self.events.append(f"wait for {stream}"),
        )
        for name, value in {
            "graph_pool_handle": lambda: None, "Stream": lambda: "the step", "current_stream": lambda: layout,
            "mem_get_info": lambda: (self._free["empty" in self.events], 0),
            "set_stream": lambda stream: self.events.append("own stream" if stream is layout else "another"),
            "synchronize": lambda: self.events.append("synchronize"),
            "empty_cache": lambda: self.events.append("empty"),
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(graphs, "CudaGraphRunner", self.capture)

    def capture(self, *_: object) -> str:
        self.events.append("capture")
        if self._errors:
            raise self._errors.pop(0)
        return "captured"


PLENTY = (1 << 40, 1 << 40)
CAPTURE = ["layout is there", "capture", "own stream", "wait for the step"]
AGAIN = ["synchronize", "empty"]


@pytest.mark.parametrize(
    ("errors", "free", "expected"),
    [
        ([], PLENTY, CAPTURE),
        ([torch.OutOfMemoryError("full")], PLENTY, [*CAPTURE, *AGAIN, *CAPTURE]),
        ([RuntimeError("odd")], PLENTY, [*CAPTURE, *AGAIN, *CAPTURE]),
        ([], (5, 1 << 40), ["empty", *CAPTURE]),
    ],
)
def test_a_capture_waits_for_nothing_and_is_tried_again_with_all_memory(
    pair: dict[str, Any],
    errors: list[Exception],
    free: tuple[int, int],
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step that still runs holds up the next layout alone."""
    runner, _ = decoding(pair)
    device = FakeDevice(monkeypatch, errors, free)
    capture: Any = graphs.GraphCapturer(runner.model, runner.layouts)
    assert capture(runner.graphs.steps(sampled=False)[0].inputs) == "captured"
    assert device.events == expected


def test_no_step_is_captured_where_memory_is_short_whatever_torch_gives_back(
    pair: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, _ = decoding(pair)
    device = FakeDevice(monkeypatch, [], (5, graphs.RESERVED_BYTES - 1))
    assert graphs.GraphCapturer(runner.model, runner.layouts)(runner.graphs.steps(sampled=False)[0].inputs) is None
    assert device.events == ["empty"]


@pytest.mark.parametrize("alone", [True, False])
def test_a_capture_that_fails_for_another_reason_than_memory_ends_the_attempt(
    pair: dict[str, Any], alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone it has failed twice; with ranks it ends the start: theirs wait for the rest of the capture."""
    runner, _ = decoding(pair)
    times = 2 if alone else 1
    errors: list[Exception] = [torch.OutOfMemoryError("full")] * times
    errors += [RuntimeError("a kernel is missing\nmore")] * times
    device = FakeDevice(monkeypatch, errors, PLENTY)
    if not alone:
        monkeypatch.setattr(runner.model.target, "peers", Peers())
    inputs = runner.graphs.steps(sampled=False)[0].inputs
    capture = graphs.GraphCapturer(runner.model, runner.layouts)
    assert capture(inputs) is None
    with pytest.raises(RuntimeError, match="a kernel is missing") as caught:
        capture(inputs)
    assert isinstance(caught.value, graphs.CaptureError) == alone
    assert str(caught.value).endswith("missing") == alone
    assert device.events == [*CAPTURE, *AGAIN, *CAPTURE, *CAPTURE, *AGAIN, *CAPTURE] if alone else [*CAPTURE, *CAPTURE]


class FakeGraph:
    """A graph whose capture ends as `ends` says."""

    def __init__(self, ends: Exception | None = None) -> None:
        self.events: list[object] = []
        self._ends = ends

    def capture_begin(self, pool: object) -> None:
        self.events.append(pool)

    def capture_end(self) -> None:
        self.events.append("end")
        if self._ends is not None:
            raise self._ends


def test_an_error_within_a_capture_ends_it_and_stays_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that ran out is no other error because the capture cannot end well."""
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    graph: Any = FakeGraph(RuntimeError("the capture was invalidated"))
    stream: Any = None
    with pytest.raises(torch.OutOfMemoryError), graphs._capture(graph, (1, 2), stream):
        raise torch.OutOfMemoryError("full")
    assert graph.events == [(1, 2), "end"]
    with pytest.raises(RuntimeError, match="invalidated"), graphs._capture(graph, (1, 2), stream):
        pass


def test_prefill_rows_have_no_padded_step(pair: dict[str, Any]) -> None:
    runner, rows = decoding(pair)
    chunk = ScheduledRequest("a", 0, 2, 0, False, 0, [])
    assert runner.graphs.find(HostBatch.of([*rows, chunk], runner.requests)) is None
    decode = HostBatch.of(rows, runner.requests)
    assert runner.graphs.find(decode) is not None
    sampled = BatchTraits(True, True)
    assert runner.graphs.find(dataclasses.replace(decode, traits=sampled)) is not None
