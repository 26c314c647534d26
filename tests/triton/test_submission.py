"""What a Triton request says outside of its inputs and parameters."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_backend.engine_client.client import QueueLoad
from dflash_backend.messages import EngineReady, SamplingParams
from dflash_backend.text.parameter_values import INT64_MAX
from dflash_backend.text.request import RequestRules
from dflash_backend.triton.submission import Refused, RequestReader
from tests.triton.fake_triton import Request

READY = EngineReady(
    max_model_len=32, num_speculative_tokens=5, num_kv_blocks=8, kv_block_size=16, vocab_size=258, description=""
)


@pytest.mark.parametrize(
    ("timeout_us", "sampling", "expected"),
    [
        (0, {}, 0),
        (300_000, {}, 300_000),
        (300_000, {"timeout": 5}, 5),
        (300_000, {"timeout": 0}, 0),
        # A timeout of -1, which Triton takes.
        (2**64 - 1, {}, INT64_MAX),
    ],
)
def test_the_timeout_of_tritons_protocol_holds_where_the_sampling_parameters_have_none(
    tokenizer: Any, timeout_us: int, sampling: dict[str, int], expected: int
) -> None:
    engines: Any = SimpleNamespace(queue_loads=lambda tenant: {0: QueueLoad(0, 0, 4)}, ready=READY)
    request = Request(json.dumps(sampling), text_input="a")
    request.timeout_us = timeout_us
    parsed, full = RequestReader(tokenizer, RequestRules(4), 8, SimpleNamespace()).read(request, engines)
    assert not full
    assert parsed.sampling == SamplingParams(timeout=expected)


@pytest.mark.parametrize(
    ("load", "refused"),
    [
        # 40 of one tenant and 160 of all may wait; each tenant as many as there are places left for all others.
        (QueueLoad(150, 11, 0), True),
        (QueueLoad(150, 9, 0), False),
        (QueueLoad(150, 0, 0), False),
        (QueueLoad(160, 0, 0), True),
        (QueueLoad(80, 40, 0), True),
        (QueueLoad(80, 39, 0), False),
        # Rows that are free take requests from the queue.
        (QueueLoad(152, 11, 4), False),
        (QueueLoad(3, 3, 4), False),
    ],
)
def test_tenants_that_fill_the_queue_leave_places_for_others(tokenizer: Any, load: QueueLoad, refused: bool) -> None:
    engines: Any = SimpleNamespace(queue_loads=lambda tenant: {0: load}, ready=READY)
    request = Request(json.dumps({"tenant": "flood"}), text_input="a")
    reader = RequestReader(tokenizer, RequestRules(4), 40, SimpleNamespace())
    if refused:
        with pytest.raises(Refused, match="requests wait already"):
            reader.read(request, engines)
    else:
        reader.read(request, engines)
