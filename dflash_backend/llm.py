"""The offline API: the same engine as behind Triton, in this process, for scripts, tests and benchmarks.

from dflash_backend import LLM
llm = LLM()                                   # the embedded demo pair
print(llm.generate("Write a function that adds 3.", max_tokens=64, temperature=0)[0].text)
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from dflash_backend.build import BuiltEngine, Progress, build_engine
from dflash_backend.checkpoints import resolve_target_dir
from dflash_backend.config import EngineConfig
from dflash_backend.core.admission import RequestError
from dflash_backend.frontend.detokenizer import Detokenizer
from dflash_backend.frontend.tokenizer import Tokenizer
from dflash_backend.messages import (
    EngineStats,
    FinishReason,
    GenerationRequest,
    RequestStats,
    SamplingParams,
    TokenDelta,
)
from dflash_backend.sampling_params import parse_sampling_params

Prompt = str | Sequence[int]
Params = SamplingParams | Mapping[str, Any]


@dataclass
class RequestOutput:
    """One finished prompt. Times are seconds since `generate` was called."""

    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stats: RequestStats | None = None
    first_token_s: float = 0.0
    finished_s: float = 0.0


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
        self.tokenizer = Tokenizer.load(resolve_target_dir(self.config))
        self._num_requests = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] | None = None,
        **sampling: Any,
    ) -> list[RequestOutput]:
        """Continue each prompt (text or token ids); the outputs come in the order of the prompts.

        `params` is one set for all prompts or one each; `sampling` gives single parameters instead:
        `generate("...", max_tokens=8, temperature=0)`. Raises `ParameterError` for a bad parameter and `RequestError`
        for a prompt that cannot be served; the other prompts are given up then.
        """
        batch = _as_batch(prompts)
        parameters = self._parameters(params, sampling, len(batch))
        outputs = [RequestOutput(self._encode(prompt)) for prompt in batch]
        started = time.perf_counter()
        for index, delta, text in self._run(outputs, parameters):
            now = time.perf_counter() - started
            output = outputs[index]
            if not output.token_ids:
                output.first_token_s = now
            output.token_ids += delta.token_ids
            output.text += text
            if delta.finish_reason is not None:
                output.finish_reason, output.stats, output.finished_s = delta.finish_reason, delta.stats, now
        return outputs

    def chat(self, messages: Sequence[Mapping[str, str]], **sampling: Any) -> RequestOutput:
        """Answer a conversation; `messages` are `{"role": ..., "content": ...}`, through the chat template."""
        return self.generate(self.tokenizer.apply_chat_template(list(messages)), **sampling)[0]

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
        return parse_sampling_params(params, max_speculative_tokens=self.engine.ready.num_speculative_tokens)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        vocab_size = self.engine.ready.vocab_size
        strange = next((i for i in prompt if not 0 <= i < vocab_size), None)
        if strange is not None:
            raise ValueError(f"token id {strange} is not in the vocabulary; allowed: 0 to {vocab_size - 1}")
        return list(prompt)

    def _run(
        self, outputs: list[RequestOutput], parameters: list[SamplingParams]
    ) -> Iterator[tuple[int, TokenDelta, str]]:
        """Feed the engine as its queue has room, step it, and yield `(index, delta, text)` as tokens come."""
        core = self.engine.core
        detokenizers: dict[str, tuple[int, Detokenizer]] = {}
        waiting = iter(range(len(outputs)))
        try:
            self._feed(waiting, outputs, parameters, detokenizers)
            while core.has_unfinished():
                for delta in core.step():
                    index, detokenizer = detokenizers[delta.request_id]
                    text = detokenizer.append(delta.token_ids, delta.finish_reason is not None)
                    if text.stopped:
                        stats = delta.stats or core.stop([delta.request_id])[0].stats
                        delta = TokenDelta(delta.request_id, delta.token_ids, "stop", stats)
                    if delta.finish_reason is not None:
                        del detokenizers[delta.request_id]
                    yield index, delta, text.text
                self._feed(waiting, outputs, parameters, detokenizers)
        finally:
            core.abort(list(detokenizers))

    def _feed(
        self,
        waiting: Iterator[int],
        outputs: list[RequestOutput],
        parameters: list[SamplingParams],
        detokenizers: dict[str, tuple[int, Detokenizer]],
    ) -> None:
        """Queue prompts until the engine's queue is full."""
        while self.stats().num_requests_waiting < self.config.max_queue_size:
            index = next(waiting, None)
            if index is None:
                return
            request_id = f"offline-{self._num_requests}"
            self._num_requests += 1
            prompt, sampling = outputs[index].prompt_token_ids, parameters[index]
            self.engine.core.add_request(
                GenerationRequest(request_id, prompt, sampling, tuple(self.tokenizer.eos_token_ids))
            )
            detokenizers[request_id] = (index, Detokenizer(self.tokenizer, sampling))


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, from one prompt (a text, or a sequence of token ids) or several."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[Prompt], prompts))


__all__ = ["LLM", "RequestError", "RequestOutput"]
