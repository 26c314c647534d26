"""Answers in this process, through `LLM`. The only file here that needs the engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from dflash_backend.config import ConfigError, EngineConfig, environment_settings
from dflash_backend.drafters.resolve import resolve_target_dir
from dflash_backend.engine.build import LOAD_ERRORS, CheckpointError
from dflash_backend.engine.llm import LLM, RequestError, RequestOutput
from dflash_backend.evaluation.errors import EvaluationError, InvalidSetting
from dflash_backend.evaluation.measure import Model
from dflash_backend.evaluation.run import NO_THINKING, Answer, ModelRequest, OnAnswer
from dflash_backend.spec_stats import SpecDecodingStats
from dflash_backend.text.chat import pop_options
from dflash_backend.text.sampling_params import ParameterError
from dflash_backend.text.tokenizer import PromptError, Tokenizer


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
        self._llm.generate(
            prompts,
            [request.sampling for request in requests],
            on_finished=lambda index, output: on_answer(index, _answer(output)),
        )


@contextmanager
def engine_model(
    given: Mapping[str, Any], say: Callable[[str], None], template_options: Mapping[str, Any] = NO_THINKING
) -> Iterator[Model]:
    """The engine in this process, with the settings of the environment and over them those `given` on the command line.
    Unless they say otherwise it always drafts k tokens: the drafter is measured, and not what pays on this machine.

    `say` gets a line on how the load goes; `template_options` are variables of the chat template. Raises `ConfigError`,
    `InvalidSetting` and `EvaluationError`.
    """
    environment = environment_settings(os.environ)
    # Each layer is checked with the name of where it comes from; `LLM` only knows arguments.
    EngineConfig.from_layers([("environment", environment), ("command line", given)])
    try:
        values = {"adaptive_speculation": False, **environment, **given}
        llm = LLM(progress=lambda message, fraction: say(message), **values)
    except ConfigError:
        raise
    except LOAD_ERRORS as error:
        raise EvaluationError(str(error)) from None
    ready = llm.engine.ready
    try:
        yield (
            EngineAnswerer(llm, template_options),
            {
                "engine": ready.description,
                "num_speculative_tokens": ready.num_speculative_tokens,
            },
        )
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
