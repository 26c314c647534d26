"""Requests that swap the drafter while the server serves: the input `swap_drafter`.

Triton's thread takes such a request and passes it to every engine. The output thread receives what each engine says,
and answers once all have. What an engine says later, that it keeps the drafter or has put the old one back, goes to the
log and the metrics.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import json
import threading
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from dflash_backend.config import EngineConfig
from dflash_backend.engine_client.engines import EngineOutputs, Engines
from dflash_backend.error_text import first_line
from dflash_backend.messages import AbortRequests, DrafterChoice, DrafterSwapped, SwapDrafter
from dflash_backend.triton.log import Log
from dflash_backend.triton.metrics import Metrics
from dflash_backend.triton.responder import Responder, SendFailed
from dflash_backend.triton.responses import ResponseBuilder
from dflash_backend.triton.submission import Refused

INPUT = "swap_drafter"
MAX_WINDOW = 10_000_000
# How often Triton is asked whether the clients are still there, in seconds.
NOTICE_S = 0.5
MAX_CHARS = 16_384  # of the input: a path has at most a quarter of it


class SwapRequest(DrafterChoice, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The JSON object of the input."""

    admin_key: str = ""


@dataclass
class _Waiting:
    """A request of which engines have to say something: these, and what was said, by engine. left: its client has gone,
    and it was answered."""

    responder: Responder
    wanted: SwapDrafter
    engines: set[int]
    said: dict[int, DrafterSwapped] = field(default_factory=dict)
    left: bool = False


def read_swap_request(text: str, admin_key_file: str) -> SwapRequest:
    """The request, from its JSON. Raises `Refused` where it is wrong, or has not the server's key."""
    if len(text) > MAX_CHARS:
        raise Refused("INVALID_ARGUMENT", f"the input {INPUT} has {len(text)} characters; allowed: at most {MAX_CHARS}")
    try:
        wanted = msgspec.json.decode(text, type=SwapRequest)
    except msgspec.DecodeError as error:
        raise Refused("INVALID_ARGUMENT", f"the input {INPUT} is wrong: {first_line(error)}") from None
    if not admin_key_file:
        raise Refused(
            "UNAVAILABLE", "drafters are not swapped here: the setting admin_key_file names no file with a key"
        )
    try:
        key = _admin_key(admin_key_file)
    except ValueError as error:
        raise Refused("UNAVAILABLE", str(error)) from None
    if not hmac.compare_digest(key.encode(), wanted.admin_key.encode()):
        raise Refused("INVALID_ARGUMENT", "admin_key is not the one in the server's admin_key_file")
    if not wanted.draft_model:
        raise Refused(
            "INVALID_ARGUMENT", "draft_model is empty; name the new drafter, a folder at the server or a hub id"
        )
    if not 0 <= wanted.window <= MAX_WINDOW:
        raise Refused("INVALID_ARGUMENT", f"window is {wanted.window}; allowed: an integer from 0 to {MAX_WINDOW}")
    if not 0 <= wanted.max_loss <= 1:
        raise Refused("INVALID_ARGUMENT", f"max_loss is {wanted.max_loss}; allowed: a number from 0 to 1")
    return wanted


def _admin_key(file: str) -> str:
    """The key in the file of the setting. Raises ValueError with a sentence."""
    try:
        key = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the file of the setting admin_key_file cannot be read: {first_line(error)}") from None
    if not key:
        raise ValueError("the file of the setting admin_key_file is empty")
    return key


class DrafterSwaps:
    """Those that are under way."""

    def __init__(
        self,
        config: EngineConfig,
        engines: Engines,
        responses: ResponseBuilder,
        metrics: Metrics,
        log: Log,
        num_instances: int = 1,
    ) -> None:
        """num_instances: of the model. Triton gives a request to one of them."""
        self._config = config
        self._num_instances = num_instances
        self._engines = engines
        self._responses = responses
        self._metrics = metrics
        self._log = log
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._waiting: dict[str, _Waiting] = {}
        # When Triton was last asked for their clients.
        self._asked_at = 0.0
        # Drafters that are still compared: their ids, and the engines that do so.
        self._compared: set[tuple[str, int]] = set()
        if config.admin_key_file:
            try:
                _admin_key(config.admin_key_file)
            except ValueError as error:
                # Read anew for each request, so that a file that comes later is enough.
                log.warning(f"{error}; requests for another drafter are refused until it has a key")

    def begin(self, text: str, responder: Responder) -> None:
        """Ask all engines for it; Triton's thread calls it. Raises `Refused`."""
        request = read_swap_request(text, self._config.admin_key_file)
        if self._num_instances > 1:
            raise Refused(
                "INVALID_ARGUMENT",
                f"the model has {self._num_instances} instances (instance_group in config.pbtxt), and Triton would "
                "give this request to one of them; restart the server with the new drafter as draft_model, or have one "
                "instance with data_parallel_size",
            )
        choice = {name: getattr(request, name) for name in DrafterChoice.__struct_fields__}
        wanted = SwapDrafter(swap_id=f"swap-{next(self._ids)}", **choice)
        engines = self._engines.up
        if len(engines) < len(self._engines):
            raise Refused("UNAVAILABLE", "an engine is being restarted; try again in a few seconds")
        with self._lock:
            self._waiting[wanted.swap_id] = _Waiting(responder, wanted, set(engines))
        self._log.info(f"loading the drafter {wanted.draft_model} beside the one that drafts")
        for index in engines:
            self._engines.send(index, wanted)
        for index in set(engines) - set(self._engines.up):
            self.lose_engine(index)  # which the output thread may have noticed before the request was here

    def take(self, outputs: list[EngineOutputs]) -> None:
        """Take in what engines say of swaps; the output thread calls it, as all that follows."""
        for index, message in outputs:
            for said in message.drafter_swaps:
                self._note(index, said)

    def lose_engine(self, index: int) -> None:
        """An engine is gone, and what it was asked with it. One that dies while it compares a drafter may have died of
        it: its supervisor starts the next one with the drafter before."""
        with self._lock:
            asked = [swap_id for swap_id, each in self._waiting.items() if index in each.engines]
        for swap_id in asked:
            # UNAVAILABLE would say that the request may be sent again, and the next engine die of it too.
            self._note(
                index, DrafterSwapped(swap_id, "refused", "the engine died while it loaded the drafter", "INTERNAL")
            )
        for swap_id in [swap_id for swap_id, engine in self._compared if engine == index]:
            reason = "the engine died while it compared the drafter, and starts with the one before"
            self._note(index, DrafterSwapped(swap_id, "reverted", reason))

    def check_cancelled(self, now: float) -> None:
        """End the requests whose client has gone; engines that are still loading drop what they load. `now` is that of
        `time.monotonic`."""
        if not self._waiting or now - self._asked_at < NOTICE_S:
            return
        self._asked_at = now
        gone: dict[str, _Waiting] = {}
        # Under the lock, where requests that are answered have left.
        with self._lock:
            for swap_id, each in self._waiting.items():
                with contextlib.suppress(SendFailed):  # it is asked again
                    if not each.left and each.responder.is_cancelled():
                        each.left, gone[swap_id] = True, each
        for swap_id, each in gone.items():
            for index in sorted(each.engines):
                self._engines.send(index, AbortRequests([swap_id]))
            each.responder.fail("CANCELLED", "the request was cancelled")
            self._log.warning(f"the client that asked for the drafter {each.wanted.draft_model} has left")

    def fail_all(self, message: str) -> None:
        """End all requests that wait."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for each in waiting.values():
            if not each.left:
                each.responder.fail("UNAVAILABLE", message)

    def _note(self, index: int, said: DrafterSwapped) -> None:
        self._metrics.count("dflash:drafter_swaps_total", 1, said.outcome)
        name = f"engine {index}: " if len(self._engines) > 1 else ""
        report = self._log.warning if said.outcome in ("refused", "reverted") else self._log.info
        report(f"{name}drafter {said.outcome}: {said.message}")
        if said.outcome in ("kept", "reverted"):
            self._compared.discard((said.swap_id, index))
        with self._lock:
            waiting = self._waiting.get(said.swap_id)
            if waiting is None:
                return
            waiting.engines.discard(index)
            waiting.said[index] = said
            if not waiting.engines:
                del self._waiting[said.swap_id]
        if said.outcome == "swapped" and waiting.wanted.window:
            self._compared.add((said.swap_id, index))
        if not waiting.engines:
            self._answer(waiting)

    def _answer(self, waiting: _Waiting) -> None:
        if waiting.left:
            return
        refused = [(index, said) for index, said in sorted(waiting.said.items()) if said.outcome == "refused"]
        if refused:
            several = len(self._engines) > 1
            lines = [f"engine {index}: {said.message}" if several else said.message for index, said in refused]
            others = len(waiting.said) - len(refused)
            more = f" ({others} of {len(self._engines)} engines have it)" if others else ""
            waiting.responder.fail(refused[0][1].status, f"the drafter was not swapped{more}: {'; '.join(lines)}")
            return
        said = next(iter(waiting.said.values()))
        text = json.dumps({"outcome": said.outcome, "message": said.message, "num_engines": len(waiting.said)})
        try:
            waiting.responder.send(self._responses.description(text), final=True)
        except SendFailed as error:
            self._log.error(str(error))
