"""Puts an engine together around random weights: the parts that serve, without a checkpoint and without prefill."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from benchmarks.gpu.engine import SkippedPrefill
from benchmarks.gpu.forced_ops import ForcedAcceptance, force_acceptance
from benchmarks.gpu.shapes import Shape, draft_tensors, target_tensors
from benchmarks.gpu.synthetic import SyntheticAcceptance
from dflash_backend.attention import AttentionBackend, Requirements, select_backend
from dflash_backend.core.engine import EngineCore
from dflash_backend.core.scheduler_config import SchedulerConfig, max_positions
from dflash_backend.drafters.base import draft_patterns
from dflash_backend.drafters.dflash.drafter import DFlashDrafter, DFlashModel, DFlashWeights
from dflash_backend.models import target_patterns
from dflash_backend.models.decoder import DecoderTarget, TargetWeights
from dflash_backend.models.ops import select_ops
from dflash_backend.worker.batch import ForwardBatch
from dflash_backend.worker.kv_cache import PagedKVCache
from dflash_backend.worker.runner import ModelRunner
from dflash_backend.worker.state import StateTensors
from dflash_backend.worker.step import SpecDecodeModel
from dflash_backend.worker.step_ops import select_step_ops

BLOCK_SIZE = 16
# Drawn acceptances in the table that a captured step looks them up in; a power of two.
TABLE_SIZE = 1 << 16


@dataclass(frozen=True)
class EngineSizes:
    """The sizes of an engine: the numbers of requests that decode at once (`batches`, a captured step for each),
    positions of one request, KV blocks of all."""

    batches: tuple[int, ...]
    max_model_len: int
    num_blocks: int

    @property
    def num_rows(self) -> int:
        """Requests at once, at most."""
        return max(self.batches)


class RandomEngine:
    """The models of a shape and their KV, from which cores with and without drafts are made."""

    def __init__(
        self,
        shape: Shape,
        sizes: EngineSizes,
        device: torch.device,
        dtype: torch.dtype,
        quantised: str | None = None,
        fp8_activations: bool = False,
    ) -> None:
        """quantised: what the target's projections are in, FP8 or INT4. fp8_activations: as
        `activation_quantization=fp8`."""
        self.shape, self.sizes, self.device, self.dtype = shape, sizes, device, dtype
        k = shape.num_speculative_tokens
        positions = max_positions(sizes.max_model_len, k)
        target = TargetWeights.read(target_tensors(shape, dtype, device, quantised), shape.target)
        draft = DFlashWeights.read(draft_tensors(shape, dtype, device), shape.draft)
        ops = select_ops(device, fp8_activations=dtype if fp8_activations else None)
        self.target = DecoderTarget(shape.target, target, positions, ops)
        self.invariant_target = DecoderTarget(shape.target, target, positions, select_ops(device, batch_invariant=True))
        self.draft = DFlashModel(shape.draft, draft, positions)
        self.kv = PagedKVCache.allocate(
            shape.target.decoder, shape.draft.decoder, sizes.num_blocks, BLOCK_SIZE, dtype, device
        )
        for layer in (*self.kv.target, *self.kv.draft):
            layer.data.normal_()
        self.backend = attention_backend(shape, device, dtype)
        # Of the core that was made last.
        self.num_graphs = 0

    def core(
        self,
        k: int,
        acceptance: SyntheticAcceptance | None,
        batch_invariant: bool = False,
        prompt_tokens: int | None = None,
    ) -> EngineCore:
        """An engine core on a device runner of its own, its graphs captured. `acceptance` is needed with k > 0.
        batch_invariant: as the setting. prompt_tokens: of a step at most; all kernels are then compiled and all graphs
        captured that a server has for these sizes. None: prompts are not computed. Raises `ValueError` where the
        attention backend does not have `batch_invariant`."""
        sizes = self.sizes
        target = self.invariant_target if batch_invariant else self.target
        backend = self.backend.batch_invariant() if batch_invariant else self.backend
        drafter = None
        if k:
            drafter = DFlashDrafter(self.draft, self.target, self.kv.draft, self.backend)
        ops = select_step_ops(self.device)
        if acceptance is not None and k:
            ops = force_acceptance(ops, drawn_by_place(acceptance, self.device))
        state = StateTensors.allocate(
            sizes.num_rows, sizes.max_model_len, k, self.kv.block_size, target.spec.vocab_size, self.device
        )
        model = SpecDecodeModel(
            target, drafter, self.kv, backend, ops, state, draft_temperature_ratio=0.0, dtype=self.dtype
        )
        runner = ModelRunner(model, max_tokens=max(sizes.num_rows * (k + 1), prompt_tokens or 0))
        runner.prepare(
            use_graphs=True,
            progress=lambda message, fraction: None,
            sizes=sizes.batches,
            serves=prompt_tokens is not None,
        )
        self.num_graphs = runner.graphs.num_steps
        # Where prompts are not computed, nothing bounds how many tokens of theirs a step takes.
        unbounded = 1 << 40
        most = prompt_tokens or unbounded
        config = SchedulerConfig(
            num_blocks=sizes.num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=sizes.max_model_len,
            max_num_seqs=sizes.num_rows,
            max_num_batched_tokens=most,
            max_queue_size=sizes.num_rows,
            enable_prefix_caching=False,
            num_speculative_tokens=k,
            lookahead_base=1 if k else 0,
            drafter_max_len=max_positions(sizes.max_model_len, k) if k else 0,
            max_prefill_tokens_per_step=most,
            max_step_s=float(unbounded),
        )
        return EngineCore(config, SkippedPrefill(runner), overlap=True)


def attention_backend(shape: Shape, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """The backend that a server with these models would take."""
    return select_backend(None, attention_needs(shape, device, dtype), BLOCK_SIZE)


def attention_needs(shape: Shape, device: torch.device, dtype: torch.dtype) -> Requirements:
    """What these models need of it."""
    patterns = {*target_patterns(shape.target), *draft_patterns(shape.draft)}
    head_dims = {shape.target.decoder.head_dim, shape.draft.decoder.head_dim}
    return Requirements(frozenset(patterns), frozenset(head_dims), dtype, device.type)


def drawn_by_place(acceptance: SyntheticAcceptance, device: torch.device) -> ForcedAcceptance:
    """How many drafts of each row stand: looked up by the row's request and start in a
    table of draws, since a captured step can only compute from what is on the device."""
    table = torch.tensor(acceptance.draw(TABLE_SIZE, seed=0), dtype=torch.int32, device=device)
    multipliers = [random.Random(seed).randrange(1, TABLE_SIZE, 2) for seed in (1, 2)]

    def accepted(step: ForwardBatch) -> torch.Tensor:
        place = step.starts.long() * multipliers[0] + step.batch.req_idx.long() * multipliers[1]
        return torch.minimum(table[place % TABLE_SIZE], step.batch.num_draft)

    return accepted
