"""An engine process without a model: it answers with the prompt's own tokens, over and over, three a step.

Tests run it as a module. Prompts that begin with one of the ids below are special. A `max_model_len` of 13 fails
the load, one of 14 dies in it. TOY_ENGINE_LIVES in the environment names a file with a line for each start: `fail` and
`die` while loading, `end` with the first request, `large` with more KV blocks than others, anything else lives.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dflash_backend.config import EngineConfig
from dflash_backend.core.admission import RequestError
from dflash_backend.core.block_hashes import BlockHashes
from dflash_backend.core.drafter_swap import DrafterSwap
from dflash_backend.engine.process import serve
from dflash_backend.messages import (
    BlocksRemoved,
    DrafterSwapped,
    EngineCoreOutputs,
    EngineReady,
    EngineStats,
    GenerationRequest,
    KVEvent,
    KVTransferParams,
    RequestFailed,
    RequestStats,
    SwapDrafter,
    TokenDelta,
    TokenLogprobs,
)
from dflash_backend.spec_stats import SpecDecodingStats

TOKENS_PER_STEP = 3
BREAK = 1000  # the step raises
REFUSE = 1001  # add_request refuses
QUIET = 1002  # never yields a token
VOCAB = 1024
REFUSE_SECOND = 1004  # add_request refuses the second of the completions
GIVE_UP = 1005  # the step ends the request with an error
BREAK_IN_QUEUEING = 1006  # add_request raises what it should not
DIE = 1003  # the process is gone in the middle of a step
FAIL_AT, DIE_AT = 13, 14
EVICT = 1007  # reports that all blocks have left the prefix cache
BREAK_LATER = 1009  # once it has ended, the idle engine finds that it is broken
KEEPS_NOTHING = 1010  # no KV is kept for another server
SLOW = 1008  # a step with it takes a hundredth of a second
BLOCK_SIZE = 16
NUM_ROWS = 2  # free rows, whatever runs
LOAD_S = {"slow": 0.3, "very slow": 3.0}  # seconds that drafters of these names load


@dataclass
class ToyRequest:
    request: GenerationRequest
    num_output: int = 0

    def stats(self) -> RequestStats:
        # A request waits half a second, and each further completion of it a quarter longer.
        queue_time_s = 0.5 + 0.25 * int(self.request.request_id.partition("/")[2] or 0)
        prompt = len(self.request.prompt_token_ids)
        return RequestStats(prompt, self.num_output, 0, SpecDecodingStats(4, 20, 10, [4, 3, 2, 1, 0]), 0, queue_time_s)


def token_logprobs(token: int, num_others: int) -> TokenLogprobs:
    """The token as the likeliest one, then ids that follow it; each is half as likely as the one before."""
    count = num_others + 1
    return TokenLogprobs(
        [(token + i) % 256 for i in range(count)], [-0.5 - i for i in range(count)], list(range(1, count + 1))
    )


class ToyCore:
    """Keeps what the protocol of `EngineCore` asks for, and nothing else."""

    is_moving = is_keeping = False

    def __init__(self) -> None:
        self._requests: dict[str, ToyRequest] = {}
        self._num_generated = 0
        self._hashes: list[bytes] = []
        self._swaps: list[DrafterSwapped] = []
        self._drafter = "the first"
        self.broken = False

    def add_request(self, request: GenerationRequest) -> None:
        first = request.prompt_token_ids[0]
        if first == BREAK_IN_QUEUEING:
            raise KeyError("the toy has no place for this prompt")
        if first == REFUSE or (first == REFUSE_SECOND and request.request_id.endswith("/1")):
            raise RequestError("UNAVAILABLE", "the toy refuses this prompt")
        self._requests[request.request_id] = ToyRequest(request)
        prompt = request.prompt_token_ids
        hashes = BlockHashes(request.sampling.cache_salt, BLOCK_SIZE)
        self._hashes += hashes.first(len(prompt) // BLOCK_SIZE, prompt)

    def abort(self, request_ids: Iterable[str], num_output_tokens: Mapping[str, int] | None = None) -> None:
        for request_id in request_ids:
            state = self._requests.pop(request_id, None)
            if state is not None and request_id in (num_output_tokens or {}):
                self._num_generated += num_output_tokens[request_id] - state.num_output

    def has_unfinished(self) -> bool:
        return bool(self._requests or self._swaps)

    def check_swap(self) -> None:
        """The toy compares nothing."""

    def swap_drafter(self, swap: DrafterSwap) -> None:
        """It says at the next step what the drafter's name asks for, after that it is there."""
        name = swap.wanted.draft_model
        if name == "too early":
            raise RequestError("UNAVAILABLE", "the toy compares another one")
        self._swaps.append(swap.says("swapped", f"{name} drafts now", name))
        if name in ("kept", "reverted"):
            self._swaps.append(swap.says(name, "the toy has compared it", self._drafter if name == "reverted" else ""))
        if name != "reverted":
            self._drafter = name

    @property
    def num_waiting(self) -> int:
        return sum(state.request.prompt_token_ids[0] == QUIET for state in self._requests.values())

    @property
    def num_free_rows(self) -> int:
        return NUM_ROWS

    def crowded_tenants(self) -> dict[str, int]:
        waiting = [state.request for state in self._requests.values() if state.request.prompt_token_ids[0] == QUIET]
        return dict(Counter(request.sampling.tenant for request in waiting))

    def step(self) -> EngineCoreOutputs:
        given_up = [i for i, state in self._requests.items() if state.request.prompt_token_ids[0] == GIVE_UP]
        if any(state.request.prompt_token_ids[0] == SLOW for state in self._requests.values()):
            time.sleep(0.01)
        evicts = any(state.request.prompt_token_ids[0] == EVICT for state in self._requests.values())
        events: list[KVEvent] = [BlocksRemoved(self._hashes)] if evicts else []
        failed = [RequestFailed(request_id, "INTERNAL", "the toy gave up") for request_id in given_up]
        self.abort(given_up)
        deltas = [self._advance(request_id, state) for request_id, state in list(self._requests.items())]
        deltas = [delta for delta in deltas if delta is not None]
        swaps, self._swaps = self._swaps[:1], self._swaps[1:]
        phases = {"verify": 0.25, "draft": 0.125}
        return EngineCoreOutputs(deltas, failed, self.stats(), phases, kv_events=events, drafter_swaps=swaps)

    def collect_drafts(self) -> None:
        """The toy drafts nothing."""

    def idle_outputs(self) -> EngineCoreOutputs:
        return EngineCoreOutputs(stats=self.stats())

    def stats(self) -> EngineStats:
        return EngineStats(num_requests_running=len(self._requests), num_generation_tokens=self._num_generated)

    def _advance(self, request_id: str, state: ToyRequest) -> TokenDelta | None:
        prompt, limit = state.request.prompt_token_ids, state.request.sampling.max_tokens
        if prompt[0] == BREAK:
            raise RuntimeError("the toy broke")
        if prompt[0] == DIE:
            os._exit(9)
        if prompt[0] == QUIET:
            return None
        count = min(TOKENS_PER_STEP, limit - state.num_output)
        tokens = [prompt[i % len(prompt)] for i in range(state.num_output, state.num_output + count)]
        state.num_output += count
        self._num_generated += count
        asked = state.request.sampling.logprobs
        logprobs = None if asked is None else [token_logprobs(token, asked) for token in tokens]
        if state.num_output < limit:
            has_stats = state.request.sampling.stop or state.num_output == count
            return TokenDelta(request_id, tokens, None, state.stats() if has_stats else None, logprobs)
        del self._requests[request_id]
        self.broken = prompt[0] == BREAK_LATER
        params = state.request.sampling.kv_transfer_params
        kept = None
        if params is not None and params.do_remote_decode and prompt[0] != KEEPS_NOTHING:
            kept = KVTransferParams(do_remote_prefill=True, remote_host="toy", remote_port=7, remote_num_blocks=2)
        return TokenDelta(request_id, tokens, "length", state.stats(), logprobs, kv_transfer_params=kept)


class EndingCore(ToyCore):
    """Dies of its first request."""

    def add_request(self, request: GenerationRequest) -> None:
        os._exit(8)


class ToyDrafters:
    """Loads drafters whose names say what becomes of them."""

    def load(self, wanted: SwapDrafter) -> DrafterSwap:
        if wanted.draft_model == "wrong":
            raise ValueError("the toy's target is another one")
        if wanted.draft_model == "defect":
            raise KeyError("the toy lacks a tensor")
        if wanted.draft_model == "die":
            os._exit(9)
        if wanted.draft_model in LOAD_S:
            time.sleep(LOAD_S[wanted.draft_model])
        return DrafterSwap(wanted, lambda: None)


@dataclass
class ToyBuilt:
    core: ToyCore
    ready: EngineReady
    trace: None = None
    drafters: ToyDrafters | None = field(default_factory=ToyDrafters)

    def check(self) -> None:
        if self.core.broken:
            raise RuntimeError("the toy is broken")


def build(config: EngineConfig, progress: Callable[[str, float], None]) -> ToyBuilt:
    """The toy in place of `build.build_engine`."""
    progress("toy", 0.5)
    life = next_life()
    if config.max_model_len == FAIL_AT or life == "fail":
        raise ValueError(f"the toy cannot load with {config.max_model_len}")
    if config.max_model_len == DIE_AT or life == "die":
        os._exit(7)
    length = config.max_model_len or 512
    core, ready = (
        EndingCore() if life == "end" else ToyCore(),
        EngineReady(
            length,
            5,
            99 if life == "large" else 8,
            BLOCK_SIZE,
            VOCAB,
            "toy, drafter the first; KV",
            drafting="the first",
        ),
    )
    return ToyBuilt(core, ready, drafters=None if config.draft_model == "" else ToyDrafters())


def next_life() -> str:
    """Take the first line off the file that says how each start goes."""
    path = os.environ.get("TOY_ENGINE_LIVES")
    if path is None:
        return ""
    with Path(f"{path}.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # engines of one model start at once
        lives = Path(path).read_text(encoding="utf-8").splitlines()
        Path(path).write_text("\n".join(lives[1:]), encoding="utf-8")
    return lives[0] if lives else ""


if __name__ == "__main__":
    sys.exit(serve(build))
