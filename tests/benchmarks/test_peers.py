"""The comparison with other engines: its arithmetic, what it skips, how it talks to a system, and what fails it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.peers import __main__ as peers
from benchmarks.peers import report
from benchmarks.peers.figures import Cell, Results, Sample, equal_share, fault, median, percentile, ratios
from benchmarks.peers.pairs import (
    DFLASH,
    LONG,
    LONG_TOKENS,
    NGRAM,
    NONE,
    SHORT,
    Pair,
    find_pair,
    prompts,
    whole_vocabulary,
)
from benchmarks.peers.process import Side, SideError
from benchmarks.peers.sides import http_side
from benchmarks.peers.sides.protocol import Clock, closed_loop
from benchmarks.peers.systems import SYSTEMS, Context
from dflash_backend.checkpoints import CheckpointError

CELL = Cell("demo", NONE, SHORT, 2)
SAMPLE = Sample(2.0, (0.1, 0.3), (0.0, 0.5, 0.25), ((1, 2, 3), (4, 5)), (4, 6))


def test_the_clock_times_first_tokens_from_sending_and_tokens_of_a_step_follow_at_once() -> None:
    clock = Clock(2)
    clock.sent(0, 1.0)
    clock.sent(1, 1.5)
    for index, tokens, now in ((0, [7, 8], 2.0), (1, [], 2.5), (1, [9], 3.0), (0, [5], 4.5)):
        clock.arrived(index, tokens, now)
    assert clock.result((3, 2), seconds=4.0) == {
        "seconds": 4.0,
        "first_token_s": [1.0, 1.5],
        "gaps_s": [0.0, 2.5],
        "outputs": [[7, 8, 5], [9]],
        "drafts": (3, 2),
    }


def test_as_many_requests_are_in_flight_as_there_are_streams() -> None:
    in_flight: dict[int, int] = {}
    most = []

    def step() -> Iterator[tuple[int, list[int], bool]]:
        most.append(len(in_flight))
        for index in list(in_flight):
            in_flight[index] -= 1
            if ended := not in_flight[index]:
                del in_flight[index]
            yield index, [index], ended

    clock = closed_loop([[0] * n for n in (1, 3, 2, 2, 1)], 2, lambda i, p: in_flight.update({i: len(p)}), step)
    assert clock.result()["outputs"] == [[0], [1] * 3, [2] * 2, [3] * 2, [4]]
    assert most == [2, 2, 2, 2, 1]


def test_figures_of_a_run() -> None:
    assert (SAMPLE.num_tokens, SAMPLE.tokens_per_s, SAMPLE.first_token_p50_s) == (5, 2.5, 0.2)
    assert (SAMPLE.gap_p99_s, SAMPLE.acceptance_length) == (0.5, 2.5)
    assert replace(SAMPLE, drafts=None).acceptance_length is replace(SAMPLE, drafts=(0, 0)).acceptance_length is None
    assert [percentile(list(range(1, 101)), share) for share in (0.99, 0.5, 0.0)] == [99, 50, 1]
    assert percentile([], 0.99) == 0
    data = {"seconds": 2.0, "first_token_s": [0.1, 0.3], "gaps_s": [0.0, 0.5, 0.25], "outputs": [[1, 2, 3], [4, 5]]}
    assert Sample.of(data | {"drafts": [4, 6]}) == SAMPLE
    assert Sample.of(data | {"drafts": None}, 0.5) == replace(SAMPLE, drafts=None, others=0.5)


def test_ratios_are_of_rounds_and_medians_leave_out_those_that_failed() -> None:
    ours = [replace(SAMPLE, seconds=s) for s in (1.0, 2.0, 4.0)]
    theirs = [SAMPLE, None, SAMPLE]
    assert ratios(ours, theirs) == [2.0, 0.5]
    assert ratios(ours, []) == []
    assert median([*ours, None], "tokens_per_s") == 2.5
    assert median([None], "tokens_per_s") is median(ours[:0], "gap_p99_s") is None
    other = replace(SAMPLE, outputs=((1, 2, 3), (4, 6)))
    assert equal_share([other], [SAMPLE]) == 0.5
    assert equal_share([None, SAMPLE], [other, SAMPLE]) == 1.0
    assert equal_share([None], [SAMPLE]) is None


def test_a_run_with_another_number_of_tokens_is_at_fault() -> None:
    assert fault(replace(SAMPLE, outputs=((1, 2), (3, 4))), 2, 2) is None
    assert fault(SAMPLE, 2, 3) == "2 answers of [2] to [3] tokens; expected 2 of 3"
    assert fault(replace(SAMPLE, outputs=((1, 2),)), 2, 2) == "1 answers of [2] to [2] tokens; expected 2 of 2"
    assert "0 answers" in (fault(replace(SAMPLE, outputs=()), 2, 2) or "")


def context(tmp_path: Path) -> Context:
    return Context(tmp_path / "peers", tmp_path, 2, 8)


def test_what_is_not_installed_is_said_in_a_sentence(tmp_path: Path) -> None:
    demo = find_pair("demo")
    assert SYSTEMS["ours"].missing(context(tmp_path), demo, DFLASH) == ""
    assert SYSTEMS["transformers"].missing(context(tmp_path), demo, DFLASH) == "transformers has no DFlash"
    for name, file in (("vllm", "vllm/venv/bin/python"), ("llama", "llama.cpp/amx/llama-server")):
        said = SYSTEMS[name].missing(context(tmp_path), demo, NONE)
        assert f"is not installed: there is no {tmp_path}/peers/{file} (benchmarks/README.md says how)" in said
        path = tmp_path / "peers" / file
        path.parent.mkdir(parents=True)
        path.touch()
        assert SYSTEMS[name].missing(context(tmp_path), demo, NONE) == ""
        alone = replace(demo, drafter=None)
        assert "--drafter DIR" in SYSTEMS[name].missing(context(tmp_path), alone, DFLASH)
        assert SYSTEMS[name].missing(context(tmp_path), alone, NGRAM) == ""
    (tmp_path / "peers/llama.cpp/plain").mkdir()
    (tmp_path / "peers/llama.cpp/plain/llama-server").touch()
    for name in ("llama-q4_1", "ours-q4_1"):
        assert SYSTEMS[name].missing(context(tmp_path), demo, NONE) == "demo is no quantised GGUF"


def test_all_are_told_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, number type, threads, streams, drafter, drafts and no prefix cache, each in its own words."""
    monkeypatch.setattr("benchmarks.peers.systems.target_file", lambda *_: "T")
    monkeypatch.setattr("benchmarks.peers.systems.drafter_file", lambda *_: "D")
    pair = Pair("x", tmp_path / "t", tmp_path / "d", "float32", 7)
    said = {
        name: json.loads(system.command(context(tmp_path), pair, DFLASH)[-1])
        for name, system in SYSTEMS.items()
        if name != "llama-q4_1"
    }
    common = {"target": f"{tmp_path}/t", "dtype": "float32", "threads": 2, "max_num_seqs": 8, "max_model_len": 2048}
    for name in ("ours", "vllm", "transformers"):
        assert common.items() <= said[name].items()
    assert said["ours"]["draft"] == said["vllm"]["speculative_config"]["model"] == f"{tmp_path}/d"
    assert said["vllm"]["speculative_config"]["num_speculative_tokens"] == 7
    words = {name: " ".join(said[name]["command"]) for name in ("ours-http", "vllm-http", "llama")}
    for part in ("--dtype float32", "--max-num-seqs 8", "--max-model-len 2048"):
        assert part in words["ours-http"]
        assert part in words["vllm-http"]
    assert f"--draft {tmp_path}/d" in words["ours-http"]
    assert "enable_prefix_caching=false" in words["ours-http"]
    assert "--no-enable-prefix-caching" in words["vllm-http"]
    for part in (
        "-m T ",
        "-md D ",
        "-t 2 -tb 2",
        "--no-cache-prompt",
        "-np 8",
        "--spec-draft-n-max 7",
        "-ctk f32 -ctv f32",
    ):
        assert part in words["llama"]
    half = SYSTEMS["llama"].settings(context(tmp_path), replace(pair, dtype="bfloat16"), NONE)["command"]
    assert "-ctk" not in half, "16 bits are its own choice"
    looked_up = [
        json.loads(SYSTEMS[name].command(context(tmp_path), pair, NGRAM)[-1])
        for name in ("ours", "vllm", "transformers")
    ]
    assert looked_up[0]["draft"] == "ngram"
    assert looked_up[1]["speculative_config"]["prompt_lookup_max"] == looked_up[2]["prompt_lookup_max"] == 5


def test_all_sample_in_one_way_and_no_server_filters_by_itself(tmp_path: Path) -> None:
    asked = peers.parser().parse_args(["--sampling", "temperature=0.8,top_p=0.95"]).sampling
    assert asked == {"temperature": 0.8, "top_p": 0.95}
    pair = Pair("x", tmp_path / "t", None, "float32", 7)
    for name in ("ours", "vllm", "transformers", "ours-http", "vllm-http"):
        for sampling in ({}, asked):
            command = SYSTEMS[name].command(replace(context(tmp_path), sampling=sampling), pair, NONE)
            assert json.loads(command[-1])["sampling"] == sampling
    for api in ("openai", "llama"):
        settings = {"api": api, "model": "m", "sampling": asked}
        body = json.loads(http_side.request_body(settings, [1], 2))
        assert body.items() >= {**asked, "seed": 1, "top_k": 0, "min_p": 0.0}.items()
        assert "seed" not in json.loads(http_side.request_body({**settings, "sampling": {}}, [1], 2))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("top_p=0.9", "without a temperature"),
        ("heat=1", "'heat=1' is none of temperature, top_k"),
        ("top_k=x", "is none"),
    ],
)
def test_sampling_that_says_nothing_is_refused(text: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        peers.parser().parse_args(["--sampling", text])
    assert error in capsys.readouterr().err


def test_a_quantised_file_is_served_as_it_is_and_compared_with_itself(tmp_path: Path) -> None:
    pair = Pair("x", tmp_path / "t", None, "bfloat16", 7, tmp_path / "x.gguf")
    commands = [
        " ".join(json.loads(SYSTEMS[name].command(context(tmp_path), pair, NONE)[-1])["command"])
        for name in ("ours-q4_1", "llama-q4_1")
    ]
    assert f"serve {tmp_path}/x.gguf --draft" in commands[0]
    assert "--dtype" not in commands[0]
    assert f"-m {tmp_path}/x.gguf " in commands[1]
    results = Results()
    for name, seconds in (("ours-http", 1.0), ("ours-q4_1", 2.0), ("llama", 3.0), ("llama-q4_1", 3.0)):
        results.add(CELL, name, replace(SAMPLE, seconds=seconds))
    found = {name: report.row(results, CELL, name)[5] for name in results.samples[CELL]}
    assert found == {"ours-http": "", "ours-q4_1": "", "llama": "3.00", "llama-q4_1": "1.50"}


def test_prompts_are_different_and_long_ones_have_their_length() -> None:
    pair = find_pair("demo")
    for kind in (SHORT, LONG):
        found = prompts(pair, kind, 2)
        assert found[0] != found[1]
    assert {len(prompt) for prompt in found} == {LONG_TOKENS}
    assert found[0][-20:] == prompts(pair, SHORT, 1)[0][-20:]


class FakeSide:
    """A system whose runs are made up: `runs` gives each, or an error's text."""

    def __init__(self, runs: Iterator[Any]) -> None:
        self._runs, self.closed = runs, 0

    def ready(self, timeout_s: float) -> str:
        return "1"

    def run(self, asked: list[list[int]], streams: int, max_tokens: int) -> Sample:
        if max_tokens == peers.WARM_UP_TOKENS:
            return SAMPLE
        given = next(self._runs)
        if isinstance(given, str):
            raise SideError(given)
        return Sample(1.0, (0.1,) * len(asked), (0.1,), tuple((given,) * max_tokens for _ in asked), None)

    def close(self) -> None:
        self.closed += 1


Judged = Callable[..., tuple[int, str, dict[str, FakeSide]]]


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Judged:
    """Runs the program with made-up runs of each system; its status, what it printed, and the systems' processes."""

    def run(runs: dict[str, list[Any]], *options: str) -> tuple[int, str, dict[str, FakeSide]]:
        sides: dict[str, FakeSide] = {}
        given = {name: iter(each) for name, each in runs.items()}

        def start(system: Any, *_: Any) -> FakeSide:
            sides[system.name] = FakeSide(given[system.name])
            return sides[system.name]

        monkeypatch.setattr(peers, "start", start)
        monkeypatch.setattr(peers, "prompts", lambda pair, kind, count: [[1]] * count)
        arguments = ["--systems", ",".join(runs), "--pair", "demo", "--prompts", "short", "--streams", "1"]
        arguments += ["--rounds", "3", "--max-tokens", "2", "--peers", str(tmp_path), *options]
        return peers.main(arguments), capsys.readouterr().out, sides

    return run


def test_good_rounds_pass(judged: Judged, tmp_path: Path) -> None:
    runs = {"ours": [7] * 6, "transformers": [7] * 3}
    status, said, sides = judged(runs, "--drafts", "none,dflash", "--out", str(tmp_path / "out"))
    assert status == 0
    assert "no round failed" in said
    assert "- transformers, demo, drafts dflash: transformers has no DFlash" in said
    assert "| none | short | 1 | transformers | 6 | 1.00 (1.00 to 1.00) | 100.0 | 100.0 | - | 100% |" in said
    assert all(side.closed == 1 for side in sides.values())
    data = json.loads((tmp_path / "out" / "peers.json").read_text())
    assert [cell["drafts"] for cell in data["cells"]] == ["none", "dflash"]
    assert data["cells"][0]["systems"]["ours"][0]["tokens_per_s"] == 6.0
    assert (tmp_path / "out" / "peers.png").stat().st_size > 1000
    assert "| none | short | 1 | this engine | 6 |" in (tmp_path / "out" / "peers.md").read_text()


@pytest.mark.parametrize("bad", range(3))
def test_one_round_in_which_a_system_fails_is_enough(judged: Judged, bad: int) -> None:
    runs: list[Any] = [7] * bad + ["it has ended: no memory"]
    status, said, sides = judged({"ours": [7] * 3, "transformers": runs}, "--drafts", "none")
    assert status == 1
    assert "transformers, demo, drafts none, short prompts, 1 streams: it has ended: no memory" in said
    assert "| none | short | 1 | this engine | 6 |" in said, "the others go on"
    assert sides["transformers"].closed == 1


@pytest.mark.parametrize("bad", range(3))
def test_a_round_with_fewer_tokens_fails(judged: Judged, bad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = iter(range(100))
    real = FakeSide.run

    def run(self: FakeSide, asked: list[list[int]], streams: int, max_tokens: int) -> Sample:
        found = real(self, asked, streams, max_tokens)
        if max_tokens != peers.WARM_UP_TOKENS and next(rounds) == bad:
            return replace(found, outputs=(*found.outputs[:-1], found.outputs[-1][:-1]))
        return found

    monkeypatch.setattr(FakeSide, "run", run)
    status, said, _ = judged({"ours": [7] * 3}, "--drafts", "none")
    assert status == 1
    assert "this engine, demo, drafts none, short prompts, 1 streams: 3 answers of [1] to [2] tokens" in said


def test_drafts_that_change_our_text_fail_and_other_systems_texts_do_not(judged: Judged) -> None:
    status, said, _ = judged({"ours": [7] * 3 + [8] * 3, "transformers": [9] * 6}, "--drafts", "none,ngram")
    assert status == 1
    assert said.count("of the answers are as without drafts") == 1
    assert "this engine, demo, drafts ngram, short prompts, 1 streams: 0% of the answers are as without drafts" in said


def test_a_pair_that_is_not_installed_is_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find(name: str, drafter: str) -> Pair:
        raise CheckpointError("`make smollm2` installs it")

    monkeypatch.setattr(peers, "find_pair", find)
    assert peers.main(["--pair", "smollm2", "--systems", "ours"]) == 0
    assert "- smollm2: `make smollm2` installs it" in capsys.readouterr().out


def test_a_stopped_benchmark_goes_on_where_it_stopped(judged: Judged, tmp_path: Path) -> None:
    """It is stopped in the midst of a round, and a line is cut off."""
    out, asked = tmp_path / "out", ("--drafts", "none", "--out", str(tmp_path / "out"))
    with pytest.raises(StopIteration):
        judged({"ours": [7], "transformers": [7, 7]}, *asked)
    runs = out / "peers-runs.jsonl"
    lines = runs.read_text().splitlines(keepends=True)
    assert len(lines) == 4
    runs.write_text("".join(lines) + lines[-1][:-9])
    status, said, sides = judged({"ours": [7, 7], "transformers": [7]}, *asked, "--resume")
    assert (status, set(sides)) == (0, {"ours", "transformers"})
    assert "Medians of 3 rounds" in said
    assert "| none | short | 1 | transformers | 6 | 1.00 (1.00 to 1.00) |" in said
    again, same, none = judged({"ours": [], "transformers": []}, *asked, "--resume")
    assert (again, same, none) == (0, said, {})
    assert len(runs.read_text().splitlines()) == 7


def test_a_benchmark_is_resumed_with_its_failures_and_only_as_it_was_asked(
    judged: Judged, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--drafts", "none", "--out", str(tmp_path))
    assert judged({"ours": [7] * 3, "transformers": [7, "no memory"]}, *asked)[0] == 1
    status, said, sides = judged({"ours": [], "transformers": []}, *asked, "--resume")
    assert (status, sides) == (1, {})
    assert said.count("1 streams: no memory") == 1
    for options, words in (
        ((*asked, "--resume", "--max-tokens", "3"), "something else (max_tokens 2 and now 3): give another --out"),
        (("--resume",), "--resume goes on with the runs in --out: name it"),
    ):
        with pytest.raises(SystemExit):
            judged({"ours": []}, *options)
        assert words in capsys.readouterr().err
    assert judged({"ours": [7] * 3}, *asked)[0] == 0, "without --resume it begins anew"
    assert len((tmp_path / "peers-runs.jsonl").read_text().splitlines()) == 4


def test_a_cell_that_has_had_its_time_ends_with_two_rounds_of_each(judged: Judged) -> None:
    status, said, _ = judged({"ours": [7] * 2, "transformers": [7] * 2}, "--drafts", "none", "--cell-minutes", "0.05")
    assert status == 0
    assert "Medians of 2 rounds" in said


def test_a_system_that_is_too_slow_is_left_out_of_a_cell(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 5))
    monkeypatch.setattr(peers.time, "perf_counter", lambda: next(clock))
    runs = {"ours": [7] * 3, "transformers": list[Any]()}
    assert judged({"ours": [7] * 3}, "--drafts", "none", "--answer-timeout", "15")[0] == 0
    status, said, _ = judged(runs, "--drafts", "none", "--streams", "1", "--answer-timeout", "14")
    assert status == 0
    assert "- transformers, demo, drafts none, short prompts, 1 streams: a run would take 15 s or more" in said


def test_quick_is_less_of_everything_and_options_win() -> None:
    def work(*options: str) -> peers.Work:
        return peers.work_of(peers.parser().parse_args(options))

    quick, whole = work("--quick"), work()
    assert (whole.streams, whole.kinds, whole.rounds, whole.max_tokens) == ((1, 8, 32), (SHORT, LONG), 5, 96)
    assert (quick.streams, quick.kinds, quick.rounds, quick.max_tokens) == ((1, 8), (SHORT,), 2, 32)
    assert work("--quick", "--streams", "32", "--prompts", "long").streams == (32,)
    assert work("--quick", "--prompts", "long").kinds == (LONG,)
    with pytest.raises(SystemExit):
        work("--systems", "ours,sglang")
    with pytest.raises(SystemExit):
        work("--streams", "0")


def test_disturbed_runs_are_said() -> None:
    results = Results()
    for others in (0.0, 0.5):
        results.add(CELL, "ours", replace(SAMPLE, others=others))
    settings = {"threads": 2, "processor": "Z", "tree": "1"}
    assert "In 1 of 2 runs other processes" in report.page(results, [], settings)
    assert "sample" not in report.page(results, [], settings)
    sampled = report.page(results, [], {**settings, "sampling": {"temperature": 0.8, "top_k": 40}})
    assert "All requests sample, with temperature 0.8, top_k 40. In 1" in sampled


def test_a_process_that_ends_or_hangs_says_so(tmp_path: Path) -> None:
    def side(code: str) -> Side:
        return Side([sys.executable, "-c", code], {}, tmp_path / "log", 0.1)

    ended = side("import sys; print('no such model', file=sys.stderr)")
    with pytest.raises(SideError, match="it has ended: no such model"):
        ended.ready(20)
    ended.close()
    told = side('print(\'{"error": "OSError: disk"}\', flush=True); input(); input()')
    with pytest.raises(SideError, match="OSError: disk"):
        told.ready(20)
    with pytest.raises(SideError, match="it has said nothing for 0 s"):
        told.run([[1]], 1, 1)
    told.close()


def test_the_client_of_servers_reads_events_cut_anywhere() -> None:
    parts = [(b'data: {"a": 1}\n\nda', 1.0), (b'ta: {"b": 2}\r\n', 2.0), (b"\r\n: ping\n\ndata: [DONE]\n\n", 3.0)]
    assert list(http_side.events(parts)) == [({"a": 1}, 1.0), ({"b": 2}, 3.0)]
    assert http_side.event_tokens({"choices": [{"token_ids": [1, 2]}, {"token_ids": None}]}, "openai") == [1, 2]
    assert http_side.event_tokens({"usage": {}, "choices": []}, "openai") == []
    assert http_side.event_tokens({"content": "a", "tokens": [5]}, "llama") == [5]
    last = {"content": "", "stop": True, "tokens_predicted": 9}
    assert http_side.event_tokens(last | {"tokens": [4]}, "llama", 6) == [4, http_side.LOST, http_side.LOST]
    assert http_side.event_tokens(last, "llama", 9) == []
    with pytest.raises(RuntimeError, match="the server answered"):
        http_side.event_tokens({"error": {"message": "no"}}, "llama")


def test_the_client_keeps_the_streams_of_a_server_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = [0, 0]
    all_streams = asyncio.Barrier(3)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (head := await reader.readline()).startswith(b"POST /v1/completions"):
            length = 0
            while line := (await reader.readline()).strip():
                length = int(line.split(b":")[1]) if line.startswith(b"content-length") else length
            body = json.loads(await reader.readexactly(length))
            at_once[0] += 1
            at_once[1] = max(at_once)
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            for token in (body["prompt"][0], body["max_tokens"]):
                event = b"data: " + json.dumps({"choices": [{"token_ids": [token]}]}).encode() + b"\n\n"
                writer.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
                if body["prompt"][0] < 3:
                    await asyncio.wait_for(all_streams.wait(), 20)
            at_once[0] -= 1
            writer.write(b"0\r\n\r\n")
        assert head == b""
        writer.close()

    async def whole() -> dict[str, Any]:
        server = await asyncio.start_server(answer, http_side.HOST, 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            settings = {"api": "openai", "model": "m", "path": "/v1/completions", "port": port}
            return await http_side._run(settings, [[n] for n in range(7)], 3, 9)

    found = asyncio.run(whole())
    assert found["outputs"] == [[n, 9] for n in range(7)]
    assert at_once == [0, 3]
    assert len(found["first_token_s"]) == len(found["gaps_s"]) == 7
    assert min(found["gaps_s"]) >= 0


def test_the_client_reads_an_answer_however_it_is_cut() -> None:
    whole = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\n\r\n\r\n0\r\n\r\n"
    received = [(whole[at : at + 1], float(at)) for at in range(len(whole))]
    first = whole.index(b"abc\r\n") + 4.0
    assert http_side.answer_parts(received) == [(b"abc", first), (b"\r\n", first + 7)]
    assert http_side.answer_parts([(whole, 1.0)]) == [(b"abc", 1.0), (b"\r\n", 1.0)]
    for end in range(1, 7):
        with pytest.raises(RuntimeError, match="in the midst of an answer"):
            http_side.answer_parts(received[: -4 - end])
    with pytest.raises(RuntimeError, match="closed the connection without an answer"):
        http_side.answer_parts([])
    error = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\n\r\nbusy"
    with pytest.raises(RuntimeError, match="the server answered HTTP/1.1 503 Service Unavailable busy"):
        http_side.answer_parts([(error[:-2], 0.0), (error[-2:], 1.0)])


@pytest.mark.parametrize("cut", [1, 5, 1000])
def test_the_client_sees_the_end_of_an_answer_that_keeps_its_connection(cut: int) -> None:
    async def ask(answer: bytes) -> list[tuple[bytes, float]]:
        asked = http_side._Answer(b"")
        asked.connection_made(Mock(spec=asyncio.Transport))
        for at in range(0, len(answer), cut):
            assert not asked.ended.done()
            asked.data_received(answer[at : at + cut])
        await asyncio.wait_for(asked.ended, 1)
        return asked.received

    head = b"HTTP/1.1 200 OK\r\n\r\n"
    received = asyncio.run(ask(head + b"4\r\n0\r\n\r\r\n0\r\n\r\n"))
    assert [part for part, _ in http_side.answer_parts(received)] == [b"0\r\n\r"]
    asyncio.run(ask(b"HTTP/1.1 400 Bad\r\ncontent-length: 5\r\n\r\nwrong"))


def test_a_server_that_does_not_start_is_quoted(tmp_path: Path) -> None:
    code = "import sys; sys.exit('no model here')"
    server = http_side.Server({"command": [sys.executable, "-c", code], "env": {}, "log": str(tmp_path / "log")})
    with pytest.raises(RuntimeError, match="the server ended with status 1: no model here"):
        server.wait("http://127.0.0.1:1/health", 20)
    server.stop()


def test_vllm_is_found_by_its_own_interpreter(tmp_path: Path) -> None:
    command = SYSTEMS["vllm"].command(context(tmp_path), find_pair("demo"), NONE)
    assert command[:3] == [f"{tmp_path}/peers/vllm/venv/bin/python", "-m", "benchmarks.peers.sides.vllm_side"]
    assert SYSTEMS["vllm"].environ(SimpleNamespace(cores=lambda: [0, 3]))["VLLM_CPU_OMP_THREADS_BIND"] == "0,3"  # type: ignore[arg-type]


def test_engines_without_draft_vocabularies_get_a_drafter_of_the_whole_one(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "config.json").write_text(json.dumps({"block_size": 8, "draft_vocab_size": 3}))
    layer, map_ = torch.ones(2, 2), torch.tensor([0, 4, 9])
    save_file({"norm.weight": layer, "d2t": map_}, own / "model.safetensors")
    found = whole_vocabulary(own, tmp_path / "folder")
    assert json.loads((found / "config.json").read_text()) == {"block_size": 8}
    assert list(load_file(found / "model.safetensors")) == ["norm.weight"]
    for tensors in ({"norm.weight": layer}, {"d2t": map_, "lm_head.weight": layer}):
        save_file(tensors, own / "model.safetensors")
        assert whole_vocabulary(own, tmp_path / "folder") == own
