"""What a benchmark run yields, and the closed loops that produce it. Times in seconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import torch

from benchmarks.progress import progress
from dflash_backend import LLM
from dflash_backend.messages import ENCODER, EngineCoreOutputs, GenerationRequest, QueueState, SamplingParams
from dflash_backend.text.detokenizer import Detokenizer


@dataclass
class Measurement:
    """One system at one number of streams.

    between_s: from the tokens of one step of a stream to those of the next. outputs: the token ids of each prompt, by
    prompt index, to check that all systems agree.
    """

    system: str
    streams: int
    seconds: float = 0.0
    num_tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    acceptance_length: float | None = None
    client_cpu_s: float | None = None
    outputs: dict[int, list[int]] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of all streams together."""
        return self.num_tokens / self.seconds

    @property
    def client_cpu_share(self) -> float | None:
        """The client's CPU time over the time of the run: 1 is one core. None where there is no client of its own."""
        return None if self.client_cpu_s is None else self.client_cpu_s / self.seconds

    @property
    def first_token_p50_s(self) -> float | None:
        """Median time to first token; None where the system gives all tokens at once."""
        return statistics.median(self.first_token_s) if self.first_token_s else None


@dataclass(frozen=True)
class HostShare:
    """What the host does in a step beside the models: planning, batch preparation, applying results, messages.

    num_steps: steps of the run. step_s: all of them, as the engine counts them. phase_s: verify, accept, inject and
    draft of all steps; where rows are shared among cores, those of the slowest part. message_s: encoding what each step
    has to say to the stub, which the engine process does after it.
    """

    streams: int
    num_steps: int
    step_s: float
    phase_s: float
    message_s: float

    @property
    def host_s(self) -> float:
        """Everything that is not a phase."""
        return self.step_s - self.phase_s + self.message_s

    @property
    def share(self) -> float:
        """Of a step and its message."""
        return self.host_s / (self.step_s + self.message_s)

    @property
    def per_step_s(self) -> float:
        """The host's own time in a step."""
        return self.host_s / self.num_steps


class HostClock:
    """Is called for each step of `run_engine` and adds up what `HostShare` needs beside the engine's own counters."""

    def __init__(self, llm: LLM) -> None:
        self._core = llm.engine.core
        self._before = self._core.stats()
        self._phase_s = 0.0
        self._message_s = 0.0

    def __call__(self, outputs: EngineCoreOutputs) -> None:
        """Take in what a step returned."""
        self._phase_s += sum(outputs.phase_seconds.values())
        started = time.perf_counter()
        ENCODER.encode(msgspec.structs.replace(outputs, queue=QueueState(0, self._core.num_waiting)))
        self._message_s += time.perf_counter() - started

    def share(self, streams: int) -> HostShare:
        """What was heard so far."""
        stats, before = self._core.stats(), self._before
        return HostShare(
            streams,
            num_steps=stats.num_steps - before.num_steps,
            step_s=stats.step_seconds - before.step_seconds,
            phase_s=self._phase_s,
            message_s=self._message_s,
        )


def run_transformers(
    model: torch.nn.Module, prompts: list[list[int]], streams: int, max_tokens: int, eos: int
) -> Measurement:
    """`transformers` `generate`, greedy, in batches of `streams` prompts padded on the left."""
    result = Measurement("transformers", streams)
    started, so_far = time.perf_counter(), progress(f"prompts by transformers, {streams} at a time")
    for first in range(0, len(prompts), streams):
        so_far.step(first, len(prompts))
        batch = prompts[first : first + streams]
        width = max(len(prompt) for prompt in batch)
        ids = torch.tensor([[eos] * (width - len(prompt)) + prompt for prompt in batch])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
        with torch.inference_mode():
            output = model.generate(  # type: ignore[operator]
                ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, eos_token_id=eos, pad_token_id=eos
            )
        for index, row in enumerate(output[:, width:].tolist()):
            tokens = row[: row.index(eos) + 1] if eos in row else row
            result.outputs[first + index] = tokens
            result.num_tokens += len(tokens)
    result.seconds = time.perf_counter() - started
    return result


def measure_host_share(llm: LLM, prompts: list[list[int]], streams: int, max_tokens: int) -> HostShare:
    """The host's own share of a step while `streams` requests are kept in flight, in a run of its own."""
    clock = HostClock(llm)
    run_engine("host share", llm, prompts, streams, max_tokens, clock)
    return clock.share(streams)


def run_engine(
    system: str,
    llm: LLM,
    prompts: list[list[int]],
    streams: int,
    max_tokens: int,
    on_step: Callable[[EngineCoreOutputs], None] | None = None,
) -> Measurement:
    """Our engine in this process: `streams` requests are kept in flight, text is made as it would be streamed.

    `on_step` is given what each step returned, right after it.
    """
    result = Measurement(system, streams)
    core, eos = llm.engine.core, tuple(llm.tokenizer.eos_token_ids)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    before = core.stats().spec_decoding
    waiting = list(enumerate(prompts))[::-1]
    in_flight: dict[str, tuple[int, float, Detokenizer]] = {}
    started = time.perf_counter()
    while waiting or in_flight:
        while waiting and len(in_flight) < streams:
            index, prompt = waiting.pop()
            request_id = f"{system}-{streams}-{index}"
            core.add_request(GenerationRequest(request_id, prompt, sampling, eos))
            in_flight[request_id] = (index, time.perf_counter(), Detokenizer(llm.tokenizer, sampling))
            result.outputs[index] = []
        outputs = core.step()
        if on_step is not None:
            on_step(outputs)
        for delta in outputs.deltas:
            index, arrived, detokenizer = in_flight[delta.request_id]
            if not result.outputs[index]:
                result.first_token_s.append(time.perf_counter() - arrived)
            detokenizer.append(delta.token_ids, delta.finish_reason is not None)
            result.outputs[index] += delta.token_ids
            if delta.finish_reason is not None:
                del in_flight[delta.request_id]
    result.seconds = time.perf_counter() - started
    drafted = core.stats().spec_decoding - before
    result.num_tokens = sum(len(tokens) for tokens in result.outputs.values())
    if drafted.num_drafts:
        result.acceptance_length = drafted.acceptance_length
    return result
