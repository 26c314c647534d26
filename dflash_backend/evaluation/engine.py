"""Answers in this process, through `LLM`. The only file here that needs the engine."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from dflash_backend.config import NGRAM, ConfigError, EngineConfig, environment_settings
from dflash_backend.drafters.resolve import ModelPair, resolve_pair, resolve_target_dir
from dflash_backend.engine.build import LOAD_ERRORS, CheckpointError
from dflash_backend.engine.llm import LLM, RequestError, RequestOutput
from dflash_backend.evaluation.errors import EvaluationError, InvalidSetting
from dflash_backend.evaluation.measure import Model
from dflash_backend.evaluation.run import NO_THINKING, Answer, ModelRequest, OnAnswer
from dflash_backend.spec_stats import SpecDecodingStats
from dflash_backend.text.chat import pop_options
from dflash_backend.text.sampling_params import ParameterError
from dflash_backend.text.tokenizer import PromptError, Tokenizer

# Tokens of a text that are read as one, as its perplexity depends on how many come before a token.
TEXT_PIECE = 2048


class EngineAnswerer:
    """An `Answerer` over an engine: it gets all requests at once and runs as many together as `max_num_seqs` allows."""

    def __init__(self, llm: LLM, template_options: Mapping[str, Any] = NO_THINKING) -> None:
        """`template_options` are variables of the chat template."""
        self._llm = llm
        self._template_options = template_options

    def answer(self, requests: Sequence[ModelRequest], on_answer: OnAnswer) -> None:
        """See `Answerer.answer`. Raises `EvaluationError` for a prompt that the engine cannot take."""
        prompts = [encode(self._llm.tokenizer, request, self._template_options) for request in requests]
        longest = self._llm.engine.ready.max_model_len - 1
        for request, prompt in zip(requests, prompts, strict=True):
            if not 0 < len(prompt) <= longest:
                raise EvaluationError(
                    f"{request.where}: the prompt has {len(prompt)} tokens; this model takes 1 to {longest}"
                )
        try:
            self._llm.generate(
                prompts,
                [request.sampling for request in requests],
                on_finished=lambda index, output: on_answer(index, _answer(output)),
            )
        except RequestError as error:
            raise EvaluationError(str(error)) from None


def perplexity(llm: LLM, text: str) -> tuple[float, int]:
    """The perplexity of a text, and how many tokens it has. It is read in pieces of `piece_length` tokens, each behind
    the special tokens that the tokenizer puts before a prompt, which do not count. Without any the first token of a
    piece does not count either, as nothing is before it. Raises `EvaluationError` for a text of which no token counts,
    and for a model that takes too few."""
    ids, leading, longest = llm.tokenizer.encode_part(text), list(llm.tokenizer.leading_ids), piece_length(llm)
    not_counted = max(1, len(leading))
    if longest <= not_counted:
        raise EvaluationError(
            f"a request of this model holds {longest} tokens, too few for a perplexity; raise max_model_len"
        )
    size = longest - len(leading)
    pieces = [[*leading, *ids[first : first + size]] for first in range(0, len(ids), size)]
    outputs = llm.generate(
        [piece for piece in pieces if len(piece) > not_counted], max_tokens=1, temperature=0, prompt_logprobs=0
    )
    logprobs = [
        entry.logprobs[0]
        for output in outputs
        for entry in (output.prompt_logprobs or ())[not_counted:]
        if entry is not None
    ]
    if not logprobs:
        raise EvaluationError(
            f"the text has {len(ids)} tokens; its perplexity needs at least {not_counted + 1 - len(leading)}"
        )
    return math.exp(-math.fsum(logprobs) / len(logprobs)), len(ids)


def piece_length(llm: LLM) -> int:
    """Tokens of a piece of a text whose perplexity is taken, special ones included: `TEXT_PIECE`, or what a request
    holds."""
    return min(llm.engine.ready.max_model_len - 1, TEXT_PIECE)


def resolved(given: Mapping[str, Any]) -> ModelPair:
    """The models that `engine_model` would load with these settings, which fit each other. No weights are read. Raises
    `ConfigError` and `EvaluationError`."""
    try:
        return resolve_pair(EngineConfig.from_values(_values(given)))
    except CheckpointError as error:
        raise EvaluationError(str(error)) from None


def drafter_of(pair: ModelPair) -> str:
    """What the setting `draft_model` is for the drafter of a pair."""
    return str(pair.draft_model.path) if pair.draft_model else NGRAM if pair.draft else ""


def _values(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the environment, and over them those `given`. Raises `ConfigError`."""
    environment = environment_settings(os.environ)
    # Each layer is checked with the name of where it comes from; `LLM` only knows arguments.
    EngineConfig.from_layers([("environment", environment), ("command line", given)])
    return {"adaptive_speculation": False, **environment, **given}


@contextmanager
def engine_model(
    given: Mapping[str, Any],
    say: Callable[[str], None],
    template_options: Mapping[str, Any] = NO_THINKING,
    text: str | None = None,
) -> Iterator[Model]:
    """The engine in this process, with the settings of the environment and over them those `given` on the command line.
    Unless they say otherwise it always drafts k tokens: the drafter is measured, and not what pays on this machine.

    `say` gets a line on how the load goes; `template_options` are variables of the chat template; `text` is what the
    perplexity is taken of. Raises `ConfigError`, `InvalidSetting` and `EvaluationError`.
    """
    values = _values(given)
    try:
        llm = LLM(progress=lambda message, fraction: say(message), **values)
    except ConfigError:
        raise
    except LOAD_ERRORS as error:
        raise EvaluationError(str(error)) from None
    ready = llm.engine.ready
    about: dict[str, Any] = {
        "engine": ready.description,
        "draft_model": drafter_of(llm.engine.pair),
        "num_speculative_tokens": ready.num_speculative_tokens,
    }
    try:
        if text is not None:
            say("reading the text")
            about["perplexity"], about["text_tokens"] = perplexity(llm, text)
            about["text_piece"] = piece_length(llm)
        yield EngineAnswerer(llm, template_options), about
    except ParameterError as error:
        raise InvalidSetting(str(error)) from None
    except (RequestError, CheckpointError) as error:
        raise EvaluationError(str(error)) from None


def encoder(target: str, template_options: Mapping[str, Any] = NO_THINKING) -> Callable[[ModelRequest], list[int]]:
    """What turns a request into token ids with the tokenizer of `target`. `template_options` are variables of its chat
    template. Raises `EvaluationError`."""
    try:
        tokenizer = Tokenizer.load(resolve_target_dir(EngineConfig.from_values({"target_model": target})))
    except CheckpointError as error:
        raise EvaluationError(str(error)) from None
    return lambda request: encode(tokenizer, request, template_options)


def encode(tokenizer: Tokenizer, request: ModelRequest, template_options: Mapping[str, Any] = NO_THINKING) -> list[int]:
    """Token ids of a request. Conversations go through the chat template, with `template_options` as its variables.
    Raises `EvaluationError`."""
    if request.prompt is not None:
        return tokenizer.encode(request.prompt)
    try:
        options = pop_options({"chat_template_kwargs": dict(template_options)})
        return tokenizer.apply_chat_template(request.messages, **options)
    except PromptError as error:
        raise EvaluationError(f"{request.where}: {error}") from None


def _answer(output: RequestOutput) -> Answer:
    counts = output.stats.spec_decoding if output.stats is not None else SpecDecodingStats()
    return Answer(output.text, len(output.token_ids), counts)
