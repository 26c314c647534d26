"""Decode steps of fixed shapes, each captured as three CUDA graphs: a few numbers go in, and three launches run it.

A graph has a number of rows of `capture_sizes`, and a number of tokens that its rows share as they need: for k drafts
of each row or, where the number of drafts follows the load, for those of `capture_shapes`. A step with fewer rows or
tokens is filled up with padding, which reads and writes nothing. There are two kinds: for steps of greedy requests
alone, and for steps with sampled ones. The first graph ends with the target's own token for each of its logits, so
that those of rows that ask for more, as for penalties or a grammar, can be chosen again before the second begins
(`logits.SpecialRows`). The second accepts drafts, and the step's tokens leave while the
third injects and drafts. Rows of prompts have steps of their own, of a number of tokens that any mix of rows shares;
long prompts are run without a graph. Without graphs the same padded steps run operation by operation.

`warm_up` compiles, before the first request, every kernel that a step can need: Triton compiles one when it is first
launched, which takes up to seconds, and all requests would wait. Steps of padding rows alone run under the bounds of
real ones; they read and write nothing. What a kernel is compiled for is enumerated: tiles of attention, of experts and
of quantised weights, draft widths, rows of a budget, dtypes of logits. The counting driver of
`benchmarks.gpu.kernel_variants` shows that no workload adds a kernel.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any, Protocol

import numpy as np
import torch

from dflash_backend.attention import AttentionBackend
from dflash_backend.core.plan import MIN_SHARING_ROWS, MeasuredStep
from dflash_backend.models.peers import ALONE
from dflash_backend.worker.batch import BatchTraits, ForwardBatch, HostBatch, LayoutBuffer, LengthBounds
from dflash_backend.worker.kv_cache import WriteGuard
from dflash_backend.worker.logits import PromptLogprobs
from dflash_backend.worker.step import SpecDecodeModel, StateCopies
from dflash_kernels.delta_rule import CHUNK as DELTA_CHUNK
from dflash_kernels.moe import TILES
from dflash_kernels.moe_routing import FEW_ENTRIES
from dflash_kernels.penalties import NUMBERS, PenalisedRows
from dflash_kernels.quantised_linear import every_tile
from dflash_kernels.token_bitmask import num_words

logger = logging.getLogger(__name__)

# Capture sizes are this far apart at the most.
CAPTURE_STRIDE = 8
# Tokens of the steps that are worth padding to: by what an H200 takes for a layer's products at every multiple of 16
# rows (`benchmarks.gpu.cublas_choices`), a few tokens less are as slow or slower, and more are never faster. With fewer
# than the first number a GPU spends its time on reading weights.
TOKEN_SIZES = (128, 144, 160, 208, 256, 288, 320, 384, 432, 512)
# From the first number on steps are as many tokens apart as the second says.
TOKEN_STRIDES = ((512, 64), (1024, 128))
# Padding costs arithmetic and a launch without a graph costs the host's time: rows are padded to twice their number at
# the most, or by this many.
ALWAYS_WORTH_PADDING = CAPTURE_STRIDE
# And a step to twice its tokens at the most, or to this many, for which a GPU still spends its time on reading weights.
# Rows without drafts are much narrower than their places.
CHEAP_TOKENS = 128
# Left free for what steps without a graph allocate.
RESERVED_BYTES = 1 << 30

Progress = Callable[[str, float], None]
GraphPool = Any
"""torch's handle for memory that graphs share; it has no public name."""


class ForwardRunner(Protocol):
    """What runs a step in three parts: `SpecDecodeModel`, operation by operation, or `CudaGraphRunner`. Between the
    parts no other step is run."""

    def verify(
        self, step: ForwardBatch, guard: WriteGuard | None = None, prompt_logprobs: PromptLogprobs | None = None
    ) -> ForwardBatch:
        """Queue the target's forward and its own tokens. Returns the step that the other parts go on with, whose tokens
        may be changed until `accept`; that of a graph is valid on the device until the next one is run."""

    def accept(self, step: ForwardBatch) -> None:
        """Queue the acceptance of drafts: `ForwardBatch.results` is valid on the device from here on."""

    def draft(self, step: ForwardBatch, guard: WriteGuard | None = None, copies: StateCopies = ()) -> None:
        """Queue injecting and drafting: `ForwardBatch.draft_report` is valid on the device from here on."""


@dataclass(frozen=True)
class PaddedBatch:
    """A step of a fixed shape, for the rows whose layout was sent last, and what runs it."""

    inputs: ForwardBatch
    runner: ForwardRunner

    def run(self) -> ForwardBatch:
        """Queue all parts."""
        step = self.runner.verify(replace(self.inputs))
        self.runner.accept(step)
        self.runner.draft(step)
        return step


MakeRunner = Callable[[ForwardBatch], ForwardRunner | None]
"""Makes what runs the padded step over these inputs; None when memory does not suffice."""


class CudaGraphRunner:
    """A padded step in three CUDA graphs, which is always the same, whatever step it is given."""

    def __init__(
        self, model: SpecDecodeModel, inputs: ForwardBatch, pool: GraphPool, stream: torch.cuda.Stream
    ) -> None:
        """Runs the step once on `stream`, for what is made at first use (compiled kernels, library handles), then
        captures it with its memory in `pool`. The layout on the device must be one of padding rows alone."""
        with torch.cuda.stream(stream):
            model.run(replace(inputs))
        step, peers = replace(inputs), model.target.peers
        # Alone, the host captures while the device still runs.
        if peers is not ALONE:
            stream.synchronize()
        self._graphs = [torch.cuda.CUDAGraph() for _ in range(3)]
        # Ranks have run the step as well, so what they exchange is connected, and capture the same parts. What one part
        # leaves must be there while the next is captured, or that would take its memory.
        with peers.capturing() as verified_there, _capture(self._graphs[0], pool, stream):
            model.verify(step)
        with peers.capturing() as accepted_there, _capture(self._graphs[1], pool, stream):
            model.accept(step)
        with peers.capturing() as drafted_there, _capture(self._graphs[2], pool, stream):
            model.draft(step)
        self._there = verified_there, accepted_there, drafted_there
        assert step.logits is not None
        # Without what only the graphs read: they share their memory.
        self._step = replace(inputs)
        self._step.logits, self._step.target_tokens = borrowed(step.logits), step.target_tokens
        self._step.results, self._step.draft_report = step.results, step.draft_report
        self._step.num_looked_up = step.num_looked_up

    def verify(self, *_: object) -> ForwardBatch:
        self._replay(0)
        return self._step

    def accept(self, *_: object) -> None:
        self._replay(1)

    def draft(self, *_: object) -> None:
        self._replay(2)

    def _replay(self, part: int) -> None:
        self._there[part]()
        self._graphs[part].replay()


@contextmanager
def _capture(graph: torch.cuda.CUDAGraph, pool: GraphPool, stream: torch.cuda.Stream) -> Iterator[None]:
    """A block whose work on `stream` is captured. `torch.cuda.graph` does the same, but first waits for the device and
    gives it back all memory that torch keeps: the next step would ask for it again, three times for each graph."""
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool)
        try:
            yield
        except BaseException:
            # That the capture ends with an error as well says nothing more.
            with suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()


class _Memory:
    """Memory of a device that others own, as torch takes it in."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": f"<i{tensor.element_size()}",
            "data": (tensor.data_ptr(), False),
            "strides": None,
            "version": 2,
        }


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """A `tensor` of a GPU without a hold on its memory, which belongs to a graph and is shared by the others: the
    logits of all graphs together would be gigabytes."""
    if not tensor.is_contiguous():
        return tensor
    return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype)


class CaptureError(RuntimeError):
    """A step cannot be captured in a CUDA graph here, for another reason than memory."""


class GraphCapturer:
    """Captures padded steps, all with their memory in one pool: they run one at a time. Between `no_collection`."""

    def __init__(self, model: SpecDecodeModel, layouts: LayoutBuffer) -> None:
        self._model = model
        self._layouts = layouts
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def __call__(self, inputs: ForwardBatch) -> CudaGraphRunner | None:
        """Capture a step; None when memory does not suffice. Raises `CaptureError`."""
        alone = self._model.target.peers is ALONE
        if not self._has_memory():
            return None
        for again in (alone, False):
            try:
                return self._captured(inputs)
            except torch.OutOfMemoryError:
                if not again:
                    return None
            except RuntimeError as error:
                # With ranks, the others' half of this capture is in an unknown state.
                if not alone:
                    raise
                if not again:
                    raise CaptureError(str(error).partition("\n")[0]) from error
            # Once more, with nothing in flight and with all memory that torch keeps.
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        raise AssertionError("unreachable")

    def _has_memory(self) -> bool:
        """Whether enough is free for a step, if need be without what torch keeps of other steps."""
        peers = self._model.target.peers
        if peers.least_free(torch.cuda.mem_get_info()[0]) >= RESERVED_BYTES:
            return True
        torch.cuda.empty_cache()
        return peers.least_free(torch.cuda.mem_get_info()[0]) >= RESERVED_BYTES

    def _captured(self, inputs: ForwardBatch) -> CudaGraphRunner:
        current = torch.cuda.current_stream()
        self._layouts.send_nothing(inputs.num_rows, inputs.num_tokens)
        current.synchronize()
        try:
            return CudaGraphRunner(self._model, inputs, self._pool, self._stream)
        finally:
            torch.cuda.set_stream(current)  # a capture that fails as it ends leaves its own
            # The step may still run: what comes next must not change its layout before it has ended.
            current.wait_stream(self._stream)


def capture_sizes(max_rows: int, tokens_per_row: int = 1) -> list[int]:
    """Numbers of rows that padded steps have: 1, 2, 4, 8, then those of `TOKEN_SIZES` and `TOKEN_STRIDES` where each
    row has `tokens_per_row`, never more than `CAPTURE_STRIDE` apart, and `max_rows`."""
    listed = sorted({max(1, tokens // tokens_per_row) for tokens in TOKEN_SIZES})
    few = (1, 2, 4) if listed[0] == CAPTURE_STRIDE + 1 else (1, 2, 4, CAPTURE_STRIDE)
    sizes = [*(size for size in few if size < listed[0]), *listed]
    while sizes[-1] < max_rows:
        num_tokens = max(sizes[-1] * tokens_per_row, TOKEN_SIZES[-1])
        stride = max(stride for least, stride in TOKEN_STRIDES if num_tokens >= least) // tokens_per_row
        # Rounded down to a power of two.
        step = min(CAPTURE_STRIDE, 1 << (max(1, stride).bit_length() - 1))
        size = sizes[-1] + step
        sizes.append(max_rows if size + 1 == max_rows and 1 < step < CAPTURE_STRIDE else size)
    between = {size for low, high in pairwise(sizes) for size in _equally_apart(low, high)}
    return sorted({size for size in between.union(sizes) if size < max_rows} | {max_rows})


def _equally_apart(low: int, high: int) -> list[int]:
    """The fewest numbers between these that leave none more than `CAPTURE_STRIDE` from the next."""
    parts = -(-(high - low) // CAPTURE_STRIDE)
    return [low - (low - high) * part // parts for part in range(1, parts)]


def capture_shapes(k: int) -> list[tuple[int, int]]:
    """Drafts that padded steps verify and that they propose, for each row, where the number of drafts follows the load.
    A fifth, a half and all of k are proposed, and two thirds of them verified; for a fifth and for all there is a step
    that verifies each of them, too, since there the rule often wants that (`benchmarks.adaptive --simulate`)."""
    if k == 0:
        return [(0, 0)]
    few, some = max(1, k // 5), max(1, k // 2)
    parts = {(max(1, round(2 * proposed / 3)), proposed) for proposed in (few, some, k)}
    return sorted({(0, 0), *parts, (few, few), (k, k)})


class GraphDispatcher:
    """The padded steps that there are, by kind: whether there are sampled requests, and whether rows share prefixes."""

    def __init__(self, model: SpecDecodeModel, layouts: LayoutBuffer) -> None:
        self._model = model
        self._layouts = layouts
        self._steps: dict[tuple[bool, bool], list[PaddedBatch]] = {}
        self._mixed: dict[bool, list[PaddedBatch]] = {}

    def steps(self, sampled: bool, shared: bool = False) -> list[PaddedBatch]:
        """Those of a kind."""
        return list(self._steps.get((sampled, shared), []))

    def mixed(self, sampled: bool) -> list[PaddedBatch]:
        """Those for rows of any length."""
        return list(self._mixed.get(sampled, []))

    @property
    def num_steps(self) -> int:
        """Padded steps of all kinds."""
        return sum(map(len, [*self._steps.values(), *self._mixed.values()]))

    def find(self, batch: HostBatch) -> PaddedBatch | None:
        """The smallest padded step that can run `batch`; None when there is none, or none that is worth its padding.
        Where none of them shares prefixes, one that reads them for each row by itself will do."""
        if not self._steps and not self._mixed:
            return None
        if not batch.decode_only:
            steps = self.mixed(batch.traits.sampled)
            number = smallest_mixed([step.inputs for step in steps], batch)
            return None if number is None else steps[number]
        found = self._find(batch, shared=True) if batch.shared else None
        return found or self._find(batch, shared=False)

    def _find(self, batch: HostBatch, shared: bool) -> PaddedBatch | None:
        steps = self.steps(batch.traits.sampled, shared)
        if not steps:
            return None
        count = len(batch.req_idx)
        num_tokens, draft_width = count + batch.num_verified, int(batch.num_next_draft.max())
        widest = int(batch.query_lens.max())
        most_rows, most_tokens = max(2 * count, count + ALWAYS_WORTH_PADDING), max(2 * num_tokens, CHEAP_TOKENS)
        fitting = [
            (inputs.num_tokens, inputs.draft_width, number)
            for number, inputs in enumerate(step.inputs for step in steps)
            if count <= inputs.num_rows <= most_rows
            and num_tokens <= inputs.num_tokens <= most_tokens
            and draft_width <= inputs.draft_width
            and inputs.bounds is not None
            and widest <= int(inputs.bounds.query_lens[0])
        ]
        return steps[min(fitting)[-1]] if fitting else None

    def clear(self) -> None:
        """Drop all padded steps."""
        self._steps, self._mixed = {}, {}

    def make(
        self,
        make: MakeRunner,
        sizes: Sequence[int],
        sampled: bool,
        progress: Progress,
        shapes: Sequence[tuple[int, int]] = (),
        finest: Sequence[int] = (),
        mixed: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Make the steps with these numbers of rows, and of verified and proposed drafts for each (`shapes`, by default
        k and k), in place of those that there were: greedy ones, and with `sampled` also those for sampled requests.
        finest: the numbers of rows with the most drafts, by default `sizes`. mixed: numbers of rows and of tokens of
        the steps for rows of any length. `progress` is called with `(message, fraction)`.

        The largest and the sampled ones come first: the others then share the memory that these took. Those that memory
        does not suffice for are left out, which the log says.
        """
        k = self._model.state.k
        shapes = shapes or [(k, k)]
        kinds = (True, False) if sampled else (False,)
        of_decode_rows = [
            (size, shape, kind, shared)
            for size in sorted({*sizes, *finest}, reverse=True)
            for shape in sorted(shapes, reverse=True)
            if size in (finest if finest and shape == max(shapes) else sizes)
            for kind in kinds
            for shared in (True, False)
            if not shared or (self._model.shares_prefixes and size >= MIN_SHARING_ROWS)
        ]
        self.clear()
        wanted: list[tuple[list[PaddedBatch], str, ForwardBatch]] = []
        for size, (num_verified, draft_width), kind, shared in of_decode_rows:
            name = f"{'sampled' if kind else 'greedy'} steps of {size} rows{' with a shared prefix' if shared else ''}"
            if len(shapes) > 1:
                name += f" with {size * num_verified} drafts"
            inputs = self._inputs(size, size * (1 + num_verified), draft_width, kind, shared)
            wanted.append((self._steps.setdefault((kind, shared), []), name, inputs))
        for (num_rows, num_tokens), kind in product(sorted(mixed, reverse=True), kinds):
            name = f"{'sampled' if kind else 'greedy'} steps of {num_tokens} tokens with prompts"
            inputs = self._inputs(num_rows, num_tokens, k, kind, mixed=True)
            wanted.append((self._mixed.setdefault(kind, []), name, inputs))
        missing = []
        for number, (steps, name, inputs) in enumerate(wanted):
            progress(f"CUDA graphs: {name}", number / len(wanted))
            if (runner := make(inputs)) is None:
                missing.append(name)
            else:
                steps.append(PaddedBatch(inputs, runner))
        if missing:
            logger.warning(
                "GPU memory runs short: %d of %d CUDA graphs are missing, the largest for %s. These steps run without, "
                "which is slower. Lower gpu_memory_utilization or max_num_seqs for more graphs",
                len(missing),
                len(wanted),
                missing[0],
            )

    def _inputs(
        self, num_rows: int, num_tokens: int, draft_width: int, sampled: bool, shared: bool = False, mixed: bool = False
    ) -> ForwardBatch:
        """Of a padded step over the layout buffer: every token has logits, any length is possible and, with `sampled`,
        any temperature and filter. Steps of rows without drafts do not draft either: they follow one in which drafting
        did not pay, or come before such. mixed: any row may have any of the tokens, and those that sample have up to
        k + 1 logits."""
        model, state = self._model, self._model.state
        longest = np.full(num_rows, state.max_len)
        most = num_tokens if mixed else 1 if num_tokens == num_rows else 1 + state.k
        batch, budget = self._layouts.padded(num_rows, num_tokens)
        nowhere: torch.Tensor | None = None
        if mixed:  # where logits lie is decided on the device; this says how many there may be
            nowhere = torch.zeros(num_rows * model.decode_query_len, dtype=torch.int32, device=model.device)
        return ForwardBatch(
            batch=batch,
            logits_token=nowhere,
            logits_row=batch.token_row if nowhere is None else nowhere,
            bounds=LengthBounds(np.full(num_rows, most), longest, longest, max_overestimate=state.max_len),
            traits=BatchTraits(
                sampled, model.drafter is not None and draft_width > 0, adapted=bool(model.target.adapter_names)
            ),
            budget=budget,
            draft_width=draft_width,
            shared=self._layouts.padded_shared(num_rows, num_tokens, state.max_len) if shared else None,
        )


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection, which could free memory of the device in the midst of a capture. Around all captures, not
    around each: to look through all objects of an engine takes longer than a capture."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# Tokens of the steps that there are: but for the first, of `TOKEN_SIZES`. Above the last a GPU takes longer for a
# step's products than a host for its launches.
MIXED_TOKENS = (64, 128, 160, 208, 256, 320, 384, 432, 512)
# Rows at most, since attention has a tile for each that all of the tokens might be.
MAX_MIXED_ROWS = 64
# A step is padded to this many times its tokens at most, which the next size is never above from `CHEAP_TOKENS` on, or
# to these.
MOST_PADDING = 1.3


def mixed_shapes(max_rows: int, max_tokens: int, decode_query_len: int) -> list[tuple[int, int]]:
    """Rows and tokens of each mixed step, of an engine whose steps have at most that many, and whose decode rows have
    `decode_query_len` tokens: as many rows as have tokens when all of them decode."""
    return [
        (max(1, min(max_rows, tokens // decode_query_len, MAX_MIXED_ROWS)), tokens)
        for tokens in MIXED_TOKENS
        if tokens <= max_tokens and tokens >= 2 * decode_query_len
    ]


def smallest_mixed(steps: Sequence[ForwardBatch], batch: HostBatch) -> int | None:
    """The index of the smallest of these steps that can run `batch`, not of decode rows alone; None when there is none,
    or none that is worth its padding."""
    count = len(batch.req_idx)
    num_tokens = int(batch.num_new.sum()) + batch.num_verified
    most = max(MOST_PADDING * num_tokens, CHEAP_TOKENS)
    # A step that proposes nothing, as where drafting does not pay, must not run the drafter; and one in which no row
    # chooses a token needs no logits.
    drafts = bool(batch.num_next_draft.any())
    fitting = [
        (inputs.num_tokens, number)
        for number, inputs in enumerate(steps)
        if count <= inputs.num_rows
        and num_tokens <= inputs.num_tokens <= most
        and inputs.traits.drafts == drafts
        and batch.traits.chooses
    ]
    return min(fitting)[1] if fitting else None


REPEATS = 3


@torch.inference_mode()
def measured_padded_steps(
    model: SpecDecodeModel, layouts: LayoutBuffer, padded: Sequence[PaddedBatch]
) -> list[MeasuredStep]:
    """The times of padded steps, the shortest of a few runs each. Their rows are padding, so their contexts are empty:
    what is left of a step's time is mostly reading weights and multiplying."""
    found = []
    for each in padded:
        inputs = each.inputs
        times = []
        for _ in range(REPEATS):
            layouts.send_nothing(inputs.num_rows, inputs.num_tokens)
            ran = each.run()
            times.append(model.unpacked_report(ran, ran.draft_report.cpu().numpy())[0])
        target_s = min(sum(seconds[:-1]) for seconds in times)
        draft_s = min(seconds[-1] for seconds in times)
        found.append(MeasuredStep(inputs.num_rows, inputs.num_tokens, inputs.draft_width, target_s, draft_s))
    return found


# Tokens of a prefill chunk that takes the tallest tiles of attention, whatever the heads.
CHUNK = 256
# Of different lengths, so that attention maps tiles to rows as it does in a ragged step.
NUM_ROWS = 4


def warm_up(model: SpecDecodeModel, layouts: LayoutBuffer, max_tokens: int, draft_widths: Sequence[int] = ()) -> None:
    """Compile the kernels of steps of at most `max_tokens` tokens. draft_widths: the drafts that steps propose for each
    row where that is not always k."""
    longest, peers = min(CHUNK, max_tokens), model.target.peers
    backends = model.backend, model.draft_backend or model.backend
    with peers.every_variant(), every_kernel(*backends, max_tokens=max_tokens):
        model.run(_padding_under_bounds(model, layouts, longest, sampled=False))
        if model.shares_prefixes:
            inputs = _padding_under_bounds(model, layouts, longest, sampled=False)
            shared = layouts.padded_shared(inputs.num_rows, inputs.num_tokens, model.state.max_len)
            model.run(replace(inputs, shared=shared))
    for num_tokens in _token_counts(model, max_tokens):
        model.run(_padding_under_bounds(model, layouts, num_tokens, sampled=False))
    with peers.every_variant(), every_kernel(*backends):
        for width, sampled in product({model.state.k, *draft_widths}, (False, True)):
            model.run(_padding_under_bounds(model, layouts, 1, sampled, width))
    # The powers of two, and the most.
    for num_rows in {min(1 << i, layouts.max_rows) for i in range(layouts.max_rows.bit_length() + 1)}:
        padding = _padding_under_bounds(model, layouts, 1, num_rows=num_rows)
        assert padding.budget is not None
        model.ops.apply_budget(padding, padding.budget, model.state)
    _choose_tokens(model, layouts)


@contextmanager
def every_kernel(*backends: AttentionBackend, max_tokens: int = 0) -> Iterator[None]:
    """In this block attention of these backends, and products of quantised weights, run every kernel that they have.
    max_tokens: as of `AttentionBackend.every_variant`."""
    with ExitStack() as stack:
        for backend in backends:
            stack.enter_context(backend.every_variant(max_tokens))
        stack.enter_context(every_tile())
        yield


def _choose_tokens(model: SpecDecodeModel, layouts: LayoutBuffer) -> None:
    """Masks and samples logits of the target's dtype, and of float32, which logits processors give."""
    padding = _padding_under_bounds(model, layouts, 1, sampled=True)
    model.ops.prepare(padding, model.state)
    vocab_size, device = model.target.spec.vocab_size, model.device
    bitmask = torch.full((1, num_words(vocab_size)), -1, dtype=torch.int32, device=device)
    row = torch.zeros(1, dtype=torch.int32, device=device)
    for dtype in (model.dtype, torch.float32):
        logits = torch.zeros(1, vocab_size, dtype=dtype, device=device)
        model.ops.apply_token_bitmask(logits, bitmask, row)
        model.ops.argmax(logits)
        padding.logits = logits
        model.ops.target_tokens(padding, model.state)
    # Logits before the first token of request 0, which has no penalties yet.
    numbers = torch.zeros(NUMBERS, 1, dtype=torch.int64, device=device)
    rows = PenalisedRows(numbers, torch.zeros(1, dtype=torch.int64, device=device), 0)
    model.ops.penalise(torch.zeros(1, vocab_size, device=device), rows, model.state)


def _token_counts(model: SpecDecodeModel, max_tokens: int) -> list[int]:
    """Numbers of tokens that together take every tile of the experts, every form of their grouping, and the form of
    the delta rule for blocks of more tokens than a row of few drafts has."""
    counts = {min(DELTA_CHUNK, max_tokens)} if model.pool is not None else set()
    moe = model.target.spec.decoder.moe
    if moe is None:
        return sorted(counts)
    entries = [tile.rows * moe.num_experts for tile in TILES] + [FEW_ENTRIES]
    last = {count // moe.experts_per_token for count in entries}
    counts |= {1, *last, *(count + 1 for count in last)}
    return sorted(count for count in counts if 1 <= count <= max_tokens)


def _padding_under_bounds(
    model: SpecDecodeModel,
    layouts: LayoutBuffer,
    num_tokens: int,
    sampled: bool = False,
    draft_width: int | None = None,
    num_rows: int = NUM_ROWS,
) -> ForwardBatch:
    """Padding rows, the first of which the host takes for one of up to `num_tokens` tokens of a long context."""
    device, longest = model.device, model.state.max_len
    draft_width = model.state.k if draft_width is None else draft_width
    size = num_rows * -(-num_tokens // num_rows)
    layouts.send_nothing(num_rows, size)
    batch, budget = layouts.padded(num_rows, size)
    lens, ends = np.zeros((2, num_rows), dtype=np.int64)
    lens[0], ends[0] = num_tokens, longest
    return ForwardBatch(
        batch=batch,
        logits_token=torch.zeros(1, dtype=torch.int32, device=device),
        logits_row=torch.full((1,), -1, dtype=torch.int32, device=device),
        bounds=LengthBounds(lens, ends, ends, max_overestimate=longest),
        traits=BatchTraits(
            sampled, drafts=model.drafter is not None and draft_width > 0, adapted=bool(model.target.adapter_names)
        ),
        budget=budget,
        draft_width=draft_width,
    )
