"""`dflash-triton generate`: streamed text, statistics, options that become parameters, and a clean end on a signal."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflash_cli.launcher.server import TritonServer
from dflash_cli.main import IMPORTS
from dflash_cli.main import parser as cli_parser
from tests.client.conftest import one_more_cancellation, url_of

GENERATE = [sys.executable, "-m", "dflash_cli.main", "generate"]


@pytest.fixture
def generate(cli, toy: TritonServer):
    """Runs the command against the toy server."""
    return lambda *argv: cli("generate", "--url", toy.grpc_url, *argv)


@pytest.mark.server
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_the_text_and_nothing_else_goes_to_standard_output(cli, toy: TritonServer, protocol: str) -> None:
    ended = cli("generate", "héllo", "--url", url_of(toy, protocol), "--protocol", protocol, "--stats")
    assert (ended.status, ended.out) == (0, "héllo\n")
    assert "5 in (0 cached), 6 out, finish reason stop" in ended.err
    assert "acceptance length      2.50 (3 accepted in 2 drafts)" in ended.err


@pytest.mark.server
def test_json_is_one_object_with_the_answer_and_what_was_sent(generate) -> None:
    argv = ["--prompt", "hello", "--json", "--max-tokens", "3", "--temperature", "0", "--seed", "1", "--top-k", "-1"]
    argv += ["--min-p", "0.1", "--stop", "5", "--stop", "b", "--min-tokens", "0", "--logprobs", "2"]
    argv += ["--presence-penalty", "-1", "--frequency-penalty", "1", "--repetition-penalty", "1.5"]
    argv += ["--num-speculative-tokens", "3", "--set-param", "cache-salt=7", "--set-param", "stop_token_ids=[1]"]
    ended = generate(*argv, "--top-p", "0.9")
    assert ended.status == 0
    body = json.loads(ended.out)
    assert (body["text"], body["num_output_tokens"], body["token_ids"]) == ("hel", 3, list(b"hel"))
    assert body["spec_stats"]["sampling"] == {
        "max_tokens": 3,
        "temperature": 0.0,
        "seed": 1,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "stop": ["5", "b"],
        "stop_token_ids": [1],
        "min_tokens": 0,
        "presence_penalty": -1.0,
        "frequency_penalty": 1.0,
        "repetition_penalty": 1.5,
        "logprobs": 2,
        "num_speculative_tokens": 3,
        "cache_salt": "7",
    }


@pytest.mark.server
@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        (["--chat", "--no-thinking"], "enable_thinking", False),
        (["--chat", "--thinking"], "enable_thinking", True),
        (["--chat"], "enable_thinking", None),
        (["--n", "2"], "n", 2),
        (["--set-param", "top_p=0.5"], "top_p", 0.5),
        (["--set-param", "stop=x"], "stop", "x"),
    ],
)
def test_an_option_becomes_a_parameter(generate, options: list[str], name: str, value: object) -> None:
    ended = generate("hello", "--json", *options)
    assert ended.status == 0
    assert json.loads(ended.out)["spec_stats"]["sampling"].get(name) == value


@pytest.mark.server
def test_logprobs_are_shown_after_the_text(generate) -> None:
    ended = generate("ab", "--logprobs", "1")
    assert (ended.status, ended.out) == (0, "ab\n")
    assert [line.split() for line in ended.err.splitlines()[1:]] == [
        ["97", "'a'", "-0.500", "'a'", "-0.500"],
        ["98", "'b'", "-0.500", "'b'", "-0.500"],
    ]


@pytest.mark.server
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_an_output_that_takes_no_more_is_one_sentence(toy: TritonServer, options: list[str]) -> None:
    command = [*GENERATE, "hello", "--url", toy.grpc_url, *options]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert ended.stderr == "dflash-triton: standard output cannot be written: No space left on device\n"


def test_ctrl_c_at_any_time_is_no_traceback(unused_address: str) -> None:
    """The signal comes at moments from the first import on to the wait for a connection."""
    command = [sys.executable, "-c", ANY_TIME, "generate", "x", "--url", unused_address]
    for step in range(12):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "importing\n"
            time.sleep(0.02 + step * 0.05)
            process.send_signal(signal.SIGINT)
            try:
                _, error = process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        assert "Traceback" not in error
        assert (process.returncode, error) in ((130, "dflash-triton: cancelled\n"), (1, error), (-2, error))


def test_what_a_command_imports_before_it_begins_is_all_that_takes_long() -> None:
    """What it imports later Ctrl-C would meet in the middle of some library."""
    commands = cli_parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    assert commands.keys() >= IMPORTS.keys() == commands.keys() - {"dynamo"}
    code = f"import sys, importlib; importlib.import_module({IMPORTS['generate']!r}); old = set(sys.modules)\n"
    code += "from dflash_cli.main import main; main(['generate', 'x', '--url', '127.0.0.1:1', '--timeout', '1'])\n"
    code += "heavy = {'numpy', 'grpc', 'httpx', 'torch'}; print(sorted((set(sys.modules) - old) & heavy))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.endswith("[]\n")


# As the installed program; the server that is not there is waited for long enough.
ANY_TIME = """
import sys
import dflash_cli.main as cli
print("importing", flush=True)
cli.entry()
"""


@pytest.mark.server
def test_the_server_may_come_from_the_environment(cli, toy: TritonServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_URL", f"http://{toy.http_url}")
    assert cli("generate", "hello") == (0, "hello\n", "")


@pytest.mark.server
def test_refused_requests_are_sent_again_as_often_as_asked(generate) -> None:
    refused = generate("busy cli 2")
    assert refused.status == 1
    assert "toy is busy" in refused.err
    ended = generate("busy cli 2", "--retries", "1")
    assert (ended.status, ended.out) == (0, "busy cli 2\n")


@pytest.mark.server
def test_chat_sends_a_message_and_a_refusal_ends_with_1(generate) -> None:
    assert generate("hi", "--chat") == (0, "<user>hi\n", "")
    assert generate("error INVALID_ARG") == (1, "", "dflash-triton: toy says INVALID_ARG\n")


@pytest.mark.server
def test_a_signal_cancels_the_request(toy: TritonServer, cancel_log: Path) -> None:
    command = [*GENERATE, "forever", "--url", toy.grpc_url, "--stats"]
    with (
        one_more_cancellation(cancel_log),
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.read(1) == "x"
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=20)
    assert process.returncode == 130
    assert re.match(r"dflash-triton: cancelled\ntokens +\d+ in.*\ntime to first token ", error)
