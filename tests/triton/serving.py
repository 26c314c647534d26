"""The service over a toy engine process and a stand-in for Triton's module, for the tests of this folder."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable

from dflash_backend.engine_client.client import engine_command
from dflash_backend.triton.service import TritonService
from tests.triton.fake_triton import InferenceResponse, Request, Sender

COMMAND = engine_command("tests.engine_client.toy_engine")
WAIT_S = 20.0
TEXT = "漢字🙂 é"


def submit(service: TritonService, text: str | bytes | list[int] = TEXT, max_tokens: int = 15, **inputs) -> Sender:
    """Send a prompt, as text or token ids, with the `sampling` parameters and other inputs."""
    values = {"max_tokens": max_tokens, **inputs.pop("sampling", {})}
    prompt = {"input_ids": text} if isinstance(text, list) else {"text_input": text}
    request = Request(sampling_parameters=json.dumps(values), **prompt, **inputs)
    service.submit(request)
    return request.sender


def joined(responses: Iterable[InferenceResponse]) -> str:
    """The text of all responses."""
    return "".join(response.outputs["text_output"] for response in responses)


def eventually(reached: Callable[[], bool]) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + WAIT_S
    while not reached():
        assert time.monotonic() < deadline, f"not within {WAIT_S} s"
        time.sleep(0.01)
