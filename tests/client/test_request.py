"""URLs, requests and results: what needs no server."""

import pytest

from dflash_client import Delta, GenerationResult
from dflash_client.client import parse_url
from dflash_client.request import Request


@pytest.mark.parametrize(
    ("url", "protocol", "expected"),
    [
        ("localhost", "grpc", ("grpc", "localhost:8001")),
        ("localhost", "http", ("http", "localhost:8000")),
        ("host.example:9", "grpc", ("grpc", "host.example:9")),
        ("http://10.0.0.1:8000/", "grpc", ("http", "10.0.0.1:8000")),
        ("grpc://10.0.0.1", "http", ("grpc", "10.0.0.1:8001")),
        ("[::1]:8001", "grpc", ("grpc", "[::1]:8001")),
        ("[::1]", "http", ("http", "[::1]:8000")),
    ],
)
def test_a_url_gives_protocol_and_address(url: str, protocol: str, expected: tuple[str, str]) -> None:
    assert parse_url(url, protocol) == expected


@pytest.mark.parametrize("url", ["", ":8001", "host:0", "host:70000", "host:x", "https://host", "host/path:1", "a b:1"])
def test_a_bad_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"address|port|begins with"):
        parse_url(url, "grpc")


def test_exactly_one_of_prompt_and_messages() -> None:
    with pytest.raises(ValueError, match="exactly one"):
        Request.build("m", False, None, None, {})
    with pytest.raises(ValueError, match="exactly one"):
        Request.build("m", False, "x", [{"role": "user", "content": "x"}], {})


def test_text_without_a_utf8_form_is_refused_before_it_is_sent() -> None:
    with pytest.raises(ValueError, match="UTF-8.*character 2"):
        Request.build("m", False, "ab\udc80", None, {})


def test_parameters_that_are_none_are_not_sent() -> None:
    request = Request.build("m", True, "x", None, {"max_tokens": None, "stop": ["."]})
    assert request.strings() == {"text_input": "x", "sampling_parameters": '{"stop": ["."]}'}


def test_the_prompt_is_excluded_only_where_the_server_would_send_it() -> None:
    streamed = Request.build("m", True, "x", None, {}).flags()
    at_once = Request.build("m", False, "x", None, {}).flags()
    assert "exclude_input_in_output" not in streamed
    assert at_once["exclude_input_in_output"]


def test_deltas_join_to_a_result() -> None:
    deltas = [
        Delta("a", (1, 2), 2, 7),
        Delta("", (), 0, 7),
        Delta("b", (3,), 1, 7, "stop", {"num_drafts": 1}),
    ]
    assert GenerationResult.from_deltas(deltas) == GenerationResult("ab", "stop", 7, 3, (1, 2, 3), {"num_drafts": 1})
