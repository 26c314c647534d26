"""The offline API: the same engine as behind Triton, in this process, for scripts, tests and benchmarks.

from dflash_backend import LLM
llm = LLM()                                   # the embedded demo pair
print(llm.generate("Write a function that adds 3.", max_tokens=64, temperature=0)[0].text)
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from dflash_backend.checkpoints import resolve_target_dir
from dflash_backend.config import EngineConfig
from dflash_backend.core.admission import RequestError
from dflash_backend.engine.build import BuiltEngine, Progress, build_engine
from dflash_backend.messages import (
    EngineStats,
    FinishReason,
    GenerationRequest,
    RequestStats,
    SamplingParams,
    TokenDelta,
    TokenLogprobs,
)
from dflash_backend.text.chat import pop_options
from dflash_backend.text.detokenizer import Detokenizer
from dflash_backend.text.sampling_params import child, parse_sampling_params
from dflash_backend.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Params = SamplingParams | Mapping[str, Any]


@dataclass
class Completion:
    """One continuation of a prompt. Times are seconds since `generate` was called.

    `logprobs` has an entry for each of `token_ids`; None unless the sampling parameter `logprobs` asked for them.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stats: RequestStats | None = None
    logprobs: list[TokenLogprobs] | None = None
    first_token_s: float = 0.0
    finished_s: float = 0.0

    def add(self, delta: TokenDelta, text: str, now: float) -> None:
        """Take what a step yielded; `now` is in seconds since `generate` was called."""
        if not self.token_ids:
            self.first_token_s = now
        self.token_ids += delta.token_ids
        self.text += text
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + delta.logprobs
        if delta.finish_reason is not None:
            self.finish_reason, self.stats, self.finished_s = delta.finish_reason, delta.stats, now

    @property
    def cumulative_logprob(self) -> float | None:
        """The log-probability of all tokens together; None as for `logprobs`."""
        return None if self.logprobs is None else sum(entry.logprobs[0] for entry in self.logprobs)


@dataclass
class RequestOutput:
    """One finished prompt and its `n` completions. What belongs to a completion can be asked of the output itself too,
    and is then that of the first, which is the only one unless `n` says otherwise."""

    prompt_token_ids: list[int]
    outputs: list[Completion]

    @property
    def token_ids(self) -> list[int]:
        """The first completion's tokens."""
        return self.outputs[0].token_ids

    @property
    def text(self) -> str:
        """The first completion's text."""
        return self.outputs[0].text

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the first completion ended."""
        return self.outputs[0].finish_reason

    @property
    def stats(self) -> RequestStats | None:
        """What the first completion cost."""
        return self.outputs[0].stats

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """The first completion's log-probabilities."""
        return self.outputs[0].logprobs

    @property
    def cumulative_logprob(self) -> float | None:
        """The log-probability of the first completion."""
        return self.outputs[0].cumulative_logprob

    @property
    def first_token_s(self) -> float:
        """When the first completion's first token came."""
        return self.outputs[0].first_token_s

    @property
    def finished_s(self) -> float:
        """When the first completion ended."""
        return self.outputs[0].finished_s


@dataclass(frozen=True)
class _Job:
    """One completion to make: of which output, with which parameters."""

    index: int
    prompt_token_ids: list[int]
    sampling: SamplingParams
    completion: Completion


class LLM:
    """An engine with its tokenizer.

    `target` and `draft` are directories or hub ids; without them the embedded demo pair is loaded. `settings` are those
    of the server, as Python values or text: `LLM(kv_cache_gb=2, max_num_seqs=8)`. Raises `ConfigError` or
    `CheckpointError` with a sentence that says what to change.
    """

    def __init__(
        self, target: str | None = None, draft: str | None = None, progress: Progress | None = None, **settings: Any
    ) -> None:
        if target is not None:
            settings["target_model"] = str(target)
        if draft is not None:
            settings["draft_model"] = str(draft)
        self.config = EngineConfig.from_values(settings)
        self.engine: BuiltEngine = build_engine(self.config, progress)
        trusted = self.config.message_special_tokens == "control"
        self.tokenizer = Tokenizer.load(resolve_target_dir(self.config), trusted)
        self._num_requests = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] | None = None,
        on_finished: Callable[[int, RequestOutput], None] | None = None,
        **sampling: Any,
    ) -> list[RequestOutput]:
        """Continue each prompt (text or token ids); the outputs come in the order of the prompts.

        `params` is one set for all prompts or one each; `sampling` gives single parameters instead:
        `generate("...", max_tokens=8, temperature=0)`. With `n` above 1 an output has so many completions, each with a
        seed of its own. `on_finished` hears the index and the output of each prompt that is done. Raises
        `ParameterError` for a bad parameter and `RequestError` for a prompt that cannot be served, also when that shows
        only as it runs; the other prompts are given up then.
        """
        batch = _as_batch(prompts)
        parameters = self._parameters(params, sampling, len(batch))
        outputs = [
            RequestOutput(self._encode(prompt), [Completion() for _ in range(one.n)])
            for prompt, one in zip(batch, parameters, strict=True)
        ]
        jobs = [
            _Job(index, output.prompt_token_ids, child(parameters[index], place), completion)
            for index, output in enumerate(outputs)
            for place, completion in enumerate(output.outputs)
        ]
        num_open = [len(output.outputs) for output in outputs]
        started = time.perf_counter()
        for job, delta, text in self._run(jobs):
            job.completion.add(delta, text, time.perf_counter() - started)
            if delta.finish_reason is not None:
                num_open[job.index] -= 1
                if num_open[job.index] == 0 and on_finished is not None:
                    on_finished(job.index, outputs[job.index])
        return outputs

    def chat(self, messages: Sequence[Mapping[str, str]], **sampling: Any) -> RequestOutput:
        """Answer a conversation; `messages` are `{"role": ..., "content": ...}`, through the chat template.

        Besides sampling parameters it takes `chat_template_kwargs`, variables of the chat template, and
        `enable_thinking`, which stands for the variable of that name. Raises `PromptError` for what the template does
        not take.
        """
        options = pop_options(sampling)
        return self.generate(self.tokenizer.apply_chat_template(list(messages), **options), **sampling)[0]

    def stats(self) -> EngineStats:
        """The engine's counters since it was built."""
        return self.engine.core.stats()

    def _parameters(
        self, params: Params | Sequence[Params] | None, sampling: dict[str, Any], count: int
    ) -> list[SamplingParams]:
        if params is not None and sampling:
            raise ValueError("give either params or single sampling parameters, not both")
        if isinstance(params, Sequence):
            if len(params) != count:
                raise ValueError(f"{len(params)} sets of parameters for {count} prompts; give one, or one for each")
            return [self._parsed(one) for one in params]
        return [self._parsed(sampling if params is None else params)] * count

    def _parsed(self, params: Params) -> SamplingParams:
        if isinstance(params, SamplingParams):
            defaults = SamplingParams()
            given = msgspec.structs.asdict(params)
            params = {name: value for name, value in given.items() if value != getattr(defaults, name)}
        ready = self.engine.ready
        return parse_sampling_params(
            params, max_speculative_tokens=ready.num_speculative_tokens, vocab_size=ready.vocab_size
        )

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        vocab_size = self.engine.ready.vocab_size
        strange = next((i for i in prompt if not 0 <= i < vocab_size), None)
        if strange is not None:
            raise ValueError(f"token id {strange} is not in the vocabulary; allowed: 0 to {vocab_size - 1}")
        return list(prompt)

    def _run(self, jobs: list[_Job]) -> Iterator[tuple[_Job, TokenDelta, str]]:
        """Feed the engine as its queue has room, step it, and yield `(job, delta, text)` as tokens come."""
        core = self.engine.core
        running: dict[str, tuple[_Job, Detokenizer]] = {}
        num_kept: Counter[str] = Counter()
        waiting = iter(jobs)
        try:
            self._feed(waiting, running)
            while core.has_unfinished():
                outputs = core.step()
                for delta in outputs.deltas:
                    job, detokenizer = running[delta.request_id]
                    text = detokenizer.append(delta.token_ids, delta.finish_reason is not None)
                    num_kept[delta.request_id] += text.num_tokens
                    if text.stopped:
                        if delta.finish_reason is None:
                            core.abort([delta.request_id], num_kept)
                        delta = _cut(delta, text.num_tokens)
                    if delta.finish_reason is not None:
                        del running[delta.request_id]
                    yield job, delta, text.text
                for failure in outputs.rejected:
                    raise RequestError(failure.status, failure.message)
                self._feed(waiting, running)
        finally:
            core.abort(list(running))

    def _feed(self, waiting: Iterator[_Job], running: dict[str, tuple[_Job, Detokenizer]]) -> None:
        """Queue jobs until the engine's queue is full."""
        while self.engine.core.num_waiting < self.config.max_queue_size:
            job = next(waiting, None)
            if job is None:
                return
            request_id = f"offline-{self._num_requests}"
            self._num_requests += 1
            self.engine.core.add_request(
                GenerationRequest(request_id, job.prompt_token_ids, job.sampling, tuple(self.tokenizer.eos_token_ids))
            )
            running[request_id] = (job, Detokenizer(self.tokenizer, job.sampling))


def _cut(delta: TokenDelta, num_tokens: int) -> TokenDelta:
    """The last delta of a completion that a stop string ended: tokens past it are not part of the answer."""
    return msgspec.structs.replace(
        delta,
        token_ids=delta.token_ids[:num_tokens],
        logprobs=None if delta.logprobs is None else delta.logprobs[:num_tokens],
        finish_reason="stop",
        stats=None if delta.stats is None else delta.stats.with_last_step_cut(len(delta.token_ids), num_tokens),
    )


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, from one prompt (a text, or a sequence of token ids) or several."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[Prompt], prompts))


__all__ = ["LLM", "Completion", "RequestError", "RequestOutput"]
