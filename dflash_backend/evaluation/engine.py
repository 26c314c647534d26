"""Answers in this process, through `LLM`. The only file here that needs the engine."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_backend.engine.llm import LLM, RequestOutput
from dflash_backend.evaluation.errors import EvaluationError
from dflash_backend.evaluation.run import Answer, ModelRequest, OnAnswer
from dflash_backend.spec_stats import SpecDecodingStats
from dflash_backend.text.tokenizer import PromptError, Tokenizer


class EngineAnswerer:
    """An `Answerer` over an engine: it gets all requests at once and runs as many together as `max_num_seqs` allows."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def answer(self, requests: Sequence[ModelRequest], on_answer: OnAnswer) -> None:
        """See `Answerer.answer`. Raises `EvaluationError` for a prompt that the engine cannot take."""
        prompts = [encode(self._llm.tokenizer, request) for request in requests]
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


def encode(tokenizer: Tokenizer, request: ModelRequest) -> list[int]:
    """Token ids of a request. Conversations go through the chat template with thinking off, where it knows that: the
    published figures are measured so. Raises `EvaluationError`."""
    if request.prompt is not None:
        return tokenizer.encode(request.prompt)
    try:
        return tokenizer.apply_chat_template(request.messages, enable_thinking=False)
    except PromptError as error:
        raise EvaluationError(f"{request.where}: {error}") from None


def _answer(output: RequestOutput) -> Answer:
    counts = output.stats.spec_decoding if output.stats is not None else SpecDecodingStats()
    return Answer(output.text, len(output.token_ids), counts)
