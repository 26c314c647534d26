"""Engines on this machine: as they serve on a CPU, and with the padded, overlapping steps of a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from checks.core_state import check_core
from dflash_backend.config import EngineConfig
from dflash_backend.core.engine import EngineCore
from dflash_backend.engine.build import BuiltEngine, build_engine
from dflash_backend.messages import FinishReason, GenerationRequest, RequestFailed, SamplingParams, TokenLogprobs
from dflash_backend.worker.batch import ForwardBatch
from dflash_backend.worker.runner import ModelRunner
from dflash_backend.worker.step_ops import PaddedStepOps, StepOps


def device_runner(
    built: BuiltEngine,
    padded: bool = True,
    ops: StepOps | None = None,
    shapes: Sequence[tuple[int, int]] = (),
    mixed: Sequence[tuple[int, int]] = (),
) -> ModelRunner:
    """A runner with the steps of a GPU over the models of an engine that was built for a CPU, and over its KV."""
    runner = ModelRunner(
        replace(built.runner.model, ops=ops or PaddedStepOps()),
        built.core.config.max_num_batched_tokens,
        grammars=built.grammars,
    )
    if padded:
        runner.prepare(use_graphs=False, progress=lambda message, fraction: None, shapes=shapes, mixed=mixed)
    return runner


def on_device_runner(built: BuiltEngine, overlap: bool = True, **options: Any) -> BuiltEngine:
    """The same engine with the steps of a GPU. The runner of `built` must not be used any more: they share KV."""
    runner = device_runner(built, **options)
    shapes = tuple(shape for shape in options.get("shapes", ()) if shape[0])
    config = replace(built.core.config, draft_shapes=shapes)
    runner.mover = built.runner.mover
    core = EngineCore(config, runner, overlap=overlap, grammars=built.grammars, mover=runner.mover)
    return replace(built, core=core, runner=runner)


def unpacked(runner: ModelRunner, step: ForwardBatch) -> tuple[list[int], list[int], list[list[int]], np.ndarray]:
    """Of each row of a step that has run: accepted and verified drafts, k + 1 tokens and confidences."""
    numbers = step.results.tolist()
    results = [each[0] for each in numbers], [each[1] for each in numbers], [each[2:] for each in numbers]
    return *results, runner.model.unpacked_report(step, step.draft_report.cpu().numpy())[2]


def engine(**settings: Any) -> BuiltEngine:
    """An engine on the CPU with the write guard on, which always drafts k tokens, and whose steps are the same however
    busy the machine is; `settings` come on top. Without models it is the demo pair's."""
    steady = {"adaptive_speculation": False, "max_step_time_ms": 60_000.0}
    values = {"device": "cpu", "kv_write_guard": True, **steady, **settings}
    return build_engine(EngineConfig.from_values(values))


def triton_engine(**settings: Any) -> BuiltEngine:
    """A GPU's engine, with our kernels throughout: on a GPU where there is one, else under Triton's interpreter."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return engine(**{"device": device, "dtype": "float32", "attention_backend": "triton", **settings})


class Outputs:
    """Runs requests to their end and keeps what they yield."""

    def __init__(self, built: BuiltEngine) -> None:
        self.core = built.core
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.failed: list[RequestFailed] = []

    def add(
        self,
        request_id: str,
        prompt: list[int],
        k: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
        **sampling: Any,
    ) -> None:
        """Queue a request; `k` is its own number of speculative tokens."""
        self.tokens[request_id] = []
        params = SamplingParams(**sampling) if k is None else SamplingParams(num_speculative_tokens=k, **sampling)
        self.core.add_request(GenerationRequest(request_id, prompt, params, eos_token_ids))

    def step(self) -> None:
        """One step of the engine, with its drafts."""
        outputs = self.core.step()
        self.core.collect_drafts()
        self.failed += outputs.failed
        for delta in outputs.deltas:
            self.tokens[delta.request_id] += delta.token_ids
            if delta.logprobs is not None:
                self.logprobs.setdefault(delta.request_id, []).extend(delta.logprobs)
            if delta.finish_reason is not None:
                self.reasons[delta.request_id] = delta.finish_reason

    def finish(self) -> dict[str, list[int]]:
        """Run until nothing is left; each request's tokens."""
        while self.core.has_unfinished():
            self.step()
            check_core(self.core)
        return self.tokens


def outputs_of(built: BuiltEngine, prompts: Sequence[list[int]], sampling: Sequence[dict[str, Any]]) -> Outputs:
    """Runs requests together to their end; each is named by its index, and no token ends it unless its own parameters
    say so."""
    outputs = Outputs(built)
    for index, (prompt, own) in enumerate(zip(prompts, sampling, strict=True)):
        outputs.add(str(index), prompt, **{"ignore_eos": True, **own})
    outputs.finish()
    return outputs


def state_tensors(runner: ModelRunner) -> list[torch.Tensor]:
    """The requests' state that steps change."""
    state = runner.model.state
    return [state.tokens, state.blocks, state.num_blocks, state.computed]


def kv_tensors(runner: ModelRunner) -> list[torch.Tensor]:
    """KV of every layer."""
    return [layer.data for layer in [*runner.model.kv.target, *runner.model.kv.draft]]


def memory(runner: ModelRunner) -> list[torch.Tensor]:
    """All that steps change."""
    return [*kv_tensors(runner), *state_tensors(runner)]


@contextmanager
def unchanged(tensors: list[torch.Tensor]) -> Iterator[None]:
    """These tensors end the block as they began it, to the bit."""
    before = [tensor.clone() for tensor in tensors]
    yield
    assert all(torch.equal(now, then) for now, then in zip(tensors, before, strict=True))
