"""What is wrong with a command is said in a sentence, and the status tells whose mistake it is."""

from __future__ import annotations

import io
import re
import socket
import subprocess
import sys

import pytest

from dflash_cli.commands.console import say, write
from dflash_cli.commands.serve import check_lists
from dflash_cli.main import main, parser
from tests.support.servers import PORT_OPTIONS

COMMANDS = sorted(next(iter(parser()._subparsers._group_actions)).choices)  # type: ignore[union-attr, arg-type]
NEEDED = {"generate": ["x"], "inspect": ["x"], "train": ["x", "--out", "y"], "swap-drafter": ["x"]}
"""What the commands that need something are to be given."""


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_what_it_does_not_know(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, *NEEDED.get(command, ()), "--zzz"])
    assert ended.value.code == 2
    assert f"unrecognized arguments: --zzz; dflash-triton {command} --help lists the options" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "COMMAND"),
        (["nonsense"], "invalid choice"),
        (["generate", "x", "--max-tokens", "9" * 21], "is too large; allowed: at most 18446744073709551615"),
        (["generate", "x", "--max-tokens", "0"], "'0' is not a whole number above 0"),
        (["generate", "x", "--top-p", "much"], "'much' is not a number"),
        (["generate", "x", "--temperature", "-1"], "'-1' is not a number of at least 0"),
        (["generate", "x", "--temperature", "nan"], "'nan' is not a number of at least 0"),
        (["generate", "x", "--timeout", "soon"], "'soon' is not a number"),
        (["generate", "x", "--cache-salt", "me"], "a sampling parameter is given with --set-param cache_salt=me"),
        (["generate", "x", "--set-param", "top_p"], "'top_p' is not NAME=VALUE"),
        (["generate", "x", "--set-param", "messages=[]"], "'messages' is not a sampling parameter"),
        (["generate", "x", "--tempreature", "0"], "did you mean --temperature?"),
        (["generate", "What", "is", "this"], "put it in quotes"),
        (["generate", "x", "--url", "host:port"], "the port 'port'"),
        (["generate"], "give the prompt once"),
        (["generate", "x", "--prompt", "y"], "give the prompt once"),
        (["generate", "x", "--no-thinking"], "add --chat"),
        (["generate", "x", "--ca-cert", "x"], "begin it with grpcs://"),
        (["generate", "a\udc80"], "not UTF-8"),
        (["chat", "--port", "8001"], "--url HOST:PORT"),
        (["chat", "--set-param", "n=2"], "n"),
        (["chat", "--set-param", "messages=[]"], "messages"),
        (["train", "m", "--out", "d", "--max-num-seqs", "4"], "a setting is given with --set max_num_seqs=4"),
        (["swap-drafter", "d", "--retries", "3"], "a swap is sent once, since an engine may die of a drafter"),
        (["inspect"], "DIR|ID"),
        (["inspect", "x", "--zzz"], "dflash-triton inspect --help lists the options"),
        (["serve", "--max-queue-size", "32"], "a setting is given with --set max_queue_size=32"),
        (["serve", "--max-queue-size=32", "--verbose"], "a setting is given with --set max_queue_size=32"),
        (["serve", "--max-num-seqs", "32", "--set", "max_num_seqs=8"], "max_num_seqs is given twice"),
        (["serve", "--port", "8000"], "--port and --http-port are both 8000; --port is that of the OpenAI API"),
        (["openai", "--triton", "http://localhost:8000"], "is not a gRPC address"),
        (["openai", "--url", "localhost"], "the servers are given with --triton"),
        (["serve", "--http-port", "70000"], "'70000' is not a port"),
        (["serve", "--tensor-parallel-size", "2"], "a setting is given with --set tensor_parallel_size=2"),
        (["serve", "-tp", "2"], "a setting is given with --set tensor_parallel_size=N"),
        (["serve", "-tp=2"], "a setting is given with --set tensor_parallel_size=N"),
        (["serve", "--pipeline-parallel-size", "2"], "--set tensor_parallel_size=N shares each layer"),
        (["serve", "--data-parallel-size", "2"], "a setting is given with --set data_parallel_size=2"),
        (["serve", "m", "--enable-auto-tool-choice"], "--tool-call-parser says how the model writes calls"),
        (["serve", "m", "--enable-lora"], "--lora-modules NAME=FOLDER"),
        (["serve", "m", "--lora-modules", "a"], "'a' is not NAME=VALUE"),
        (["serve", "m", "--trust-remote-code"], "code of a checkpoint is never run"),
        (["serve", "m", "--enforce-eager"], "--set enable_cuda_graphs=false"),
        (["serve", "--set", "=3"], "'=3' is not NAME=VALUE"),
        (["serve", "--set", "model=x"], "here that is 'target_model'"),
        (["serve", "--set", "enable_lora=true"], "lora_modules says which LoRA adapters there are"),
        (["serve", "--set", "max_loras=2"], "all adapters of lora_modules are in memory"),
        (["serve", "--set", "sede=1"], "did you mean 'seed'"),
        (["serve", "--model-name", "a/b"], "model name"),
        (["serve", "a/b", "--target", "c/d"], "the model is given twice: a/b and --target c/d"),
        (["eval", "a/b", "--target", "c/d"], "the model is given twice: a/b and --target c/d"),
        (
            ["serve", "--served-model-name", "name", "org/model"],
            "no model is given, and --served-model-name has 'org/model', which looks like one; put the model first: "
            "dflash-triton serve org/model [options]",
        ),
        (["serve", "--allowed-hosts", "h", "model.gguf"], "--allowed-hosts has 'model.gguf', which looks like one"),
        (["serve", "--allowed-origins", "https://a", "."], "--allowed-origins has '.', which looks like one"),
        (["serve", "--allowed-origins", "https://a", "org/model"], "--allowed-origins has 'org/model'"),
        (["serve", "--grpc-tls-cert", "cert.pem"], "needs both --grpc-tls-cert and --grpc-tls-key"),
        (["serve", "--allow-api", "health"], "'health' is no API that is restricted"),
        (["serve", "--", "--http-port=1"], "tritonserver's --http-port cannot be passed on: use --http-port"),
        (["eval", "--kv-cache-gb", "2"], "a setting is given with --set kv_cache_gb=2"),
        (["eval", "--limit", "0"], "'0'"),
        (["eval", "--max-tokens", "x"], "'x'"),
        (["eval", "--temperature", "-1"], "'-1'"),
        (["eval", "--seed", "-1"], "'-1'"),
        (["eval", "--seed", str(2**64)], str(2**64)),
        (["eval", "--concurrency", "0"], "'0'"),
        (["eval", "--dataset", "maths"], "'maths' is neither a file nor a data set"),
        (["eval", "--set", "sede=1"], "did you mean 'seed'"),
        (["eval", "--set", "seed=x"], "'x' (command line)"),
        (["eval", "--concurrency", "2", "--set", "max_num_seqs=3"], "--concurrency sets max_num_seqs"),
        (["eval", "--url", "localhost", "--draft", "x"], "--draft is for an engine in this process"),
        (["eval", "--url", "localhost", "--set", "seed=1"], "--set is for an engine in this process"),
        (["eval", "--url", "host:port"], "the port 'port'"),
        (["eval", "--limit", "2", "--seed", str(2**64 - 1)], "seed"),
    ],
)
def test_bad_usage_ends_with_2_and_says_what_is_wrong(cli, argv: list[str], words: str) -> None:
    ended = cli(*argv)
    assert ended.status == 2
    assert words in ended.err


@pytest.mark.parametrize(
    ("command", "package", "extra"),
    [
        (["serve", "m"], "starlette", "server"),
        (["openai"], "starlette", "openai"),
        (["openai"], "transformers.utils", "openai"),
        (["eval", "--url", "localhost"], "msgspec", "server"),
    ],
)
def test_where_only_the_client_is_installed_a_command_says_what_it_needs(
    cli, monkeypatch: pytest.MonkeyPatch, command: list[str], package: str, extra: str
) -> None:
    def run(arguments: object) -> int:
        raise ModuleNotFoundError(f"No module named '{package}'", name=package)

    monkeypatch.setattr(f"dflash_cli.commands.{command[0]}.run", run)
    ended = cli(*command)
    assert ended.status == 1
    assert ended.err.count("\n") == 1
    assert f"No module named '{package}'" in ended.err
    assert f"run pip install '.[{extra}]'" in ended.err


def test_a_module_of_ours_that_is_missing_is_a_defect(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(arguments: object) -> int:
        raise ModuleNotFoundError("No module named 'dflash_openai.gone'", name="dflash_openai.gone")

    monkeypatch.setattr("dflash_cli.commands.openai.run", run)
    with pytest.raises(ModuleNotFoundError):
        cli("openai")


def test_standard_input_that_is_not_utf8_is_refused(cli) -> None:
    ended = cli("generate", "-", typed=b"ok\xff")
    assert ended.status == 2
    assert "standard input is not UTF-8 text: invalid start byte at byte 2" in ended.err


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_server_that_is_not_there_is_one_sentence_and_1(cli, protocol: str, unused_address: str) -> None:
    there = ["--url", unused_address, "--protocol", protocol]
    ended = cli("generate", "x", *there, "--timeout", "0.5")
    assert ended.status == 1
    assert unused_address in ended.err
    assert ended.err.count("\n") == 1
    # Of a chat before anything is typed.
    ended = cli("chat", *there)
    assert ended.status == 1
    assert f"answers at {unused_address}; is it running" in ended.err


@pytest.mark.parametrize(
    "command", [("serve", *PORT_OPTIONS, "--http-port"), ("serve", *PORT_OPTIONS, "--port"), ("openai", "--port")]
)
def test_a_taken_port_is_refused_with_1_and_the_option(
    command: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    option = command[-1]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        assert main([command[0], "--host", "127.0.0.1", *command[1:], port]) == 1
    assert f"port {port} on 127.0.0.1 is taken by another program; choose another one with {option}\n" in (
        capfd.readouterr().err
    )


def test_version_is_that_of_the_package(cli) -> None:
    ended = cli("--version")
    assert ended.status == 0
    assert re.fullmatch(r"dflash-triton \d+\.\d+\.\d+\n", ended.out)


def test_where_a_model_is_given_names_may_look_like_one() -> None:
    for given in (["m"], ["--target", "m"], ["--set", "target_model=m"]):
        check_lists(parser().parse_args(["serve", *given, "--served-model-name", "a", "org/b"]))
    check_lists(parser().parse_args(["serve", "--served-model-name", "org/demo", "b"]))


def test_the_command_line_is_there_without_what_windows_lacks() -> None:
    code = """
import signal, sys
for name in ("SIGHUP", "SIGKILL", "SIGUSR1", "SIGUSR2", "SIGSTOP", "SIGCONT"):
    delattr(signal, name)
for name in ("fcntl", "grp", "pwd", "readline", "resource", "termios", "tty"):
    sys.modules[name] = None
from dflash_cli.main import parser
print(parser().parse_args(["generate", "x"]).prompt)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "x\n"), done.stderr


def test_characters_that_an_output_lacks_are_written_with_a_backslash(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(arguments: object) -> int:
        write("é東\n")
        say("京")
        return 0

    outputs = {name: io.TextIOWrapper(io.BytesIO(), encoding="latin-1") for name in ("stdout", "stderr")}
    for name, stream in outputs.items():
        monkeypatch.setattr(sys, name, stream)
    monkeypatch.setattr("dflash_cli.commands.generate.run", run)
    assert main(["generate", "x"]) == 0
    out, err = (stream.buffer.getvalue() for stream in outputs.values())  # type: ignore[attr-defined]
    assert out == b"\xe9\\u6771\n"
    assert err == b"dflash-triton: \\u4eac\n"


def test_an_output_that_is_closed_is_said_and_nothing_goes_astray(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(arguments: object) -> int:
        write("an answer")
        return 0

    monkeypatch.setattr("dflash_cli.commands.generate.run", run)
    with monkeypatch.context() as closed:
        closed.setattr(sys, "stdout", None)
        assert main(["generate", "x"]) == 1
    assert capsys.readouterr().err == "dflash-triton: standard output is closed\n"
    with monkeypatch.context() as closed:
        closed.setattr(sys, "stderr", None)
        say("a remark")
    assert capsys.readouterr().out == ""
