"""The command line: usage errors, exit statuses, streamed text, statistics, and a clean end on a signal."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflash_cli.launcher.processes import family
from dflash_cli.launcher.server import TritonServer
from dflash_cli.main import main
from tests.client.conftest import TOY_REPOSITORY


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "COMMAND"),
        (["nonsense"], "invalid choice"),
        (["generate", "x", "--max-tokens", "9" * 21], "is too large; allowed: at most 18446744073709551615"),
        (["generate", "x", "--top-p", "much"], "'much' is not a number"),
        (["serve", "--max-num-seqs", "32"], "a setting is given with --set max_num_seqs=32"),
        (["serve", "--max-num-seqs=32", "--verbose"], "a setting is given with --set max_num_seqs=32"),
        (["serve", "--port", "80"], "--http-port, --grpc-port and --metrics-port"),
        (["serve", "--tensor-parallel-size", "2"], "a model runs on one GPU"),
        (["eval", "--kv-cache-gb", "2"], "a setting is given with --set kv_cache_gb=2"),
        (["generate", "x", "--cache-salt", "me"], "a sampling parameter is given with --set-param cache_salt=me"),
        (["generate", "x", "--tempreature", "0"], "did you mean --temperature?"),
        (["generate", "What", "is", "this"], "put it in quotes"),
        (["chat", "--port", "8001"], "--url HOST:PORT"),
        (["inspect", "x", "--zzz"], "dflash-triton inspect --help lists the options"),
        (["generate", "x", "--max-tokens", "0"], "'0' is not a whole number above 0"),
        (["generate", "x", "--temperature", "-1"], "'-1' is not a number of at least 0"),
        (["generate", "x", "--temperature", "nan"], "'nan' is not a number of at least 0"),
        (["generate", "x", "--timeout", "soon"], "'soon' is not a number"),
        (["generate", "x", "--set-param", "top_p"], "'top_p' is not NAME=VALUE"),
        (["serve", "--set", "=3"], "'=3' is not NAME=VALUE"),
        (["serve", "--http-port", "70000"], "'70000' is not a port"),
    ],
)
def test_bad_usage_ends_with_2_and_says_what_is_wrong(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["generate", "x", "--url", "host:port"], "the port 'port'"),
        (["generate"], "give the prompt once"),
        (["generate", "x", "--prompt", "y"], "give the prompt once"),
        (["generate", "x", "--no-thinking"], "add --chat"),
        (["generate", "x", "--ca-cert", "x"], "begin it with grpcs://"),
        (["serve", "--set", "model=x"], "here that is 'target_model'"),
        (["serve", "--set", "enable_lora=true"], "there are no adapters"),
        (["generate", "a\udc80"], "not UTF-8"),
        (["generate", "x", "--set-param", "messages=[]"], "'messages' is not a sampling parameter"),
        (["serve", "--set", "sede=1"], "did you mean 'seed'"),
        (["serve", "--model-name", "a/b"], "model name"),
    ],
)
def test_values_that_make_no_sense_end_with_2(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert words in capsys.readouterr().err


def test_standard_input_that_is_not_utf8_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ok\xff")))
    assert main(["generate", "-"]) == 2
    assert "standard input is not UTF-8 text: invalid start byte at byte 2" in capsys.readouterr().err


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_server_that_is_not_there_is_one_sentence_and_1(
    protocol: str, unused_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "x", "--url", unused_address, "--protocol", protocol, "--timeout", "0.5"]) == 1
    error = capsys.readouterr().err
    assert unused_address in error
    assert error.count("\n") == 1


def test_serve_refuses_a_taken_port_with_1_and_the_option(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        argv = ["serve", "--host", "127.0.0.1", "--http-port", port, "--grpc-port", "0", "--metrics-port", "0"]
        assert main(argv) == 1
    error = capfd.readouterr().err
    assert f"port {port} on 127.0.0.1 is taken" in error
    assert "--http-port" in error


@pytest.mark.server
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_generate_writes_the_text_and_nothing_else_to_standard_output(
    toy: TritonServer, protocol: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = toy.grpc_url if protocol == "grpc" else toy.http_url
    assert main(["generate", "héllo", "--url", url, "--protocol", protocol, "--stats"]) == 0
    out, err = capsys.readouterr()
    assert out == "héllo\n"
    assert "5 in (0 cached), 6 out, finish reason stop" in err
    assert "acceptance length      2.50 (3 accepted in 2 drafts)" in err


@pytest.mark.server
def test_json_is_one_object_with_what_was_sent(toy: TritonServer, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", "hello", "--url", toy.grpc_url, "--json", "--max-tokens", "3", "--temperature", "0"]
    assert main([*argv, "--set-param", "top_p=0.5", "--set-param", "stop=x", "--set-param", "stop_token_ids=[1]"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert (body["text"], body["num_output_tokens"], body["token_ids"]) == ("hel", 3, list(b"hel"))
    assert body["spec_stats"]["sampling"] == {
        "max_tokens": 3,
        "temperature": 0.0,
        "top_p": 0.5,
        "stop": "x",
        "stop_token_ids": [1],
    }


@pytest.mark.server
def test_common_sampling_parameters_have_options(toy: TritonServer, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", "--prompt", "hello", "--url", toy.grpc_url, "--json", "--seed", "1", "--top-p", "0.9"]
    argv += ["--top-k", "-1", "--min-p", "0.1", "--stop", "5", "--stop", "b", "--n", "2", "--min-tokens", "0"]
    argv += ["--presence-penalty", "-1", "--frequency-penalty", "1", "--repetition-penalty", "1.5", "--logprobs", "2"]
    assert main([*argv, "--num-speculative-tokens", "3", "--set-param", "cache-salt=7"]) == 0
    assert json.loads(capsys.readouterr().out)["spec_stats"]["sampling"] == {
        "seed": 1,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "stop": ["5", "b"],
        "n": 2,
        "min_tokens": 0,
        "presence_penalty": -1.0,
        "frequency_penalty": 1.0,
        "repetition_penalty": 1.5,
        "logprobs": 2,
        "num_speculative_tokens": 3,
        "cache_salt": "7",
    }


@pytest.mark.server
@pytest.mark.parametrize(("option", "wanted"), [("--no-thinking", False), ("--thinking", True), (None, None)])
def test_a_chat_template_is_told_whether_to_think(
    toy: TritonServer, option: str | None, wanted: bool | None, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [] if option is None else [option]
    assert main(["generate", "hello", "--chat", "--json", "--url", toy.grpc_url, *options]) == 0
    assert json.loads(capsys.readouterr().out)["spec_stats"]["sampling"].get("enable_thinking") is wanted


@pytest.mark.server
def test_logprobs_are_shown_after_the_text(toy: TritonServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "ab", "--url", toy.grpc_url, "--logprobs", "1"]) == 0
    out, err = capsys.readouterr()
    assert out == "ab\n"
    assert [line.split() for line in err.splitlines()[1:]] == [
        ["97", "'a'", "-0.500", "'a'", "-0.500"],
        ["98", "'b'", "-0.500", "'b'", "-0.500"],
    ]


@pytest.mark.server
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_an_output_that_takes_no_more_is_one_sentence(toy: TritonServer, options: list[str]) -> None:
    command = [sys.executable, "-m", "dflash_cli.main", "generate", "hello", "--url", toy.grpc_url, *options]
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
            _, error = process.communicate(timeout=60)
        assert "Traceback" not in error
        assert (process.returncode, error) in ((130, "dflash-triton: cancelled\n"), (1, error), (-2, error))


# As the installed program; the server that is not there is waited for long enough.
ANY_TIME = """
import sys
import dflash_cli.main as cli
print("importing", flush=True)
cli.entry()
"""


@pytest.mark.server
def test_the_server_may_come_from_the_environment(
    toy: TritonServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DFLASH_URL", f"http://{toy.http_url}")
    assert main(["generate", "hello"]) == 0
    assert capsys.readouterr().out == "hello\n"


@pytest.mark.server
def test_refused_requests_are_sent_again_as_often_as_asked(
    toy: TritonServer, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["generate", "busy cli 2", "--url", toy.grpc_url]
    assert main(argv) == 1
    assert "toy is busy" in capsys.readouterr().err
    assert main([*argv, "--retries", "1"]) == 0
    assert capsys.readouterr().out == "busy cli 2\n"


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert re.fullmatch(r"dflash-triton \d+\.\d+\.\d+\n", capsys.readouterr().out)


@pytest.mark.server
def test_chat_sends_a_message_and_a_refusal_ends_with_1(toy: TritonServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hi", "--chat", "--url", toy.grpc_url]) == 0
    assert capsys.readouterr().out == "<user>hi\n"
    assert main(["generate", "error INVALID_ARG", "--url", toy.grpc_url]) == 1
    assert capsys.readouterr().err == "dflash-triton: toy says INVALID_ARG\n"


@pytest.mark.server
def test_a_signal_to_generate_cancels_the_request(toy: TritonServer, cancel_log: Path) -> None:
    before = cancel_log.read_text() if cancel_log.exists() else ""
    command = [sys.executable, "-m", "dflash_cli.main", "generate", "forever", "--url", toy.grpc_url, "--stats"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.read(1) == "x"
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=20)
    assert process.returncode == 130
    assert re.match(r"dflash-triton: cancelled\ntokens +\d+ in.*\ntime to first token ", error)
    deadline = time.monotonic() + 10
    while (cancel_log.read_text() if cancel_log.exists() else "") == before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert cancel_log.read_text() != before


SERVE = """
import sys
from pathlib import Path
import dflash_cli.launcher.server as launcher
launcher.asset_path = lambda *parts: Path({repository!r})
from dflash_cli.main import main
sys.exit(main(["serve", "--host", "127.0.0.1", "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]))
"""


@pytest.mark.server
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("loading", [False, True])
def test_serve_ends_cleanly_within_ten_seconds_of_a_signal(number: signal.Signals, loading: bool) -> None:
    environ = os.environ | ({"TOY_HANG": "1"} if loading else {})
    command = [sys.executable, "-c", SERVE.format(repository=str(TOY_REPOSITORY))]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ, start_new_session=True
    )
    assert process.stdout is not None
    until = "loading cache" if loading else "Ctrl-C stops the server."
    output = []
    for line in process.stdout:
        output.append(line)
        if until in line:
            break
    members = family(process.pid)
    asked = time.monotonic()
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == 0
    assert time.monotonic() - asked < 10
    assert family(process.pid, members) == set()
    text = "".join(output)
    assert "loading weights 50%" in text
    if not loading:
        assert " generate 'Sam fills 4 bags" in text
        assert "curl -s http://127.0.0.1:" in text


@pytest.mark.server
def test_an_error_that_ends_the_load_is_said_once() -> None:
    command = [sys.executable, "-m", "dflash_cli.main", "serve", "--target", "/no/such/model"]
    ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    done = subprocess.run([*command, *ports], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert (done.stdout + done.stderr).count("target_model is '/no/such/model'") == 1
