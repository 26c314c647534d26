"""Stands in for the Triton servers: a model that answers what a test has scripted, and keeps what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_client import Delta, Step
from dflash_client.errors import Cancelled, ClientError
from dflash_openai.config import FrontendConfig
from dflash_openai.triton_pool import ModelDescription, TritonPool

MAX_MODEL_LEN = 200
STATS = {
    "num_drafts": 3,
    "num_draft_tokens": 9,
    "num_accepted_tokens": 4,
    "num_accepted_tokens_per_pos": [2, 1, 1],
    "acceptance_length": 2.3333,
    "num_cached_tokens": None,
    "num_preemptions": 0,
    "queue_time_s": 0.25,
}


@dataclass
class Asked:
    """A request as the model would get it."""

    stream: bool
    token_ids: list[int]
    sampling: dict[str, Any]
    headers: dict[str, str]
    cancelled: bool = False


@dataclass
class Script:
    """What the model answers: texts that come one after the other for each completion, then `error` or the end.

    With `endless`, the texts come over and over until the request is cancelled. With `ends_with_text`, the last text
    comes together with the end; with `stats_apart` the statistics of each completion come after the end of all, as
    where one goes on longer than the others. encode: gives the token ids of a text. stats_of: what the statistics of a
    completion have in place of `stats`, by its index.
    """

    texts: Sequence[str] = ("Hel", "lo", "!")
    finish_reason: str = "stop"
    error: ClientError | None = None
    endless: bool = False
    # Before each delta, and before the end.
    wait_s: float = 0.0
    ends_with_text: bool = False
    stats: Mapping[str, Any] = field(default_factory=lambda: STATS)
    stats_apart: bool = False
    logprobs: Sequence[Any] | None = None
    prompt_logprobs: tuple[Any, ...] | None = None
    encode: Callable[[str], Sequence[int]] = str.encode
    stop_reason: str | int | None = None
    kv_transfer_params: dict[str, Any] | None = None
    stats_of: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    def spec_stats(self, index: int) -> dict[str, Any]:
        return {**self.stats, **self.stats_of.get(index, {})}


class ScriptedRequest:
    """Has the methods of `PooledRequest`."""

    def __init__(self, script: Script, asked: Asked) -> None:
        self._script, self._asked = script, asked

    def cancel(self) -> None:
        self._asked.cancelled = True

    async def _wait(self, seconds: float) -> None:
        """As long as the request is not cancelled."""
        while seconds > 0.1 and not self._asked.cancelled:
            await asyncio.sleep(0.1)
            seconds -= 0.1
        await asyncio.sleep(0 if self._asked.cancelled else max(seconds, 0))

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        script, asked = self._script, self._asked
        n = asked.sampling.get("n", 1)
        while True:
            for place, text in enumerate(script.texts):
                await self._wait(0.01 if script.endless else script.wait_s)
                if asked.cancelled:
                    raise Cancelled("the request was cancelled")
                if script.ends_with_text and place == len(script.texts) - 1:
                    break
                for index in range(n):
                    yield self._delta(text, place, index)
            if not script.endless:
                break
        await self._wait(script.wait_s)
        if script.error is not None:
            raise script.error
        for index in range(n):
            text = script.texts[-1] if script.ends_with_text else ""
            yield Delta(
                text,
                finish_reason=script.finish_reason,
                spec_stats=None if script.stats_apart else script.spec_stats(index),
                index=index,
                stop_reason=script.stop_reason,
                kv_transfer_params=script.kv_transfer_params if index == 0 else None,
            )
        if script.stats_apart:
            for index in range(n):
                yield Delta("", spec_stats=script.spec_stats(index), index=index)

    def _delta(self, text: str, place: int, index: int) -> Delta:
        ids = tuple(self._script.encode(text))
        logprobs = None
        if self._asked.sampling.get("logprobs") is not None and self._script.logprobs is not None:
            logprobs = tuple(self._script.logprobs[place])
        of_prompt = self._script.prompt_logprobs if place == index == 0 else None
        steps = (Step(len(ids), 3, len(text)),) if self._asked.sampling.get("return_steps") else None
        return Delta(
            text,
            ids,
            len(ids),
            len(self._asked.token_ids),
            index=index,
            logprobs=logprobs,
            prompt_logprobs=of_prompt,
            steps=steps,
        )


class ScriptedPool(TritonPool):
    """One script for all requests; `asked` has them in order."""

    def __init__(self, tokenizer_dir: Path) -> None:
        super().__init__(FrontendConfig(triton_urls=()))
        self.script = Script()
        self.asked: list[Asked] = []
        self.unreachable: ClientError | None = None
        self.description = ModelDescription(
            max_model_len=MAX_MODEL_LEN,
            vocab_size=258,
            num_speculative_tokens=3,
            max_n=8,
            tokenizer=str(tokenizer_dir),
            target_model="toys/target",
        )

    def request(
        self,
        stream: bool,
        token_ids: Sequence[int],
        sampling: Mapping[str, Any],
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        self.asked.append(Asked(stream, list(token_ids), dict(sampling), dict(headers or {})))
        return ScriptedRequest(self.script, self.asked[-1])

    @property
    def num_servers(self) -> int:
        return 1

    async def probe(self, timeout_s: float) -> ClientError | None:
        return self.unreachable

    async def describe(self, timeout_s: float) -> ModelDescription:
        if self.unreachable is not None:
            raise self.unreachable
        return self.description
