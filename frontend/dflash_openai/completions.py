"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dflash_backend.text.detokenizer import REPLACEMENT
from dflash_backend.text.truncation import Truncation
from dflash_client import Delta, GenerationResult
from dflash_client.results import Completion, TokenLogprobs
from dflash_openai.answers import Answer, respond
from dflash_openai.bodies import in_thread, read_body
from dflash_openai.budget import BYTES_OF_TOKEN, check_asked, check_num_tokens
from dflash_openai.errors import invalid
from dflash_openai.generation import Generation
from dflash_openai.logprobs import LogprobWriter, of_prompt
from dflash_openai.prompts import PromptBuilder
from dflash_openai.sampling import client_names, max_tokens, sampling_parameters, truncation
from dflash_openai.schemas import CompletionRequest
from dflash_openai.state import Frontend, Model

MAX_PROMPTS = 1024
FORMS = "a text, a list of texts, a list of token ids, or a list of such lists"


async def create_completion(request: Request) -> Response:
    """Complete one or more prompts."""
    frontend: Frontend = request.app.state.frontend
    body, (sampling, only_echo) = await read_body(request, CompletionRequest, lambda body: _read(body, frontend))
    model = frontend.model(body.model)
    check_sizes = partial(check_num_tokens, description=model.description, num_servers=frontend.pool.num_servers)
    kept = truncation(body, model.description.max_model_len)
    prompts = await _prompts(body, model.prompts, check_sizes, kept)
    names = client_names(body)
    limits = [max_tokens(body, len(token_ids), model.description, names) for token_ids in prompts]
    check_asked([len(token_ids) for token_ids in prompts], limits, sampling, model.description)
    answer = CompletionAnswer(body, model, prompts, only_echo)
    if body.stream and body.echo:
        await in_thread(sum(map(len, prompts)) * BYTES_OF_TOKEN, answer.read_echo)
    generation = Generation(request, prompts, sampling, limits, names, bool(body.stream))
    return await respond(answer, generation)


def _read(body: CompletionRequest, frontend: Frontend) -> tuple[dict[str, Any], bool]:
    """The model's parameters, and whether the answer is the prompt alone. Raises `ApiError`."""
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
    return sampling, only_echo


async def _prompts(
    body: CompletionRequest,
    builder: PromptBuilder,
    check_sizes: Callable[[int, int], None],
    kept: Truncation | None,
) -> list[list[int]]:
    """Token ids of each prompt, of which `kept` says what remains. `check_sizes` gets the numbers of tokens and of
    prompts. Raises `ApiError`."""
    given = body.prompt
    special = body.add_special_tokens is not False
    if isinstance(given, str):
        return [await builder.from_text(given, special, kept)]
    if not given:
        raise invalid(f"'prompt' is an empty list; allowed: {FORMS}", "prompt")
    if type(given[0]) in (int, float):
        return [await in_thread(len(given) * BYTES_OF_TOKEN, lambda: builder.check_token_ids(given, truncation=kept))]
    if len(given) > MAX_PROMPTS:
        raise invalid(f"there are {len(given)} prompts; allowed: at most {MAX_PROMPTS}", "prompt")
    # Before any work for the first of them.
    num_tokens = sum(len(item) for item in given if isinstance(item, list))
    check_sizes(num_tokens, len(given))
    prompts = []
    for item in given:
        if isinstance(item, str):
            prompts.append(await builder.from_text(item, special, kept))
            num_tokens += len(prompts[-1])
            check_sizes(num_tokens, len(given))
        elif isinstance(item, list):
            prompts.append(builder.check_token_ids(item, truncation=kept))
            # Others get on between two of them.
            await asyncio.sleep(0)
        else:
            raise invalid(f"'prompt' is not {FORMS}", "prompt")
    return prompts


class CompletionAnswer(Answer):
    """The choices of a completion; those of prompt p have the indices from n * p on."""

    id_prefix = "cmpl"
    object = chunk_object = "text_completion"

    def __init__(
        self, body: CompletionRequest, model: Model, prompts: Sequence[list[int]], only_echo: bool = False
    ) -> None:
        """`only_echo`: the answer is the prompt alone."""
        super().__init__(body, model, prompts)
        self._body, self._tokenizer, self._only_echo = body, model.tokenizer, only_echo
        # The echoed text of each prompt that was asked for so far.
        self._echoed: dict[int, str] = {}
        self._begun: set[int] = set()
        self._returns_token_ids = bool(body.return_token_ids)
        as_token_ids = bool(body.return_tokens_as_token_ids)
        # By place, made as completions come: how many there may be is the model's to say, and `n` may be any number.
        num_top = None if body.logprob_token_ids else body.logprobs or 0
        self._logprobs = defaultdict[int, LogprobWriter](lambda: LogprobWriter(num_top, as_token_ids, self._tokenizer))

    def read_echo(self) -> None:
        """Turn all prompts that are echoed into text, which takes long for many."""
        for index in range(len(self.prompts)):
            self._prompt_text(index)

    def _prompt_text(self, index: int) -> str:
        """What `echo` puts before the completions of a prompt: its text as it was sent, or that of its token ids."""
        if not self._body.echo:
            return ""
        given = self._body.prompt if isinstance(self._body.prompt, str) else self._body.prompt[index]
        if isinstance(given, str) and self._body.truncate_prompt_tokens is None:
            return given
        if index not in self._echoed:
            self._echoed[index] = self._tokenizer.decode(self.prompts[index], skip_special_tokens=False)
        return self._echoed[index]

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
            "text": self._prompt_text(prompt) + completion.text,
            "logprobs": self._with_prompt(prompt, place, completion.logprobs),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            **dict.fromkeys(("token_ids", "prompt_token_ids")),
            **self._token_ids(completion.token_ids, prompt),
            "prompt_logprobs": self._prompt_logprobs(prompt),
        }

    def chunks(self, prompt: int, delta: Delta) -> Iterator[dict[str, Any]]:
        """One event; the first of a completion has the echoed prompt."""
        place = prompt * self.n + delta.index
        is_first = place not in self._begun
        self._begun.add(place)
        choice = {
            "index": place,
            "text": self._prompt_text(prompt) + delta.text if is_first else delta.text,
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
        text = self._tokenizer.decode([first], skip_special_tokens=False).rstrip(REPLACEMENT)
        return self._logprobs[place].completion((*echoed, *entries), (first, text), self._prompt_text(prompt))

    def _prompt_logprobs(self, prompt: int) -> Any:
        entries = self.of_prompts[prompt]
        return None if entries is None or self._body.prompt_logprobs is None else of_prompt(entries)

    def _token_ids(self, token_ids: Sequence[int], prompt: int | None) -> dict[str, Any]:
        if not self._returns_token_ids:
            return {}
        of_prompt = {} if prompt is None else {"prompt_token_ids": self.prompts[prompt]}
        return {"token_ids": token_ids, **of_prompt}


def _without_answer(result: GenerationResult) -> GenerationResult:
    """A result as if no token had been generated."""
    completions = tuple(
        Completion("", "length", logprobs=None if each.logprobs is None else (), spec_stats=each.spec_stats)
        for each in result.completions
    )
    return dataclasses.replace(result, completions=completions)
