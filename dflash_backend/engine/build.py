"""Puts an engine together from settings: checkpoints, models, KV, worker, core. Nothing else knows all the
parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dflash_backend.attention import AttentionBackend, BackendError, Requirements, check_installed, select_backend
from dflash_backend.attention.cascade import CascadeCost
from dflash_backend.checkpoints import CheckpointError, TargetSpec
from dflash_backend.checkpoints.decoder_fields import DTYPE_NAMES
from dflash_backend.checkpoints.describe import target_facts
from dflash_backend.checkpoints.weights import TORCH_DTYPES
from dflash_backend.config import ConfigError, EngineConfig
from dflash_backend.core.engine import EngineCore
from dflash_backend.core.plan import ModelRunnerOutput, SchedulerOutput
from dflash_backend.core.scheduler_config import SchedulerConfig, max_positions
from dflash_backend.core.trace import StepTrace
from dflash_backend.cores import usable_cores
from dflash_backend.device import choose_device, num_cores, share_cores
from dflash_backend.drafters.base import DrafterFactory, LoadOptions, draft_patterns
from dflash_backend.drafters.describe import draft_facts
from dflash_backend.drafters.ngram.drafter import NgramDrafter
from dflash_backend.drafters.pairing import short_reach
from dflash_backend.drafters.registry import drafter_class
from dflash_backend.drafters.resolve import ModelPair, resolve_pair
from dflash_backend.engine.checks import (
    allocate_states,
    check_activation_quantization,
    check_adapters,
    check_quantization,
    check_recurrent,
    find_adapters,
    keeps_quantised,
    num_snapshots,
    num_states,
    report_kv_dtype,
    target_kv_dtype,
)
from dflash_backend.engine.drafter_loader import DrafterLoader
from dflash_backend.engine.kv_tiers import wants_tiers, with_tiers
from dflash_backend.engine.measured_steps import measured_steps
from dflash_backend.engine.sizing import (
    Sizes,
    allocate_kv,
    at_length,
    cpu_budget,
    gpu_budget,
    loaded_bytes,
    measured_sizes,
    model_bytes,
    settle_sizes,
    sized_pair,
    take_kv,
    widest_window,
)
from dflash_backend.error_text import first_line
from dflash_backend.heap import give_back_memory, keep_step_buffers
from dflash_backend.messages import EngineReady
from dflash_backend.models import TargetModel, load_target, target_patterns
from dflash_backend.models.ops import select_ops, use_measured_products
from dflash_backend.parallel.group import (
    RankGroup,
    check_tensor_parallel,
    load_parallel_target,
    num_rank_0_threads,
    own_part,
)
from dflash_backend.parallel.links import RankSetup
from dflash_backend.parallel.target import TensorParallelTarget
from dflash_backend.structured_output.compiler import GrammarCompiler
from dflash_backend.tenant_names import parse_tenant_weights
from dflash_backend.text.tokenizer import tokenizer_json
from dflash_backend.worker import ModelRunner
from dflash_backend.worker.batch_parallel import BatchThreads, num_batch_threads
from dflash_backend.worker.graphs import capture_shapes, measured_padded_steps
from dflash_backend.worker.kv_cache import PagedKVCache
from dflash_backend.worker.memory import CudaMemory, expected_use, measure_use
from dflash_backend.worker.state import StateTensors
from dflash_backend.worker.step import SpecDecodeModel
from dflash_backend.worker.step_ops import select_step_ops

# Prompt tokens that a step may take on such a device beside decode rows, however few these are (docs/scheduling.md).
MIN_PREFILL_TOKENS = {"cpu": 64, "cuda": 256}
# How much longer a step takes there whose rows have different numbers of drafts: on a CPU attention pads them, the
# verified ones are chosen apart, and the drafter's confidences take a pass over its logits.
UNEVEN_COST = {"cpu": 0.1, "cuda": 0.0}

# What can be wrong with a start, each with a sentence for the operator.
LOAD_ERRORS = (ConfigError, CheckpointError, BackendError)


@dataclass(frozen=True)
class BuiltEngine:
    """An engine that is ready to step, and what the stub must know of it."""

    core: EngineCore
    runner: ModelRunner
    pair: ModelPair
    ready: EngineReady
    trace: StepTrace | None = None
    grammars: GrammarCompiler | None = None
    drafters: DrafterLoader | None = None
    """Loads others in the drafter's place; None without a drafter that is a model."""

    def check(self) -> None:
        """Raises `RankLostError` when a process that shares the target is lost, and a step would fail."""
        if isinstance(target := self.runner.model.target, TensorParallelTarget):
            target.check()


@dataclass(frozen=True)
class LoadedModels:
    """The models on their device, and what runs their attention: `backend` the target's, `draft_backend` the
    drafter's."""

    pair: ModelPair
    target: TargetModel
    make_drafter: DrafterFactory | None
    backend: AttentionBackend
    draft_backend: AttentionBackend
    device: torch.device
    dtype: torch.dtype
    draft_options: LoadOptions | None = None


def build_engine(
    config: EngineConfig,
    progress: Progress | None = None,
    probe: CudaMemory | None = None,
    loaded: TargetModel | None = None,
) -> BuiltEngine:
    """Load the models that `config` names and build the engine around them.

    `progress` is called with `(message, fraction)`: what was read of each checkpoint, then its files. `probe` measures
    the memory that KV must fit beside the models; None: a GPU's own, on a CPU none. loaded: the target, where another
    engine with the same settings, and requests as long, has loaded it. Raises one of `LOAD_ERRORS`.
    """
    report = progress or (lambda message, fraction: None)
    device = choose_device(config)
    share_cores(config, device)
    keep_step_buffers()
    # Ranks that chose by their own clocks would not have the same bits.
    use_measured_products(config.enable_measured_products and config.tensor_parallel_size == 1)
    check_installed(config.attention_backend)
    report("reading checkpoints", 0.0)
    pair = resolve_pair(config)
    dtype = _dtype(config, pair.target, device)
    report_pair(pair, dtype, report)
    _check_pair(config, pair, dtype, device, report)
    ranks = None
    if config.tensor_parallel_size > 1:
        ranks = RankGroup.of(config, pair.target, loaded_bytes(pair, dtype), dtype, device)
    device = device if ranks is None else ranks.device
    if probe is None and device.type == "cuda":
        probe = CudaMemory(device)
    sizes = _first_sizes(config, pair, dtype, device, probe)
    try:
        models = _load_models(config, pair, sizes, dtype, device, report, ranks, loaded)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the models do not fit the GPU's memory while they are loaded: free memory that other programs hold, or "
            f"take smaller models ({first_line(error)})"
        ) from None
    if probe is not None:
        sizes = _measured_sizes(config, models, sizes, probe, report)
    if (warning := short_reach(pair.draft_model, sizes.max_model_len, pair.lookup is not None)) is not None:
        report(f"warning: {warning}", 0.95)
    grammars = GrammarCompiler(lambda: tokenizer_json(pair.target.path), pair.target.vocab_size)
    own, of_windows = own_part(config, models.pair), sizes.num_window_blocks
    take_kv(models.target, sizes.num_blocks)
    kv = allocate_kv(config, own, sizes.num_blocks, dtype, device, of_windows)
    runner = _runner(config, models, sizes, kv, grammars)
    use_graphs = config.enable_cuda_graphs and not config.kv_write_guard  # a graph does not let the guard look
    shapes = capture_shapes(runner.model.state.k) if config.adaptive_speculation else []
    runner.prepare(use_graphs, lambda message, done: report(message, 0.95 + 0.05 * done), shapes=shapes)
    trace = _trace(config)
    scheduler_config = _with_measured_steps(_scheduler_config(config, models, sizes), runner, shapes)
    scheduler_config, mover = with_tiers(config, scheduler_config, models.pair, runner)
    ready = engine_ready(models, sizes, scheduler_config, config.kv_cache_dtype)
    core = EngineCore(
        scheduler_config, runner, trace=trace, overlap=config.enable_overlap, grammars=grammars, mover=mover
    )
    report("the model is loaded", 1.0)
    drafters = _drafter_loader(config, models, sizes, runner)
    return BuiltEngine(core, runner, models.pair, ready, trace, grammars, drafters)


def _drafter_loader(
    config: EngineConfig, models: LoadedModels, sizes: Sizes, runner: ModelRunner
) -> DrafterLoader | None:
    """What loads another drafter in this one's place; it reports no progress, since the engine serves by then."""
    if models.draft_options is None or models.pair.draft_model is None:
        return None
    quiet = dataclasses.replace(models.draft_options, progress=lambda file, done: None)
    return DrafterLoader(config, models.pair, quiet, sizes.max_model_len, runner)


def _first_sizes(
    config: EngineConfig, pair: ModelPair, dtype: torch.dtype, device: torch.device, probe: CudaMemory | None
) -> Sizes:
    """The sizes before the models are loaded. With a probe, the most that there can be; how much there is shows once
    they are."""
    if probe is None:
        budget = cpu_budget(config)
    else:
        weights = model_bytes(pair, dtype, keeps_quantised(config, device), config.quantization == "fp8")
        # Rank 0 has more than its part of the target.
        budget = gpu_budget(config, expected_use(probe, weights // config.tensor_parallel_size))
    return settle_sizes(config, sized_pair(config, pair, device), budget, dtype)


def _load_models(
    config: EngineConfig,
    pair: ModelPair,
    sizes: Sizes,
    dtype: torch.dtype,
    device: torch.device,
    report: Progress,
    ranks: RankGroup | None = None,
    loaded: TargetModel | None = None,
) -> LoadedModels:
    pair = at_length(pair, sizes.max_model_len)
    needs = _requirements(config, pair, dtype, device)
    backend = select_backend(config.attention_backend, needs, config.kv_block_size)
    num_positions = max_positions(sizes.max_model_len, pair.num_speculative_tokens)
    ops = select_ops(device, _wanted_ops(backend))
    fp8_activations = None if config.activation_quantization is None else dtype
    target_ops = select_ops(device, _wanted_ops(backend), config.batch_invariant, fp8_activations)
    progress: Progress = lambda file, done: report(f"target: {file}", 0.1 + 0.6 * done)  # noqa: E731
    if loaded is not None:
        target = loaded
    elif ranks is not None:
        setup = RankSetup(
            spec=pair.target,
            max_positions=num_positions,
            num_blocks=sizes.num_blocks,
            num_states=num_states(config),
            block_size=config.kv_block_size,
            fp8=config.quantization == "fp8",
            log_level=config.log_level,
            attention=config.attention_backend,
            needs=needs,
            shard=ranks.shard,
            device=ranks.device,
        )
        target = load_parallel_target(ranks, setup, progress, target_ops)
    else:
        fp8 = config.quantization == "fp8"
        adapters = find_adapters(config)
        target = load_target(
            pair.target, num_positions, dtype, device, progress, target_ops, fp8=fp8, adapters=adapters
        )
    if config.enable_coarse_head:
        target.add_coarse_head()
    make_drafter, options = None, None
    if pair.draft is not None:
        options = LoadOptions(
            num_positions, dtype, device, lambda file, done: report(f"drafter: {file}", 0.7 + 0.2 * done), ops
        )
        make_drafter = drafter_class(pair.draft).load(pair.draft, options)
    give_back_memory()
    # What the drafter proposes changes no text, so its attention stays the fast one.
    target_backend = backend.batch_invariant() if config.batch_invariant else backend
    return LoadedModels(pair, target, make_drafter, target_backend, backend, device, dtype, options)


def _measured_sizes(
    config: EngineConfig, models: LoadedModels, most: Sizes, probe: CudaMemory, report: Progress
) -> Sizes:
    """The sizes that fit beside the models and the largest step. The models were loaded for the length of `most`, so
    requests get no longer."""
    report("measuring the memory of the largest steps", 0.9)

    def make_runner() -> Callable[[SchedulerOutput], object]:
        # The smallest KV, under as many tables as there will be.
        own, of_windows = own_part(config, models.pair), min(1, most.num_window_blocks)
        kv = allocate_kv(config, own, 1, models.dtype, models.device, of_windows)
        runner = _runner(config, models, most, kv)

        def run(plan: SchedulerOutput) -> ModelRunnerOutput:
            runner.submit(plan)
            return runner.collect_results()

        return run

    captures = config.enable_cuda_graphs and models.device.type == "cuda"
    use = measure_use(probe, make_runner, _scheduler_config(config, models, most), captures)
    report(f"memory: {use.describe(config.gpu_memory_utilization)}", 0.95)
    sizes = measured_sizes(config, models.pair, models.target, use, models.dtype)
    if sizes.max_model_len <= most.max_model_len:
        return sizes
    return dataclasses.replace(most, num_blocks=sizes.num_blocks, num_window_blocks=sizes.num_window_blocks)


def _wanted_ops(backend: AttentionBackend) -> str | None:
    """Which operations go with the backend: under Triton's interpreter all of a GPU's path runs on a CPU."""
    return "triton" if backend.name == "triton" else None


def _runner(
    config: EngineConfig,
    models: LoadedModels,
    sizes: Sizes,
    kv: PagedKVCache,
    grammars: GrammarCompiler | None = None,
) -> ModelRunner:
    """The worker for these models over this KV."""
    pair, target, device = models.pair, models.target, models.device
    make_drafter = models.make_drafter
    drafter = None if make_drafter is None else make_drafter(target, kv.draft, models.draft_backend)
    decoder = own_part(config, pair).target.decoder
    model = SpecDecodeModel(
        target,
        drafter,
        kv,
        models.backend,
        select_step_ops(device, _wanted_ops(models.backend)),
        StateTensors.allocate(
            config.max_num_seqs,
            sizes.max_model_len,
            pair.num_speculative_tokens,
            kv.block_size,
            target.spec.vocab_size,
            device,
            has_window_blocks=kv.num_window_blocks > 0,
            has_lookup=pair.lookup is not None,
        ),
        draft_temperature_ratio=config.draft_temperature_ratio,
        dtype=models.dtype,
        wants_confidence=config.adaptive_speculation,
        draft_backend=models.draft_backend,
        pool=allocate_states(config, target, decoder, models.dtype, device),
        lookup=_lookup_beside(models),
        shares_prefixes=min_shared_positions(config, models.backend, target) > 0,
    )
    size = loaded_bytes(pair, models.dtype)
    if config.tensor_parallel_size == 1:
        threads = BatchThreads(num_batch_threads(size, num_cores(config)), config.batch_invariant, size)
    else:  # passes over all ranks come one after the other
        threads = BatchThreads(1, op_threads=num_rank_0_threads(target))
    return ModelRunner(model, config.max_num_batched_tokens, threads, grammars)


def _lookup_beside(models: LoadedModels) -> NgramDrafter | None:
    """What is looked up beside the drafter's model."""
    if models.pair.lookup is None or models.draft_options is None:
        return None
    return NgramDrafter(models.pair.lookup, models.draft_options.ops)


def _drafter_len(pair: ModelPair, sizes: Sizes) -> int:
    """How many positions the drafter can run."""
    if pair.draft is None:
        return 0
    longest = max_positions(sizes.max_model_len, pair.num_speculative_tokens)
    return longest if pair.draft_model is None else min(pair.draft_model.decoder.max_len, longest)


def _check_pair(
    config: EngineConfig, pair: ModelPair, dtype: torch.dtype, device: torch.device, report: Progress
) -> None:
    """Raises `ConfigError` for settings that this pair cannot have."""
    check_recurrent(config, pair, dtype, device, report)
    check_tensor_parallel(config, pair.target, device)
    keeps = keeps_quantised(config, device)
    check_quantization(config, pair.target, keeps, report)
    check_activation_quantization(config, pair.target, keeps, report)
    report_kv_dtype(config, pair, dtype, report)
    check_adapters(config)
    wants_tiers(config)


def _scheduler_config(config: EngineConfig, models: LoadedModels, sizes: Sizes) -> SchedulerConfig:
    drafter = None if models.pair.draft is None else drafter_class(models.pair.draft)
    copies = None if models.pair.target.decoder.delta_net is None else num_snapshots(config)
    decoder, kv_dtype = models.target.spec.decoder, target_kv_dtype(config) or models.dtype
    heads = decoder.num_heads, decoder.num_kv_heads, decoder.head_dim
    sharing = CascadeCost.of(*heads, models.dtype.itemsize, kv_dtype.itemsize)
    return SchedulerConfig(
        num_blocks=sizes.num_blocks,
        block_size=config.kv_block_size,
        max_model_len=sizes.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_queue_size=config.max_queue_size,
        max_queue_tokens=config.max_queue_tokens,
        max_step_s=None if config.max_step_time_ms is None else config.max_step_time_ms / 1e3,
        tenant_weights=parse_tenant_weights(config.tenant_weights),
        enable_prefix_caching=config.enable_prefix_caching and copies != 0,
        num_state_snapshots=copies,
        num_window_blocks=sizes.num_window_blocks,
        sliding_window=widest_window(models.pair) if sizes.num_window_blocks else 0,
        num_speculative_tokens=models.pair.num_speculative_tokens,
        adaptive_speculation=config.adaptive_speculation,
        lookahead_base=0 if drafter is None else drafter.lookahead_base,
        autoregressive=drafter is not None and drafter.autoregressive,
        reads_next_tokens=drafter is not None and drafter.reads_next_tokens,
        drafter_max_len=_drafter_len(models.pair, sizes),
        max_prefill_tokens_per_step=config.max_prefill_tokens_per_step,
        min_prefill_tokens_per_step=MIN_PREFILL_TOKENS[models.device.type],
        uneven_cost=UNEVEN_COST[models.device.type],
        min_shared_positions=min_shared_positions(config, models.backend, models.target),
        shared_queries_per_tile=sharing.queries_per_tile,
        positions_per_shared_query=sharing.positions_per_query,
        kv_write_guard=config.kv_write_guard,
        kv_events=config.reported_kv_events,
        seed=config.seed,
    )


def _with_measured_steps(
    config: SchedulerConfig, runner: ModelRunner, shapes: Sequence[tuple[int, int]]
) -> SchedulerConfig:
    """The settings with the shapes of the padded steps, where there are any that the number of drafts follows, and with
    the times of steps, where they are run as they will be."""
    if runner.model.ops.on_host:
        if not config.adaptive_speculation or not config.num_speculative_tokens:
            return config
        vocab_size = runner.model.target.spec.vocab_size
        return dataclasses.replace(config, measured_steps=measured_steps(config, runner, vocab_size))
    steps = runner.graphs.steps(sampled=False)
    draft_shapes = tuple(shape for shape in shapes if shape[0]) if steps else ()
    if not draft_shapes or runner.device.type != "cuda":
        return dataclasses.replace(config, draft_shapes=draft_shapes)
    measured = tuple(measured_padded_steps(runner.model, runner.layouts, steps))
    return dataclasses.replace(config, draft_shapes=draft_shapes, measured_steps=measured)


def _trace(config: EngineConfig) -> StepTrace | None:
    if not config.trace_dir:
        return None
    try:
        return StepTrace(Path(config.trace_dir), config.trace_steps)
    except OSError as error:
        reason = "it is no folder" if isinstance(error, FileExistsError) else error.strerror
        raise ConfigError(
            f"setting 'trace_dir' is {config.trace_dir!r}, where no trace can be written ({reason}); name a "
            "folder that the server may write to, or leave it empty"
        ) from None


def _dtype(config: EngineConfig, target: TargetSpec, device: torch.device) -> torch.dtype:
    name = config.dtype or ("float32" if device.type == "cpu" else target.dtype)
    return TORCH_DTYPES[DTYPE_NAMES[name]]


def _requirements(config: EngineConfig, pair: ModelPair, dtype: torch.dtype, device: torch.device) -> Requirements:
    target, draft = pair.target, pair.draft_model
    return Requirements(
        patterns=frozenset({*target_patterns(target), *(draft_patterns(draft) if draft else ())}),
        head_dims=target.decoder.head_dims | (draft.decoder.head_dims if draft else frozenset()),
        dtype=dtype,
        device=device.type,
        batch_invariant=config.batch_invariant,
        kv_dtype=target_kv_dtype(config),
    )


Progress = Callable[[str, float], None]


def report_pair(pair: ModelPair, dtype: torch.dtype, report: Progress) -> None:
    """Say what the checkpoints are and how they were read."""
    if pair.warning:
        report(f"warning: {pair.warning}", 0.0)
    served = str(dtype).removeprefix("torch.")
    for label, text in target_facts(pair.target, served):
        report(f"target: {label}: {text}", 0.05)
    for label, text in draft_facts(pair.draft, served) if pair.draft else []:
        report(f"drafter: {label}: {text}", 0.1)


def engine_ready(models: LoadedModels, sizes: Sizes, scheduler: SchedulerConfig, kv_dtype: str | None) -> EngineReady:
    """The message that the engine takes requests. `kv_dtype` names what the target's KV is in where that is not the
    models' dtype."""
    pair = models.pair
    kv = f"{sizes.num_blocks} blocks of {scheduler.block_size} tokens{f' in {kv_dtype}' if kv_dtype else ''}"
    if sizes.num_window_blocks:
        kv += f" ({sizes.num_window_blocks} in layers with a window)"
    return EngineReady(
        max_model_len=sizes.max_model_len,
        num_speculative_tokens=pair.num_speculative_tokens,
        num_kv_blocks=sizes.num_blocks,
        kv_block_size=scheduler.block_size,
        vocab_size=pair.target.vocab_size,
        description=_describe(models, sizes, kv),
        reads_next_tokens=scheduler.reads_next_tokens,
        finds_blocks=scheduler.enable_prefix_caching,
        has_drafter=pair.draft_model is not None,
        num_tier_blocks=sum(tier.num_slots[0] for tier in scheduler.tiers),
        drafting=pair.drafting,
        lora_names=models.target.adapter_names,
    )


def _describe(models: LoadedModels, sizes: Sizes, kv: str) -> str:
    pair, device, number_type = models.pair, models.device, str(models.dtype).removeprefix("torch.")
    threads = f", {torch.get_num_threads()} threads of {usable_cores()} cores" if device.type == "cpu" else ""
    length = f"requests of up to {sizes.max_model_len} tokens"
    names = models.target.adapter_names
    adapters = f", LoRA adapters {', '.join(names)}" if names else ""
    if sizes.limited_from is not None:
        length += f" (the target could do {sizes.limited_from}; the KV cache holds no more, {sizes.more})"
    return (
        f"target {pair.target.path.name} ({pair.target.architecture}, {pair.target.decoder.num_layers} layers)"
        f"{adapters}, {pair.drafting}; {device.type}, {number_type}, attention {models.backend.name}{threads}; "
        f"KV cache of {kv}; {length}"
    )


# Positions that rows share, at least, so that what is saved pays for two launches more. From where on it pays for the
# partial results is the scheduler's to find (`CascadeCost`).
MIN_SHARED_POSITIONS = 512


def min_shared_positions(config: EngineConfig, backend: AttentionBackend, target: TargetModel) -> int:
    """From how many positions on rows read what they share together; 0: never."""
    # How a context is cut would depend on which rows share a step.
    wanted = config.share_prefix_attention and config.enable_prefix_caching and not config.batch_invariant
    sees_all = any(pattern.causal and pattern.sliding_window is None for pattern in target.patterns)
    return MIN_SHARED_POSITIONS if wanted and backend.capabilities.shares_prefixes and sees_all else 0
