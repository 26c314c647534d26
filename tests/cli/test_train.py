"""`dflash-triton train`: what its options ask for, and what is wrong is one sentence and a status."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from dflash_backend.training import run as run_module
from dflash_backend.training.data import DataOptions
from dflash_backend.training.errors import TrainingError
from dflash_backend.training.run import TrainOptions

STOPPED = "stopped; what was done is in out, and the same command goes on from there"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options of each run, none of which runs."""
    found: list[Any] = []

    def train(options: TrainOptions, say: Any, report: Any) -> dict[str, Any]:
        found.append(options)
        return {"kind": "dflash", "acceptance_length": 2.345, "held_out": 7}

    monkeypatch.setattr(run_module, "train", train)
    return found


def test_options_become_what_is_asked_of_a_run(cli, asked: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    ended = cli(
        "train", "some/target", "--out", "out", "--data", str(file), "--tokens", "99", "--temperature", "0.5",
        "--kind", "dspark", "--format", "speculators", "--layers", "2", "--layer-ids", "5,1", "--block-size", "12",
        "--intermediate-size", "70", "--mask-token", "3", "--draft-vocab", "50", "--share-head", "--minutes", "2.5",
        "--accumulate", "3", "--decay", "1.5", "--soft-labels", "0.5", "--hidden-loss", "2", "--float32",
        "--set", "max_num_seqs=4", "--chat-template-kwargs", '{"enable_thinking": false}', "--seed", "8",
    )  # fmt: skip
    assert (ended.status, ended.err) == (0, "")
    assert ended.out == (
        "out: a dflash drafter, acceptance length 2.35 on 7 held-out prompts; "
        "dflash-triton serve some/target --draft out\n"
    )
    data = DataOptions(99, temperature=0.5, seed=8, files=(file,), template_options={"enable_thinking": False})
    sizes = {"draft_layers": 2, "target_layer_ids": (1, 5), "block_size": 12, "mask_token_id": 3}
    sizes["intermediate_size"] = 70
    assert asked == [
        TrainOptions(
            "some/target", Path("out"), data, kind="dspark", form="speculators", minutes=2.5, accumulate=3,
            draft_vocab=50, share_head=True, decay=1.5, soft_labels=0.5, hidden_loss=2.0, bf16=False, drafter=sizes,
            settings={"max_num_seqs": "4"},
        )
    ]  # fmt: skip


def test_recorded_traffic_is_data(cli, asked: list[Any], tmp_path: Path) -> None:
    assert cli("train", "t", "--out", "out", "--traffic", str(tmp_path)).status == 0
    assert asked[0].data == DataOptions(500_000, temperature=-1.0, traffic=tmp_path)


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        (["--kind", "medusa"], 2, "'medusa'"),
        (["--data", "a", "--traffic", "b"], 2, "argument --traffic: not allowed with argument --data"),
        (["--tokens", "0"], 2, "'0'"),
        (["--minutes", "-1"], 2, "'-1'"),
        (["--layer-ids", "1,x"], 1, "--layer-ids is '1,x'; expected numbers, such as 1,5,9"),
        (["--chat-template-kwargs", "[1]"], 2, "[1]"),
    ],
)
def test_what_is_wrong_is_said(cli, asked: list[Any], argv: list[str], status: int, words: str) -> None:
    ended = cli("train", "some/target", "--out", "out", *argv)
    assert ended.status == status
    assert words in ended.err
    assert asked == []


def test_sigterm_ends_a_run_that_a_shell_has_in_the_background(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Ctrl-C is ignored."""

    def train(*_: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("it went on")

    monkeypatch.setattr(run_module, "train", train)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        ended = cli("train", "t", "--out", "out")
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert (ended.status, ended.err) == (130, f"dflash-triton: {STOPPED}\n")


def test_a_run_that_is_stopped_or_fails_says_how_to_go_on(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(error: BaseException) -> None:
        def train(*_: Any) -> None:
            raise error

        monkeypatch.setattr(run_module, "train", train)

    ends(KeyboardInterrupt())
    ended = cli("train", "t", "--out", "out")
    assert (ended.status, ended.err) == (130, f"dflash-triton: {STOPPED}\n")
    ends(TrainingError("the disk is full"))
    ended = cli("train", "t", "--out", "out")
    assert (ended.status, ended.err) == (1, "dflash-triton: the disk is full\n")
