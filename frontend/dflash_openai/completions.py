"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dflash_client import Delta
from dflash_client.results import Completion, TokenLogprobs
from dflash_openai.answers import Answer, respond
from dflash_openai.errors import invalid
from dflash_openai.generation import Generation
from dflash_openai.logprobs import LogprobWriter
from dflash_openai.prompts import PromptBuilder
from dflash_openai.sampling import max_tokens, sampling_parameters
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
    if body.echo and body.logprobs is not None:
        raise invalid("'echo' with 'logprobs' is not supported: those of prompts are not computed", "logprobs")
    sampling = sampling_parameters(body)
    prompts = await _prompts(body, model.prompts)
    limits = [max_tokens(body, len(token_ids), model.description) for token_ids in prompts]
    stream = bool(body.stream)
    answer = CompletionAnswer(body, body.model or model.names[0], prompts, model.prompts)
    return await respond(answer, Generation(frontend.pool, prompts, sampling, request, stream, limits), stream)


async def _prompts(body: CompletionRequest, builder: PromptBuilder) -> list[list[int]]:
    """Token ids of each prompt."""
    given = body.prompt
    special = body.add_special_tokens is not False
    if isinstance(given, str):
        return [await builder.from_text(given, special)]
    if not given:
        raise invalid(f"'prompt' is an empty list; allowed: {FORMS}", "prompt")
    if type(given[0]) is int:
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
        self, body: CompletionRequest, model: str, prompts: Sequence[list[int]], builder: PromptBuilder
    ) -> None:
        super().__init__(body, model, prompts)
        self._echoed = [self._prompt_text(body, index, builder) for index in range(len(prompts))]
        self._begun: set[int] = set()
        self._returns_token_ids = bool(body.return_token_ids)
        as_token_ids = bool(body.return_tokens_as_token_ids)
        self._logprobs = [LogprobWriter(body.logprobs or 0, as_token_ids) for _ in range(len(prompts) * self.n)]

    def _prompt_text(self, body: CompletionRequest, index: int, builder: PromptBuilder) -> str:
        """What `echo` puts before the completions of a prompt: its text as it was sent, or that of its token ids."""
        if not body.echo:
            return ""
        if isinstance(body.prompt, str):
            return body.prompt
        given = body.prompt[index]
        return given if isinstance(given, str) else builder.tokenizer.decode(self.prompts[index])

    def choice(self, prompt: int, index: int, completion: Completion) -> dict[str, Any]:
        """A finished completion."""
        place = prompt * self.n + index
        return {
            "index": place,
            "text": self._echoed[prompt] + completion.text,
            "logprobs": self._written(place, completion.logprobs),
            "finish_reason": completion.finish_reason,
            **self._token_ids(completion.token_ids, prompt),
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
            **self._token_ids(delta.token_ids, prompt if is_first else None),
        }
        yield {"choices": [choice]}

    def _written(self, place: int, entries: Sequence[TokenLogprobs] | None) -> dict[str, Any] | None:
        return None if entries is None else self._logprobs[place].completion(entries)

    def _token_ids(self, token_ids: Sequence[int], prompt: int | None) -> dict[str, Any]:
        if not self._returns_token_ids:
            return {}
        of_prompt = {} if prompt is None else {"prompt_token_ids": self.prompts[prompt]}
        return {"token_ids": token_ids, **of_prompt}
