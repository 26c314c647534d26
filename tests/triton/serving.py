"""The service over a toy engine process and a stand-in for Triton's module, for the tests of this folder."""

from __future__ import annotations

import json
from collections.abc import Iterable

from dflash_backend.engine_client.client import engine_command
from dflash_backend.triton.service import TritonService
from tests.triton.fake_triton import InferenceResponse, Request, Sender

COMMAND = engine_command("tests.engine_client.toy_process")
TEXT = "漢字🙂 é"


def submit(
    service: TritonService, text: str | bytes | list[int] = TEXT, max_tokens: int = 15, failures: int = 0, **inputs
) -> Sender:
    """Send a prompt, as text or token ids, with the `sampling` parameters and other inputs. The first `failures`
    responses cannot be sent."""
    values = {"max_tokens": max_tokens, **inputs.pop("sampling", {})}
    prompt = {"input_ids": text} if isinstance(text, list) else {"text_input": text}
    request = Request(sampling_parameters=json.dumps(values), **prompt, **inputs)
    request.sender.failures = failures
    service.submit(request)
    return request.sender


def joined(responses: Iterable[InferenceResponse]) -> str:
    """The text of all responses."""
    return "".join(response.outputs["text_output"] for response in responses)


def returning(*outputs: str) -> dict[str, bool]:
    """The inputs that ask for outputs."""
    return {f"return_{name}": True for name in outputs}
