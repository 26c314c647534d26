"""POST /v1/completions."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dflash_backend.text.detokenizer import REPLACEMENT
from dflash_client import Delta, GenerationResult
from dflash_client.results import Completion, TokenLogprobs
from dflash_openai.answers import Answer, respond
from dflash_openai.errors import invalid
from dflash_openai.generation import Generation
from dflash_openai.logprobs import LogprobWriter, of_prompt
from dflash_openai.prompts import PromptBuilder
from dflash_openai.sampling import client_names, max_tokens, sampling_parameters
from dflash_openai.schemas import CompletionRequest, decode
from dflash_openai.state import Frontend

MAX_PROMPTS = 1024
FORMS = "a text, a list of texts, a list of token ids, or a list of such lists"


async def create_completion(request: Request) -> Response:
    """Complete one or more prompts."""
    frontend: Frontend = request.app.state.frontend
    body = decode(await request.body(), CompletionRequest)
    model = frontend.model(body.model)
    if body.suffix:
        raise invalid("'suffix' is not supported: the model completes a text at its end only", "suffix")
    if only_echo := bool(body.echo) and body.max_tokens == 0:
        # The model generates one token at least; it is left out of the answer.
        body.max_tokens = 1
    if body.echo and body.stream and (only_echo or body.logprobs is not None):
        raise invalid("'echo' with 'logprobs', or without an answer, cannot be streamed; leave 'stream' out", "stream")
    sampling = sampling_parameters(body, model.description)
    if body.echo and body.logprobs is not None:
        sampling.setdefault("prompt_logprobs", body.logprobs)
    prompts = await _prompts(body, model.prompts)
    limits = [max_tokens(body, len(token_ids), model.description) for token_ids in prompts]
    stream = bool(body.stream)
    answer = CompletionAnswer(body, body.model or model.names[0], prompts, model.prompts, only_echo)
    generation = Generation(frontend.pool, prompts, sampling, request, stream, limits, client_names(body))
    return await respond(answer, generation, stream)


async def _prompts(body: CompletionRequest, builder: PromptBuilder) -> list[list[int]]:
    """Token ids of each prompt."""
    given = body.prompt
    special = body.add_special_tokens is not False
    if isinstance(given, str):
        return [await builder.from_text(given, special)]
    if not given:
        raise invalid(f"'prompt' is an empty list; allowed: {FORMS}", "prompt")
    if type(given[0]) in (int, float):
        return [builder.check_token_ids(given)]
    if len(given) > MAX_PROMPTS:
        raise invalid(f"there are {len(given)} prompts; allowed: at most {MAX_PROMPTS}", "prompt")
    prompts = []
    for item in given:
        if isinstance(item, str):
            prompts.append(await builder.from_text(item, special))
        elif isinstance(item, list):
            prompts.append(builder.check_token_ids(item))
        else:
            raise invalid(f"'prompt' is not {FORMS}", "prompt")
    return prompts


class CompletionAnswer(Answer):
    """The choices of a completion; those of prompt p have the indices from n * p on."""

    id_prefix = "cmpl"
    object = chunk_object = "text_completion"

    def __init__(
        self,
        body: CompletionRequest,
        model: str,
        prompts: Sequence[list[int]],
        builder: PromptBuilder,
        only_echo: bool = False,
    ) -> None:
        """`only_echo`: the answer is the prompt alone."""
        super().__init__(body, model, prompts)
        self._body, self._tokenizer, self._only_echo = body, builder.tokenizer, only_echo
        self._echoed = [self._prompt_text(index) for index in range(len(prompts))]
        self._begun: set[int] = set()
        self._returns_token_ids = bool(body.return_token_ids)
        as_token_ids = bool(body.return_tokens_as_token_ids)
        # By place, made as completions come: how many there may be is the model's to say, and `n` may be any number.
        self._logprobs = defaultdict[int, LogprobWriter](
            lambda: LogprobWriter(body.logprobs or 0, as_token_ids, self._tokenizer)
        )

    def _prompt_text(self, index: int) -> str:
        """What `echo` puts before the completions of a prompt: its text as it was sent, or that of its token ids."""
        if not self._body.echo:
            return ""
        if isinstance(self._body.prompt, str):
            return self._body.prompt
        given = self._body.prompt[index]
        return given if isinstance(given, str) else self._tokenizer.decode(self.prompts[index])

    def whole(self, results: Sequence[GenerationResult]) -> Response:
        """The response with all completions."""
        if self._only_echo:
            results = [_without_answer(result) for result in results]
        return super().whole(results)

    def choice(self, prompt: int, index: int, completion: Completion) -> dict[str, Any]:
        """A finished completion."""
        place = prompt * self.n + index
        return {
            "index": place,
            "text": self._echoed[prompt] + completion.text,
            "logprobs": self._with_prompt(prompt, place, completion.logprobs),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            **self._token_ids(completion.token_ids, prompt),
            **self._prompt_logprobs(prompt),
        }

    def chunks(self, prompt: int, delta: Delta) -> Iterator[dict[str, Any]]:
        """One event; the first of a completion has the echoed prompt."""
        place = prompt * self.n + delta.index
        is_first = place not in self._begun
        self._begun.add(place)
        choice = {
            "index": place,
            "text": self._echoed[prompt] + delta.text if is_first else delta.text,
            "logprobs": self._written(place, delta.logprobs),
            "finish_reason": delta.finish_reason,
            **({} if delta.finish_reason is None else {"stop_reason": delta.stop_reason}),
            **self._token_ids(delta.token_ids, prompt if is_first else None),
            **({} if delta.steps is None else {"steps": delta.steps}),
        }
        yield {"choices": [choice]}

    def _written(self, place: int, entries: Sequence[TokenLogprobs] | None) -> dict[str, Any] | None:
        return None if entries is None else self._logprobs[place].completion(entries)

    def _with_prompt(self, prompt: int, place: int, entries: Sequence[TokenLogprobs] | None) -> dict[str, Any] | None:
        """The log-probabilities of the text, which begins with the prompt where that is echoed."""
        echoed = self.of_prompts[prompt] if self._body.echo else None
        if entries is None or echoed is None:
            return self._written(place, entries)
        first = self.prompts[prompt][0]
        text = self._tokenizer.decode([first]).rstrip(REPLACEMENT)
        return self._logprobs[place].completion((*echoed, *entries), (first, text))

    def _prompt_logprobs(self, prompt: int) -> dict[str, Any]:
        entries = self.of_prompts[prompt]
        if entries is None or self._body.prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": of_prompt(entries)}

    def _token_ids(self, token_ids: Sequence[int], prompt: int | None) -> dict[str, Any]:
        if not self._returns_token_ids:
            return {}
        of_prompt = {} if prompt is None else {"prompt_token_ids": self.prompts[prompt]}
        return {"token_ids": token_ids, **of_prompt}


def _without_answer(result: GenerationResult) -> GenerationResult:
    """A result as if no token had been generated."""
    completions = tuple(
        dataclasses.replace(
            each,
            text="",
            token_ids=(),
            num_output_tokens=0,
            logprobs=None if each.logprobs is None else (),
            finish_reason="length",
            stop_reason=None,
        )
        for each in result.completions
    )
    return dataclasses.replace(result, completions=completions)
