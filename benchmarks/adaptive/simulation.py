"""The rule of `core.speculation.policy` on a device that is not here: a discrete simulation over a table of costs.

The floors of `benchmarks.gpu.floor` for a shape and a device's data sheet stand in for measured times, with
`EFFICIENCY` of the peak rates and a fixed time of the host's and of launches in each step. The table that the policy
begins with is wrong by some error, and its step times are noisy. Acceptance is drawn by position, and differs between
requests.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.gpu.floor import Ceilings, CycleSize, attention_work, cycle_work
from benchmarks.gpu.shapes import SHAPES, Shape
from dflash_backend.checkpoints.spec import DecoderSpec
from dflash_backend.core.plan import ScheduledRequest
from dflash_backend.core.speculation import AdaptiveSpeculation, CostTable, SpeculatingRow, StepShape
from dflash_backend.worker.graphs import capture_shapes
from dflash_kernels.verify_budget import verified_lens_reference
from load_tests.markdown import markdown_table

# NVIDIA's data sheet of the H200: bytes/s of its memory, dense bf16 FLOP/s.
H200 = Ceilings(copy_bandwidth=4.8e12, matrix_rate=989e12)
EFFICIENCY = 0.75
STEP_OVERHEAD_S = 0.5e-3
# Tokens for which a device is measured at start.
TABLE_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
NUM_OUTPUT_TOKENS = 256


@dataclass(frozen=True)
class Costs:
    """Seconds of the target's pass with injection, by rows and tokens, and of drafting, by rows and queries."""

    target_s: Callable[[int, int], float]
    draft_s: Callable[[int, int], float]

    def table(self, error: float, seed: int = 0) -> CostTable:
        """What a measurement at start finds, each point off by a factor with a standard deviation of `error`."""
        rng = random.Random(seed)
        return CostTable(TABLE_TOKENS, [self.target_s(1, n) * math.exp(rng.gauss(0, error)) for n in TABLE_TOKENS])


def device_costs(shape: Shape, ceilings: Ceilings, context: int) -> Costs:
    """Those of a shape on a device, over rows with `context` positions."""
    real = Ceilings(ceilings.copy_bandwidth * EFFICIENCY, ceilings.matrix_rate * EFFICIENCY)

    def size(num_rows: int, num_tokens: int, context: float) -> CycleSize:
        # k is a mean here, and need be no integer.
        return CycleSize(num_rows, context, num_tokens / num_rows - 1 or 1e-9, itemsize=2)  # type: ignore[arg-type]

    def attention_s(decoder: DecoderSpec, num_rows: int, num_tokens: int) -> float:
        # Attention waits for the projections: the two do not share the device.
        of_context = size(num_rows, num_tokens, context)
        return sum(attention_work(decoder, of_context, window).seconds(real) for window in decoder.sliding_windows)

    def target_s(num_rows: int, num_tokens: int) -> float:
        work = cycle_work(shape, size(num_rows, num_tokens, 0))
        seconds = work["verify"].seconds(real) + work["inject"].seconds(real)
        return STEP_OVERHEAD_S + seconds + attention_s(shape.target.decoder, num_rows, num_tokens)

    def draft_s(num_rows: int, num_queries: int) -> float:
        work = cycle_work(shape, size(num_rows, num_queries, 0))
        return work["draft"].seconds(real) + attention_s(shape.draft.decoder, num_rows, num_queries)

    return Costs(functools.cache(target_s), functools.cache(draft_s))


@dataclass(frozen=True)
class Drafting:
    """How likely drafts are to be accepted behind accepted ones, all as standard deviations of logits.

    requests, blocks, drafts: how much requests, blocks of a request and drafts of a block differ. noise: of the
    drafter's confidence, which is CONFIDENCE_SCALE times the logit and the noise; None: it says nothing.
    """

    requests: float = 0.3
    blocks: float = 0.0
    drafts: float = 0.0
    noise: float | None = None


# A drafter is surer than it should be.
CONFIDENCE_SCALE = 1.25
# Blocks of one kind that are drawn from.
NUM_BLOCKS = 4000


@dataclass
class Block:
    """How many drafts of a block are accepted when all are verified, and the drafter's confidences."""

    num_accepted: int
    confidences: list[float]


@dataclass
class SimulatedRequest:
    """A request, the tokens that it still lacks, how much better than others its drafts are, and its next block."""

    speculation: SpeculatingRow
    num_left: int
    effect: float
    block: Block = field(default_factory=lambda: Block(0, []))


@dataclass
class Simulation:
    """Streams that are served one step after the other. k: drafts of a block. mean: the logit of a usual draft's
    chance to be accepted behind accepted ones. noise: of the step times, relative."""

    costs: Costs
    streams: int
    context: int
    k: int
    mean: float
    drafting: Drafting = Drafting()
    noise: float = 0.03
    seed: int = 0
    _rng: random.Random = field(init=False)

    def run(self, policy: AdaptiveSpeculation | int, num_steps: int, skipped: int = 40) -> float:
        """Tokens per second with a policy, or always with that many drafts, after `skipped` steps."""
        self._rng = random.Random(self.seed)
        requests = [self._new_request() for _ in range(self.streams)]
        pending = [0] * self.streams
        num_tokens, seconds = 0, 0.0
        for step in range(num_steps):
            lengths, verified = [0] * self.streams, list(pending)
            if isinstance(policy, int):
                lengths = [policy] * self.streams
            else:
                rows = [request.speculation for request in requests]
                lengths = policy.choose(rows, float(self.context), 0)
                verified = self._verified(policy, rows, pending, lengths)
            shape = self._shape(verified, lengths)
            noise = math.exp(self._rng.gauss(0, self.noise))
            target_s = noise * self.costs.target_s(self.streams, shape.num_tokens)
            draft_s = 0.0
            if shape.num_queries:
                draft_s = noise * self.costs.draft_s(sum(map(bool, lengths)), shape.num_queries)
            for index, request in enumerate(requests):
                accepted = min(request.block.num_accepted, verified[index])
                if pending[index] and not isinstance(policy, int):
                    policy.observe_draft(request.speculation, verified[index], accepted, pending[index])
                delivered = min(accepted + 1, request.num_left)
                request.num_left -= delivered
                num_tokens += delivered if step >= skipped else 0
                if request.num_left == 0:
                    requests[index] = request = self._new_request()
                self._draft(request, lengths[index])
            if not isinstance(policy, int):
                policy.observe_step(shape, target_s + draft_s, draft_s)
            seconds += target_s + draft_s if step >= skipped else 0.0
            pending = lengths
        return num_tokens / seconds

    def _verified(
        self,
        policy: AdaptiveSpeculation,
        rows: Sequence[SpeculatingRow],
        pending: Sequence[int],
        lengths: Sequence[int],
    ) -> list[int]:
        """How many of the pending drafts of each row are verified."""
        plan = [
            ScheduledRequest("", self.context, 1, num_draft, True, num_next, [])
            for num_draft, num_next in zip(pending, lengths, strict=True)
        ]
        budget = policy.choose_budget(plan, rows)
        if budget is None:
            return list(pending)
        confidence = np.zeros((self.streams, self.k), dtype=np.float32)
        for index, row in enumerate(rows):
            confidence[index, : len(row.confidences)] = row.confidences
        offsets, effects = np.array(budget.offsets), np.array(budget.effects)
        lens = verified_lens_reference(
            confidence, np.array(pending), budget.weight, offsets, effects, budget.num_drafts
        )
        return [int(count) for count in lens]

    def _shape(self, verified: Sequence[int], lengths: Sequence[int]) -> StepShape:
        num_tokens, num_drafting = self.streams + sum(verified), sum(map(bool, lengths))
        return StepShape(
            self.streams,
            num_tokens,
            self.streams * self.context,
            num_tokens * self.context,
            sum(lengths) + num_drafting,
            num_drafting * self.context,
            1 if num_drafting else 0,
        )

    def _new_request(self) -> SimulatedRequest:
        left = self._rng.randint(NUM_OUTPUT_TOKENS // 2, NUM_OUTPUT_TOKENS * 3 // 2)
        return SimulatedRequest(SpeculatingRow(self.k), left, self._rng.gauss(0, self.drafting.requests))

    def _draft(self, request: SimulatedRequest, length: int) -> None:
        request.block = draw_block(self._rng, self.drafting, self.mean + request.effect, self.k)
        request.speculation.confidences = request.block.confidences[:length]


@functools.cache
def block_deviations(drafting: Drafting, k: int) -> list[tuple[list[float], list[float]]]:
    """Of many blocks how much each draft's logit, and what the drafter takes it for, differ from the request's."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, drafting.blocks, (NUM_BLOCKS, 1)) + rng.normal(0, drafting.drafts, (NUM_BLOCKS, k))
    seen = logits + rng.normal(0, drafting.noise or 0.0, logits.shape)
    return list(zip(logits.tolist(), seen.tolist(), strict=True))


def draw_block(rng: random.Random, drafting: Drafting, mean: float, k: int) -> Block:
    """A block of k drafts of a request whose usual draft has the logit `mean`."""
    logits, seen = rng.choice(block_deviations(drafting, k))
    chances = (1 / (1 + math.exp(-mean - logit)) for logit in logits)
    num_accepted = next((i for i, chance in enumerate(chances) if rng.random() >= chance), k)
    return Block(num_accepted, [] if drafting.noise is None else [CONFIDENCE_SCALE * (mean + each) for each in seen])


@functools.cache
def mean_with_length(acceptance_length: float, drafting: Drafting, k: int) -> float:
    """The logit of a usual draft with which a full block yields that many tokens a step."""
    rng = np.random.default_rng(1)
    deviations = np.array([logits for logits, _ in block_deviations(drafting, k)])
    deviations += rng.normal(0, drafting.requests, (NUM_BLOCKS, 1))
    low, high = -8.0, 16.0
    for _ in range(40):
        mean = (low + high) / 2
        length = 1 + np.cumprod(1 / (1 + np.exp(-mean - deviations)), axis=1).sum(axis=1).mean()
        low, high = (mean, high) if length < acceptance_length else (low, mean)
    return low


# What is simulated: Qwen3-8B's shape with a drafter of five layers, blocks of 16, of which 6.5 tokens a step come.
SHAPE, CONTEXT, ACCEPTANCE_LENGTH, K = "qwen3-8b", 1000, 6.5, 15
FIXED = (0, 1, 2, 3, 4, 5, 7, 11, 15)
STREAMS = (1, 8, 32, 64, 128, 256)
# With few streams a run has few blocks, and luck would decide.
NUM_SEEDS, NUM_SEEDS_OF_ONE = 8, 40
# What the rule has at least of the best fixed number of drafts, none among them.
LEAST = 0.98
# Drafts that are all alike but for their request; some that differ, with a drafter that says so and is often wrong.
ALIKE = Drafting()
DIFFERENT = Drafting(blocks=1.5, drafts=1.5, noise=1.5)
# Those of captured graphs that draft.
SHAPES_OF_STEPS = tuple(capture_shapes(K)[1:])


@functools.cache
def h200_costs() -> Costs:
    """Those of the shape and the context that are simulated."""
    return device_costs(SHAPES[SHAPE](), H200, CONTEXT)


def simulated_row(
    streams: int, table_error: float, shapes: Sequence[tuple[int, int]] = (), drafting: Drafting = ALIKE
) -> dict[str, float]:
    """Tokens per second without drafts (`none`), with the best fixed number (`best`, and which: `best_k`), with k, and
    by the rule with a table that is `table_error` off, means over `_seeds`."""
    costs = h200_costs()
    fixed = fixed_speeds(streams, replace(drafting, noise=None))
    adaptive = 0.0
    for seed in _seeds(streams):
        policy = AdaptiveSpeculation(K, shapes=shapes, table=costs.table(table_error, seed))
        adaptive += simulation_of(streams, drafting, seed).run(policy, _num_steps(streams)) / len(_seeds(streams))
    fastest = max(FIXED, key=fixed.__getitem__)
    return {"none": fixed[0], "k": fixed[K], "best": fixed[fastest], "best_k": fastest, "adaptive": adaptive}


@functools.cache
def fixed_speeds(streams: int, drafting: Drafting) -> dict[int, float]:
    """Tokens per second with each fixed number of drafts, means over `_seeds`."""
    runs = [simulation_of(streams, drafting, seed) for seed in _seeds(streams)]
    return {k: sum(run.run(k, _num_steps(streams)) for run in runs) / len(runs) for k in FIXED}


def simulation_of(streams: int, drafting: Drafting, seed: int) -> Simulation:
    mean = mean_with_length(ACCEPTANCE_LENGTH, replace(drafting, noise=None), K)
    return Simulation(h200_costs(), streams, CONTEXT, K, mean, drafting, seed=seed)


def _seeds(streams: int) -> range:
    return range(max(NUM_SEEDS, NUM_SEEDS_OF_ONE // streams))


def _num_steps(streams: int) -> int:
    return max(160, 2000 // streams)


PUBLISHED = (
    "vLLM published of its adaptive verification (pull requests 47808 and 52228), for DeepSeek-V4-Pro on 8 GPUs at 256 "
    "streams: a fixed k of 7 gives 0.47 of the tokens per second without drafts, adaptive verification 1.41."
)


def _alike_row(streams: int) -> list[object]:
    """The row of the first table for a number of streams."""
    each, shapes = simulated_row(streams, 0.1), simulated_row(streams, 0.1, SHAPES_OF_STEPS)
    return [
        streams,
        f"{each['best_k']:.0f}",
        *(f"{each[name] / each['none']:.2f}" for name in ("k", "best", "adaptive")),
        *(f"{found['adaptive'] / each['best']:.3f}" for found in (each, simulated_row(streams, 0.0), shapes)),
    ]


def _different_row(streams: int) -> list[object]:
    """That of the second table."""
    found = [
        simulated_row(streams, 0.1, shapes, drafting)
        for shapes in ((), SHAPES_OF_STEPS)
        for drafting in (replace(DIFFERENT, noise=None), DIFFERENT)
    ]
    return [streams, f"{found[0]['best_k']:.0f}", *(f"{each['adaptive'] / each['best']:.3f}" for each in found)]


def misses(alike: Sequence[Sequence[object]]) -> list[str]:
    """What the rule misses where drafts are alike, by the rows of `_alike_row`, a sentence each."""
    return [
        f"{streams} streams: the rule has {ratio} of the best fixed k, below {LEAST}"
        for streams, *_, ratio, _exact, _sizes in alike
        if float(str(ratio)) < LEAST
    ]


def simulated_table() -> tuple[str, list[str]]:
    """The page of the simulation, and what is missed."""
    alike, different = list(map(_alike_row, STREAMS)), map(_different_row, STREAMS)
    first = [
        "streams", "best k", "k = 15", "best fixed k", "adaptive", "adaptive / best", "with exact costs / best",
        "of few sizes / best",
    ]  # fmt: skip
    second = [
        "streams", "best k", "without confidence", "with confidence",
        "of few sizes, without", "of few sizes, with",
    ]  # fmt: skip
    page = (
        "# The rule on an H200, simulated\n\n"
        f"{SHAPE}, context {CONTEXT}, acceptance length {ACCEPTANCE_LENGTH} with {K} drafts. No device was measured: "
        f"step times are the floors of `benchmarks/gpu/floor.py` at {EFFICIENCY:.0%} of the data sheet's rates and "
        f"{STEP_OVERHEAD_S * 1e3:g} ms a step. The table of costs that the rule begins with is 10 % off at each "
        f"point. Means of {NUM_SEEDS} runs, {NUM_SEEDS_OF_ONE} with one stream. *Of few sizes*: steps have the sizes "
        "of captured graphs, "
        f"{', '.join(f'{verified} of {proposed}' for verified, proposed in SHAPES_OF_STEPS)} drafts of each row "
        "verified. Written by `python -m benchmarks.adaptive --simulate`.\n\n"
        "Drafts that are all alike but for their request: tokens per second over those without drafts, then over the "
        f"best fixed k.\n\n{markdown_table(first, alike, 'rrrrrrrr')}\n\n"
        f"{PUBLISHED}\n\n"
        f"Drafts that differ (the logits of their chances by {DIFFERENT.blocks} from block to block and by "
        f"{DIFFERENT.drafts} within one, standard deviations), with a drafter whose confidence has an error of "
        f"{DIFFERENT.noise} and is {CONFIDENCE_SCALE} times too high: tokens per second of the rule over those of the "
        f"best fixed k.\n\n{markdown_table(second, list(different), 'rrrrrr')}\n"
    )
    return page, misses(alike)
