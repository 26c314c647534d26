"""The offline API: the same engine as behind Triton, in this process, for scripts, tests and benchmarks.

from dflash_backend import LLM
llm = LLM()                                   # the embedded demo pair
print(llm.generate("Write a function that adds 3.", max_tokens=64, temperature=0)[0].text)
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any, cast

import msgspec

from dflash_backend.config import ConfigError, EngineConfig
from dflash_backend.core.admission import RequestError
from dflash_backend.drafters.resolve import resolve_target_dir
from dflash_backend.engine.build import BuiltEngine, Progress, build_engine
from dflash_backend.messages import (
    EngineStats,
    FinishReason,
    GenerationRequest,
    KVTransferParams,
    RequestFailed,
    RequestStats,
    SamplingParams,
    SwapDrafter,
    TokenLogprobs,
)
from dflash_backend.models import TargetModel
from dflash_backend.text.chat import pop_options
from dflash_backend.text.output import CompletionState, RequestState
from dflash_backend.text.request import ParsedRequest, ReturnFlags, check_adapter, check_known
from dflash_backend.text.sampling_params import parse_sampling_params
from dflash_backend.text.token_masks import resolve_token_masks
from dflash_backend.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Params = SamplingParams | Mapping[str, Any]


@dataclass(frozen=True)
class Completion:
    """One continuation of a prompt. Times are seconds since `generate` was called.

    `logprobs` has an entry for each of `token_ids`; None unless the sampling parameter `logprobs` asked for them.
    `stop_reason` is the stop string or stop token that ended it, None where something else did.
    """

    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None
    stats: RequestStats | None
    logprobs: list[TokenLogprobs] | None
    first_token_s: float
    finished_s: float
    stop_reason: str | int | None = field(default=None, kw_only=True)

    @property
    def cumulative_logprob(self) -> float | None:
        """The log-probability of all tokens together; None as for `logprobs`."""
        return None if self.logprobs is None else sum(entry.logprobs[0] for entry in self.logprobs)


@dataclass(frozen=True)
class RequestOutput(Completion):
    """One finished prompt: its first completion, and all `n` of them in `outputs`.

    `prompt_logprobs` has an entry for each of `prompt_token_ids`, the first of which is None; None unless the sampling
    parameter `prompt_logprobs` asked for them. `kv_transfer_params` say where the prompt's KV is kept for another
    engine, where that was asked for and a block is kept.
    """

    prompt_token_ids: list[int]
    outputs: list[Completion]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    kv_transfer_params: KVTransferParams | None = None


class LLM:
    """An engine with its tokenizer.

    `target` and `draft` are directories or hub ids; without them the embedded demo pair is loaded. `settings` are those
    of the server, as Python values or text: `LLM(kv_cache_gb=2, max_num_seqs=8)`. Raises `ConfigError` or
    `CheckpointError` with a sentence that says what to change.
    """

    def __init__(
        self,
        target: str | None = None,
        draft: str | None = None,
        progress: Progress | None = None,
        loaded: TargetModel | None = None,
        **settings: Any,
    ) -> None:
        """loaded: the target, as of `build_engine`."""
        if target is not None:
            settings["target_model"] = str(target)
        if draft is not None:
            settings["draft_model"] = str(draft)
        self.config = EngineConfig.from_values(settings)
        if self.config.data_parallel_size > 1:
            raise ConfigError(
                f"setting 'data_parallel_size' is {self.config.data_parallel_size}, and LLM runs one engine: leave it "
                "at 1, or start a server"
            )
        self.engine: BuiltEngine = build_engine(self.config, progress, loaded=loaded)
        trusted = self.config.message_special_tokens == "control"
        self.target_dir = resolve_target_dir(self.config)
        self.tokenizer = Tokenizer.load(self.target_dir, trusted)
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
        `generate("...", max_tokens=8, temperature=0)`. An output has `n` completions, each with a seed of its own.
        `on_finished` is called with the index and the output of each finished prompt; what it raises ends the others
        and passes. Raises `ParameterError` for a bad
        parameter and `RequestError` for a prompt that cannot be served, which may show only as it runs; the other
        prompts are aborted then. So are all after Ctrl-C, which ends it behind the step that runs; a second one ends it
        at once, and then another `LLM` is needed.
        """
        batch = _as_batch(prompts)
        states = [
            self._request_state(self._encode(prompt), one)
            for prompt, one in zip(batch, self._parameters(params, sampling, len(batch)), strict=True)
        ]
        indices = {state.request_id: index for index, state in enumerate(states)}
        outputs: dict[int, RequestOutput] = {}
        started = time.monotonic()
        # Closed at once where `on_finished` raises: the other requests leave the engine.
        with contextlib.closing(self._run(states)) as finished:
            for state in finished:
                index = indices[state.request_id]
                outputs[index] = _request_output(state, started)
                if on_finished is not None:
                    on_finished(index, outputs[index])
        return [outputs[index] for index in range(len(batch))]

    def chat(self, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> RequestOutput:
        """Answer a conversation; `messages` are `{"role": ..., "content": ...}`, through the chat template.

        Besides sampling parameters it takes `chat_template_kwargs`, variables of the chat template, `enable_thinking`,
        which stands for the variable of that name, `tools`, functions in OpenAI's form, and `continue_final_message`,
        with which the last message is the beginning of the answer. Raises `PromptError` for what the template does not
        take.
        """
        options = pop_options(sampling)
        return self.generate(self.tokenizer.apply_chat_template(list(messages), **options), **sampling)[0]

    def swap_drafter(self, draft: str, window: int = 0, max_loss: float = 0.1) -> None:
        """Draft with another drafter from now on: a directory or hub id, as `draft` of the constructor. window,
        max_loss: as of `messages.DrafterChoice`; by default it is not compared. Raises `ConfigError` or
        `CheckpointError` where it cannot take the other's place, and `RequestError` while the last one is still
        compared."""
        if self.engine.drafters is None:
            raise ConfigError("this engine has no drafter that is a model; give one as draft")
        wanted = SwapDrafter(swap_id="offline", draft_model=str(draft), window=window, max_loss=max_loss)
        self.engine.core.check_swap()
        self.engine.core.swap_drafter(self.engine.drafters.load(wanted))
        (said,) = self.engine.core.step().drafter_swaps
        if said.outcome != "swapped":
            raise ConfigError(said.message)

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
            params.pop("bad_words_token_ids", None)
        ready = self.engine.ready
        sampling = parse_sampling_params(
            params, max_speculative_tokens=ready.num_speculative_tokens, vocab_size=ready.vocab_size
        )
        check_adapter(sampling.lora_name, ready)
        return resolve_token_masks(sampling, self.tokenizer, self.tokenizer.eos_token_ids, ready.vocab_size)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            token_ids = self.tokenizer.encode(prompt)
            check_known(token_ids or [0], self.engine.ready)
            return token_ids
        vocab_size = self.engine.ready.vocab_size
        invalid = next((i for i in prompt if not 0 <= i < vocab_size), None)
        if invalid is not None:
            raise ValueError(f"token id {invalid} is not in the vocabulary; allowed: 0 to {vocab_size - 1}")
        return list(prompt)

    def _request_state(self, prompt_token_ids: list[int], sampling: SamplingParams) -> RequestState:
        returns = ReturnFlags(logprobs=sampling.logprobs is not None)
        parsed = ParsedRequest(prompt_token_ids, sampling, stream=False, prefix="", returns=returns)
        self._num_requests += 1
        return RequestState(f"offline-{self._num_requests}", parsed, self.tokenizer, logprobs_as_json=False)

    def _run(self, states: list[RequestState]) -> Generator[RequestState, None, None]:
        """Feed the engine as its queue has space, step it, and yield each request as it finishes."""
        core = self.engine.core
        eos = self.tokenizer.eos_token_ids
        running: dict[str, RequestState] = {}
        waiting = deque((state, request) for state in states for request in state.generation_requests(eos))
        whole = HeldInterrupt()
        try:
            with whole:
                self._feed(waiting, running)
            while core.has_unfinished():
                finished: list[RequestState] = []
                failed: list[RequestFailed] = []
                with whole:
                    while core.has_unfinished() and not (finished or failed or whole.came):
                        finished, failed = self._step(running)
                        self._feed(waiting, running)
                yield from finished
                for failure in failed:
                    raise RequestError(failure.status, failure.message)
        finally:
            with whole:
                core.abort(list(running))
                core.collect_drafts()
                if core.is_moving:
                    core.advance_moves()  # what was kept for another engine can be read

    def _step(self, running: dict[str, RequestState]) -> tuple[list[RequestState], list[RequestFailed]]:
        """Run a step; the requests that it finishes, and those that cannot be served."""
        core, finished = self.engine.core, []
        outputs = core.step()
        for delta in outputs.deltas:
            state = running[delta.request_id]
            stopped_at = state.add(delta).stopped_at
            if stopped_at is not None:
                core.abort([delta.request_id], {delta.request_id: stopped_at})
            if stopped_at is not None or delta.finish_reason is not None:
                del running[delta.request_id]
                if state.finished:
                    finished.append(state)
        return finished, outputs.failed

    def _feed(self, waiting: deque[tuple[RequestState, GenerationRequest]], running: dict[str, RequestState]) -> None:
        """Add completions until the engine's queue is full, of requests or of tokens."""
        while waiting and self.engine.core.num_waiting < self.config.max_queue_size:
            state, request = waiting[0]
            try:
                self.engine.core.add_request(request)
            except RequestError as error:
                if error.status == "UNAVAILABLE" and running:
                    return  # the queue has a place once others have left it
                raise
            waiting.popleft()
            running[request.request_id] = state


def _completion(state: CompletionState, returns_logprobs: bool, started: float) -> Completion:
    assert state.finished_at is not None
    first_token_at = state.finished_at if state.first_token_at is None else state.first_token_at
    return Completion(
        token_ids=state.token_ids,
        text="".join(state.text),
        finish_reason=state.finish_reason,
        stats=state.stats,
        logprobs=state.logprobs if returns_logprobs else None,
        first_token_s=first_token_at - started,
        finished_s=state.finished_at - started,
        stop_reason=state.stop_reason,
    )


def _request_output(state: RequestState, started: float) -> RequestOutput:
    of_prompt = None if state.prompt_logprobs is None else state.prompt_logprobs.entries
    completions = [_completion(one, state.parsed.returns.logprobs, started) for one in state.completions]
    return RequestOutput(
        **vars(completions[0]),
        prompt_token_ids=state.parsed.prompt_token_ids,
        outputs=completions,
        prompt_logprobs=of_prompt,
        kv_transfer_params=state.kv_transfer_params,
    )


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, from one prompt (a text, or a sequence of token ids) or several."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[Prompt], prompts))


__all__ = ["LLM", "Completion", "RequestError", "RequestOutput"]


class HeldInterrupt:
    """A context in which the first Ctrl-C waits for its end, where it raises `KeyboardInterrupt`. A second one is
    raised at once.

    Nothing is held back outside the main thread, which alone gets signals, nor where the program handles Ctrl-C itself.
    """

    def __init__(self) -> None:
        self._holds = self.came = False

    def __enter__(self) -> None:
        self.came = False
        self._holds = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        if self._holds:
            signal.signal(signal.SIGINT, self._note)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._holds:
            return
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.came and error is None:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.came:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise KeyboardInterrupt
        self.came = True
