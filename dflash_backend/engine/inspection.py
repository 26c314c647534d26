"""What a checkpoint is, how it was read and what it needs, from its config and the headers of its weights.

No weights are loaded and nothing is run.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from dflash_backend.attention import FP8, AttentionPattern, Requirements
from dflash_backend.attention.selection import BACKENDS, lacking
from dflash_backend.checkpoints.describe import target_facts
from dflash_backend.checkpoints.families import FAMILIES
from dflash_backend.checkpoints.files import TensorHeader
from dflash_backend.checkpoints.find import find_model
from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.checkpoints.quantization import load_quantization
from dflash_backend.checkpoints.quantization.stored import num_parameters
from dflash_backend.checkpoints.spec import CheckpointError, DecoderSpec, TargetSpec
from dflash_backend.checkpoints.targets import read_target
from dflash_backend.checkpoints.weights import TORCH_DTYPES, check_weights
from dflash_backend.config import NGRAM, EngineConfig
from dflash_backend.core.scheduler_config import blocks_for
from dflash_backend.drafters.base import draft_patterns
from dflash_backend.drafters.describe import draft_facts
from dflash_backend.drafters.ngram.config import read_ngram
from dflash_backend.drafters.pairing import check_pair, short_reach
from dflash_backend.drafters.published import published_for, unsupported_target
from dflash_backend.drafters.registry import drafter_class, is_drafter, read_draft, read_draft_config
from dflash_backend.drafters.resolve import find_drafter
from dflash_backend.drafters.spec import DraftModelSpec
from dflash_backend.drafters.speculators import is_speculators
from dflash_backend.engine.sizing import window_group
from dflash_backend.models import decoder
from dflash_backend.worker.kv_cache import bytes_per_token, window_bytes_per_block


@dataclass(frozen=True)
class WeightsReport:
    """The tensors that the model takes. `num_bytes` is their size on disk, `dtypes` counts tensors by type, as
    safetensors names it."""

    num_files: int
    num_tensors: int
    num_parameters: int
    num_bytes: int
    dtypes: dict[str, int]


@dataclass(frozen=True)
class AttentionReport:
    """What the model asks of an attention backend, and what each one of this installation lacks of it (nothing: it
    would do) on `device` in `dtype`, which are what the server would choose on this machine."""

    causal: bool
    non_causal: bool
    sliding_windows: tuple[int, ...]
    sinks: bool
    head_size: int
    device: str
    dtype: str
    backends: dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class CheckpointReport:
    """One checkpoint. `facts` are names and values, in the order to show them. weights: None of a config alone. kv_fp8:
    the KV of a target with `kv_cache_dtype` of fp8; None of a drafter, whose KV stays in its dtype."""

    kind: Literal["target", "drafter"]
    path: Path
    format: str
    facts: tuple[tuple[str, str], ...]
    weights: WeightsReport | None
    kv: KVReport
    kv_fp8: KVReport | None
    attention: AttentionReport


@dataclass(frozen=True)
class MethodReport:
    """A drafter without a checkpoint. `facts` as those of a `CheckpointReport`."""

    method: str
    facts: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class PairReport:
    """Whether a drafter fits a target. `num_speculative_tokens` is k that the server would take; `reason` says why the
    two do not fit, `warning` what is lost where they do."""

    fits: bool
    num_speculative_tokens: int
    reason: str | None = None
    warning: str | None = None


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found: one checkpoint, or a target with a drafter, which is a second checkpoint or a `method`.
    published: hub ids of the supported drafters that are known for a target alone."""

    checkpoints: tuple[CheckpointReport, ...]
    pair: PairReport | None = None
    method: MethodReport | None = None
    published: tuple[str, ...] = ()


def inspect_config(name: str) -> Inspection:
    """What the file of a drafter's config says without weights, and why its target is not supported where the config
    names one of the published table. Raises `CheckpointError`."""
    path = Path(name).expanduser()
    config = JsonReader.load(path)
    if not is_speculators(config) and not FAMILIES.keys().isdisjoint(config.strings("architectures")):
        raise CheckpointError(f"{path} is a target's config, whose weights are read, too; give its directory")
    spec = read_draft_config(path)
    facts = draft_facts(spec)
    if spec.target_name is not None and (reason := unsupported_target(spec.target_name)) is not None:
        facts.append(("target", reason))
    return Inspection((_draft_report(spec, tuple(facts), None),))


def inspect(name: str, draft_name: str | None = None, revision: str = "", draft_revision: str = "") -> Inspection:
    """Read the checkpoint `name` (directory or hub id), and with `draft_name`, which is as the setting `draft_model`, a
    drafter for it, of these revisions of the hub. A drafter's `config.json` by its own name is read alone. Raises
    `CheckpointError`."""
    is_alone = draft_name is None and not revision
    if is_alone and Path(name).name == "config.json" and Path(name).expanduser().is_file():
        return inspect_config(name)
    directory = find_model(name, "the checkpoint", revision)
    first_is_drafter = is_drafter(directory)
    if draft_name is None:
        if first_is_drafter:
            return Inspection((inspect_draft(read_draft(directory)),))
        published = tuple(each.name for each in published_for(name, directory))
        return Inspection((inspect_target(read_target(directory)),), published=published)
    if first_is_drafter:
        raise CheckpointError(f"'{name}' is a drafter; give the target first and the drafter with --draft")
    target = read_target(directory)
    if draft_name == NGRAM:
        ngram = read_ngram(EngineConfig(draft_model=NGRAM, draft_revision=draft_revision))
        report = MethodReport(ngram.method, tuple(draft_facts(ngram)))
        k = ngram.num_speculative_tokens
        return Inspection((inspect_target(target, k),), PairReport(True, k), report)
    draft = read_draft(find_drafter(draft_name, "--draft", draft_revision)).for_target(target)
    reports = inspect_target(target, draft.num_speculative_tokens), inspect_draft(draft, target.decoder.max_len)
    return Inspection(reports, inspect_pair(target, draft))


def inspect_target(spec: TargetSpec, num_drafts: int = 0) -> CheckpointReport:
    """num_drafts: k of its drafter. Raises `CheckpointError` when the weights are not those that the config asks
    for."""
    kv, kv_fp8 = target_kv(spec.decoder, spec.dtype, num_drafts)
    headers = check_weights(
        spec.path,
        lambda source: decoder.TargetWeights.read(source, spec),
        ignored=lambda name: decoder.is_unused(spec, name),
    )
    return CheckpointReport(
        kind="target",
        path=spec.path,
        format=spec.architecture,
        facts=tuple(target_facts(spec)),
        weights=_weights(spec.path, headers),
        kv=kv,
        kv_fp8=kv_fp8,
        attention=_attention(spec.decoder, set(decoder.target_patterns(spec)), spec.dtype),
    )


def inspect_draft(spec: DraftModelSpec, request_tokens: int | None = None) -> CheckpointReport:
    """request_tokens: the longest request of its target. Raises `CheckpointError` when the weights are not those that
    the config asks for."""
    weights = _weights(spec.path, drafter_class(spec).check_weights(spec))
    return _draft_report(spec, tuple(draft_facts(spec)), weights, request_tokens)


def _draft_report(
    spec: DraftModelSpec,
    facts: tuple[tuple[str, str], ...],
    weights: WeightsReport | None,
    request_tokens: int | None = None,
) -> CheckpointReport:
    return CheckpointReport(
        kind="drafter",
        path=spec.path,
        format=spec.format,
        facts=facts,
        weights=weights,
        kv=draft_kv(spec.decoder, spec.dtype, request_tokens),
        kv_fp8=None,
        attention=_attention(spec.decoder, set(draft_patterns(spec)), spec.dtype),
    )


def inspect_pair(target: TargetSpec, draft: DraftModelSpec) -> PairReport:
    """Whether the two belong together; never raises."""
    try:
        check_pair(target, draft)
    except CheckpointError as error:
        return PairReport(False, 0, str(error))
    return PairReport(True, draft.num_speculative_tokens, warning=short_reach(draft, target.decoder.max_len))


def _weights(path: Path, headers: dict[str, TensorHeader]) -> WeightsReport:
    return WeightsReport(
        num_files=len({header.file for header in headers.values()}),
        num_tensors=len(headers),
        num_parameters=num_parameters(headers, load_quantization(path)),
        num_bytes=sum(header.num_bytes for header in headers.values()),
        dtypes=dict(sorted(Counter(header.blocks or header.dtype for header in headers.values()).items())),
    )


def _attention(spec: DecoderSpec, patterns: set[AttentionPattern], dtype: str) -> AttentionReport:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # As the server chooses with both settings on auto.
    chosen = "float32" if device == "cpu" else dtype
    needs = Requirements(frozenset(patterns), spec.head_dims, TORCH_DTYPES[chosen], device)
    return AttentionReport(
        causal=any(pattern.causal for pattern in patterns),
        non_causal=not all(pattern.causal for pattern in patterns),
        sliding_windows=tuple(sorted({p.sliding_window for p in patterns if p.sliding_window is not None})),
        sinks=any(pattern.sinks for pattern in patterns),
        head_size=spec.head_dim,
        device=device,
        dtype=chosen,
        backends={
            name: tuple(lacking(capabilities, needs, EngineConfig.kv_block_size))
            for name, (capabilities, _) in BACKENDS.items()
        },
    )


BLOCK_SIZE = EngineConfig().kv_block_size
FP8_NAME = "fp8"


@dataclass(frozen=True)
class WindowReport:
    """A target's layers with a sliding window. bytes_per_token: what they take of a token. blocks_per_request: how many
    of their blocks a request keeps that decodes with k drafts, at most and however long it is."""

    window: int
    num_layers: int
    bytes_per_token: int
    blocks_per_request: int


@dataclass(frozen=True)
class KVReport:
    """KV of one model alone: bytes of a token over all layers, and of a block of `block_size`. request_bytes: of a
    request of `request_tokens` tokens that decodes, once its layers with a window have blocks of their own; without,
    request_bytes_in_one_table. dtype: the checkpoint's own name of it, or "fp8", whose bytes include scales."""

    dtype: str
    bytes_per_token: int
    block_size: int
    bytes_per_block: int
    request_tokens: int
    request_bytes: int
    request_bytes_in_one_table: int
    windows: WindowReport | None = None


def target_kv(decoder: DecoderSpec, dtype: str, num_drafts: int = 0) -> tuple[KVReport, KVReport]:
    """The KV of a target in its own dtype and in FP8, at the longest request that it can address. num_drafts: k."""
    own, in_fp8 = (_report(decoder, name, decoder.max_len, num_drafts) for name in (dtype, FP8_NAME))
    return own, in_fp8


def draft_kv(decoder: DecoderSpec, dtype: str, request_tokens: int | None = None) -> KVReport:
    """The KV of a drafter, all of whose layers keep every position. request_tokens: the longest request of its target;
    None: what the drafter alone can address."""
    return _report(decoder, dtype, request_tokens or decoder.max_len, None)


def _report(decoder: DecoderSpec, name: str, request_tokens: int, num_drafts: int | None) -> KVReport:
    dtype = FP8 if name == FP8_NAME else TORCH_DTYPES[name]
    per_token = bytes_per_token(decoder.caches, dtype)
    num_blocks = blocks_for(request_tokens, BLOCK_SIZE)
    whole = num_blocks * per_token * BLOCK_SIZE
    windows = None if num_drafts is None else _windows(decoder, dtype, num_drafts)
    kept = whole
    if windows is not None:
        kept -= max(0, num_blocks - windows.blocks_per_request) * windows.bytes_per_token * BLOCK_SIZE
    return KVReport(name, per_token, BLOCK_SIZE, per_token * BLOCK_SIZE, request_tokens, kept, whole, windows)


def _windows(decoder: DecoderSpec, dtype: torch.dtype, num_drafts: int) -> WindowReport | None:
    of_layers = [cache.sliding_window for cache in decoder.caches if cache.sliding_window is not None]
    if not of_layers:
        return None
    group = window_group(EngineConfig(), max(of_layers), num_drafts)
    per_token = window_bytes_per_block(decoder, BLOCK_SIZE, dtype) // BLOCK_SIZE
    return WindowReport(max(of_layers), len(of_layers), per_token, group.steady_blocks)
