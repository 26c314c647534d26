"""What a server writes down with `record_traffic`, and what it does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_backend.config import ConfigError, EngineConfig
from dflash_backend.text.sampling_params import parse_sampling_params
from dflash_backend.text.token_masks import resolve_token_masks
from dflash_backend.text.tokenizer import Tokenizer
from dflash_backend.traffic import RECORDED, read_traffic
from dflash_backend.triton.running_requests import is_recorded
from dflash_backend.triton.service import TritonService
from tests.triton.fake_triton import FakeTriton
from tests.triton.serving import returning, submit

Serve = Callable[..., TritonService]


def test_prompts_and_whole_answers_are_written_down(
    serve: Serve, model_dir: Path, triton: FakeTriton, tmp_path: Path
) -> None:
    service = serve(record_traffic=str(tmp_path), record_traffic_rate=1.0, max_response_mb=0.0005)
    answers = submit(service, "abcd", max_tokens=7, **returning("token_ids")).all()
    streamed = submit(service, "wxyz", max_tokens=7, stream=True).all()
    submit(service, "no", max_tokens=7, sampling={"record_traffic": False}).all()
    assert submit(service, "no", max_tokens=900).all()[-1].error is not None
    submit(service, "stop", max_tokens=15, sampling={"stop": "op"}).all()
    submit(service, "many", max_tokens=4, sampling={"n": 2}).all()
    assert streamed[-1].error is None
    service.close()
    found = [(bytes(prompt).decode(), answer) for prompt, answer in read_traffic(tmp_path, model_dir)]
    assert found == [
        ("abcd", tuple(b"abcdabc")),
        ("wxyz", tuple(b"wxyzwxy")),
        ("stop", tuple(b"stop")),
        ("many", tuple(b"many")),
        ("many", tuple(b"many")),
    ]
    assert found[0][1] == tuple(answers[-1].outputs["token_ids"])
    assert triton.values[RECORDED,] == 5


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, True),
        ({"record_traffic": None, "cache_salt": "", "tenant": "t", "top_p": 0.9, "min_tokens": 2, "seed": 3}, True),
        ({"structured_outputs": {"choice": ["a", "b"]}, "logprobs": 2}, True),
        ({"record_traffic": False}, False),
        ({"record_traffic": "false"}, False),
        ({"cache_salt": "mine"}, False),
        ({"cache_salt": "mine", "record_traffic": True}, False),
        ({"logit_bias": {"97": 1}}, False),
        ({"lora_name": "doll"}, False),
        ({"presence_penalty": 0.5}, False),
        ({"frequency_penalty": -0.5}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"bad_words": ["x"]}, False),
        ({"allowed_token_ids": [97, 98]}, False),
        ({"kv_transfer_params": {"do_remote_decode": True}}, False),
    ],
)
def test_who_refuses_is_left_out(sampling: dict[str, Any], expected: bool, tokenizer: Tokenizer) -> None:
    parsed = parse_sampling_params(sampling, max_speculative_tokens=None)
    assert is_recorded(resolve_token_masks(parsed, tokenizer, (), 1024)) is expected


def test_the_rate_and_the_bound_are_the_settings(tmp_path: Path) -> None:
    def made(**settings: Any) -> Any:
        config = EngineConfig.from_values(settings)
        return TritonService._make_traffic(
            SimpleNamespace(_config=config, _log=SimpleNamespace(warning=print)), tmp_path
        )  # type: ignore[arg-type]

    assert made() is None
    writer = made(record_traffic=str(tmp_path), record_traffic_rate=0.25, record_traffic_gb=0.5)
    assert (writer._rate, writer._max_bytes) == (0.25, 500_000_000)
    writer.close()


def test_a_folder_that_cannot_be_written_stops_the_start(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError) as error:
        serve(record_traffic=str(file))
    assert str(error.value) == f"setting 'record_traffic' is '{file}': {file} is a file; name a folder"
