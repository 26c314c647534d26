"""The arithmetic and the commands of `benchmarks.compare_trees`; a run of it needs a second checkout."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import compare_trees
from benchmarks.compare_trees import Tree, cpu_seconds, parse_tree, ratios, report, run_rounds, serve_command
from benchmarks.measure import Measurement

PORTS = {"--http-port": 1, "--grpc-port": 2, "--metrics-port": 3}


def checkout(folder: Path) -> Path:
    program = folder / ".venv" / "bin" / "dflash-triton"
    program.parent.mkdir(parents=True)
    program.touch()
    return folder


def test_a_tree_is_a_name_a_folder_and_settings(tmp_path: Path) -> None:
    tree = parse_tree(f"fixed={checkout(tmp_path)}:adaptive_speculation=false,max_num_seqs=4")
    assert (tree.name, tree.folder) == ("fixed", tmp_path)
    assert tree.settings == ["adaptive_speculation=false", "max_num_seqs=4"]
    assert parse_tree(f"plain={tmp_path}").settings == []


@pytest.mark.parametrize("text", ["folder", "=folder", "name=", "name=:a=b"])
def test_what_is_no_tree_is_said(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not NAME=FOLDER"):
        parse_tree(text)


def test_a_folder_that_is_not_set_up_is_said(tmp_path: Path) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="run `make setup`"):
        parse_tree(f"old={tmp_path}")


def test_each_server_has_the_settings_and_old_ones_no_openai_port(tmp_path: Path) -> None:
    tree = parse_tree(f"fixed={checkout(tmp_path)}:adaptive_speculation=false")
    command = serve_command(tree, ["smollm2", "drafter"], PORTS, takes_openai_port=True)
    assert command[1:6] == ["serve", "--target", "smollm2", "--draft", "drafter"]
    assert command[0] == str(tree.program)
    assert command[command.index("--set") + 1] == "adaptive_speculation=false"
    assert command[command.index("--openai-port") + 1] == "0"
    assert command[command.index("--grpc-port") + 1] == "2"
    alone = serve_command(tree, ["smollm2"], PORTS, takes_openai_port=False)
    assert not {"--openai-port", "--draft"} & set(alone)


def test_ratios_are_of_each_round_and_less_processor_time_is_a_larger_ratio() -> None:
    first = Tree("before", Path("."), [], "", None, [10.0, 20.0, 40.0], [1.0, 1.0, 1.0], [0.010, 0.020, 0.030])
    first.between_s = [0.01] * 100 + [0.5] * 100
    second = Tree("after", Path("."), [], "", None, [20.0, 20.0, 60.0], [0.5, 0.5, 0.5], [0.009, 0.016, 0.030])
    assert ratios(second, first) == [2.0, 1.0, 1.5]
    table = report([first, second])
    same = "1.000 (1.000 to 1.000)"
    assert f"| before | 20 | {same} | {same} | 20.0 ms | {same} | 500.0 ms |" in table
    latency = "16.0 ms | 0.900 (0.800 to 1.000)"
    assert f"| after | 20 | 1.500 (1.000 to 2.000) | 2.000 (2.000 to 2.000) | {latency} | - |" in table


def test_rounds_whose_tokens_differ_are_counted_and_each_tree_has_its_turn_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trees, order = [Tree("before", Path("."), []), Tree("after", Path("."), [])], []

    def measure(tree: Tree, prompts: list[list[int]], streams: int, max_tokens: int) -> Measurement:
        order.append(tree.name)
        tree.tokens_per_s.append(1.0)
        differs = tree.name == "after" and prompts[0] == [2]
        return Measurement(tree.name, streams, 1.0, outputs={0: [8 if differs else 7]})

    monkeypatch.setattr(compare_trees, "measure", measure)
    args = argparse.Namespace(prompts=2, streams=1, max_tokens=4, rounds=3)
    assert run_rounds(trees, [[0], [1], [2], [3], [4], [5]], args) == 1
    warm_up = 2 * compare_trees.WARM_UP_ROUNDS
    assert order[warm_up:] == ["before", "after", "after", "before", "before", "after"]
    assert [len(tree.tokens_per_s) for tree in trees] == [3, 3]


def test_processor_time_is_that_of_a_server_and_its_children() -> None:
    work = "end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    burn = f"import time\n{work}\nprint(flush=True)\ninput()"
    outer = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn!r}])"
    process = compare_trees.psutil.Popen(
        [sys.executable, "-c", outer], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        process.stdout.readline()
        assert cpu_seconds(process) >= 0.3
    finally:
        process.communicate("\n", timeout=30)


def test_a_server_that_ends_at_its_start_is_an_error_with_its_log(tmp_path: Path) -> None:
    program = checkout(tmp_path) / ".venv" / "bin" / "dflash-triton"
    program.write_text("#!/bin/sh\necho no such setting\nexit 2\n")
    program.chmod(0o755)
    tree = parse_tree(f"old={tmp_path}")
    with (
        pytest.raises(RuntimeError, match="old did not come up:\nno such setting"),
        compare_trees.serving(tree, ["target"], tmp_path),
    ):
        pass
