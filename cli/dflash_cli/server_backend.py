"""Answers the questions of an evaluation on a running server.

It is no part of `dflash_client`: it needs `dflash_backend.evaluation`, which a plain client does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

from dflash_backend.evaluation import Answer, EvaluationError, ModelRequest
from dflash_backend.evaluation.figures import parse_spec_stats
from dflash_backend.evaluation.run import NO_THINKING, OnAnswer
from dflash_client.client import DFlashClient
from dflash_client.errors import ClientError

Encode = Callable[[ModelRequest], list[int]]


@dataclass(frozen=True)
class ServerAnswerer:
    """An `Answerer` over a client: `concurrency` requests are in flight at a time.

    With `encode` the prompts are sent as token ids; without it messages are sent as such, for the server's chat
    template. `template_options` are variables of that template; by default thinking is off, where it knows that: the
    published figures are measured so.
    """

    client: DFlashClient
    concurrency: int
    encode: Encode | None = None
    template_options: Mapping[str, Any] = field(default_factory=lambda: NO_THINKING)

    def answer(self, requests: Sequence[ModelRequest], on_answer: OnAnswer) -> None:
        """Answer all requests, in any order. The first that fails raises `EvaluationError` and ends it; what is
        answered by then counts."""
        pool = ThreadPoolExecutor(self.concurrency)
        try:
            indices = {pool.submit(self._answer, request): index for index, request in enumerate(requests)}
            try:
                for future in as_completed(list(indices)):
                    on_answer(indices.pop(future), future.result())
            except EvaluationError:
                for future, index in indices.items():
                    if future.done() and not future.cancelled() and future.exception() is None:
                        on_answer(index, future.result())
                raise
        finally:
            # Not waited for: closing the client cancels those that still run.
            pool.shutdown(wait=False, cancel_futures=True)

    def _answer(self, request: ModelRequest) -> Answer:
        try:
            if self.encode is not None:
                result = self.client.generate(self.encode(request), **request.sampling)
            elif request.prompt is not None:
                result = self.client.generate(request.prompt, **request.sampling)
            else:
                result = self.client.generate(
                    messages=request.messages, chat_template_kwargs=dict(self.template_options), **request.sampling
                )
        except ClientError as error:
            raise EvaluationError(f"{request.where}: {error}") from None
        return Answer(result.text, result.num_output_tokens, parse_spec_stats(result.spec_stats))
