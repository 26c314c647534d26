"""`dflash-triton inspect`: what a checkpoint is and needs, whether two fit, and what is wrong with a broken one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_backend.config import asset_path
from dflash_cli.main import main
from tests.speculators_checkpoint import rewrite
from tests.tiny_models import make_draft, make_target

TARGET = asset_path("demo", "pair", "target")
DRAFT = asset_path("demo", "pair", "draft")


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A tiny target and a z-lab drafter for it, in folders that a test may break."""
    make_target(tmp_path / "target")
    make_draft(tmp_path / "draft")
    return tmp_path / "target", tmp_path / "draft"


def inspected(capsys: pytest.CaptureFixture[str], *argv: str | Path, status: int = 0) -> dict[str, Any]:
    assert main(["inspect", *map(str, argv), "--json"]) == status
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def change(directory: Path, **fields: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_target_is_described_with_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    target = inspected(capsys, TARGET)["target"]
    assert target["format"] == "Qwen3ForCausalLM"
    assert target["facts"]["layers"] == "8"
    assert target["weights"]["num_parameters"] == 2_133_152
    assert target["weights"]["num_bytes"] == 2 * 2_133_152
    assert set(target["weights"]["dtypes"]) == {"BF16"}
    # 8 layers, K and V, 2 heads of size 32, 2 bytes each.
    assert target["kv_cache"]["bytes_per_token"] == 8 * 2 * 2 * 32 * 2
    assert target["kv_cache"]["bytes_per_block"] == 16 * target["kv_cache"]["bytes_per_token"]
    attention = target["attention"]
    assert (attention["causal"], attention["non_causal"], attention["head_size"]) == (True, False, 32)
    assert attention["backends"]["torch"] == {"would_do": True, "lacks": []}


def test_a_zlab_drafter_says_how_its_layers_were_read_and_whose_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    draft = inspected(capsys, DRAFT)["drafter"]
    assert draft["format"] == "z-lab"
    assert "layer ids [1, 3, 5]" in draft["facts"]["features"]
    assert "boundary ids [2, 4, 6]" in draft["facts"]["features"]
    assert "8 layers" in draft["facts"]["made for"]
    assert (draft["attention"]["causal"], draft["attention"]["non_causal"]) == (False, True)


def test_a_speculators_drafter_names_its_target_and_its_draft_vocabulary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = rewrite(DRAFT, TARGET, tmp_path / "drafter", kept=range(0, 1024, 8), num_speculative_tokens=7)
    draft = inspected(capsys, folder)["drafter"]
    assert draft["format"] == "speculators"
    assert str(TARGET) in draft["facts"]["made for"]
    assert "128 of 1024" in draft["facts"]["vocabulary"]
    assert "I64" in draft["weights"]["dtypes"]
    assert "BOOL" not in draft["weights"]["dtypes"]
    assert inspected(capsys, TARGET, "--draft", folder)["pair"]["num_speculative_tokens"] == 7


def test_a_pair_that_fits_has_k_and_the_kv_of_both(capsys: pytest.CaptureFixture[str]) -> None:
    data = inspected(capsys, TARGET, "--draft", DRAFT)
    assert (data["pair"]["fits"], data["pair"]["num_speculative_tokens"]) == (True, 15)
    parts = [data[kind]["kv_cache"]["bytes_per_token"] for kind in ("target", "drafter")]
    assert data["pair"]["kv_bytes_per_token"] == sum(parts)


def test_a_pair_that_does_not_fit_is_shown_and_ends_with_1(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["inspect", str(TARGET), "--draft", str(pair[1])]
    assert main(argv) == 1
    out, err = capsys.readouterr()
    assert "fit together            no: " in out
    assert err == f"dflash-triton: {out.partition('no: ')[2].splitlines()[0]}\n"
    assert "made for 5 target layers, the target has 8" in err
    assert inspected(capsys, *argv[1:], status=1)["pair"]["fits"] is False


def test_the_text_says_what_the_json_does(capsys: pytest.CaptureFixture[str]) -> None:
    data = inspected(capsys, TARGET, "--draft", DRAFT)
    assert main(["inspect", str(TARGET), "--draft", str(DRAFT)]) == 0
    text = capsys.readouterr().out
    for kind in ("target", "drafter"):
        for name, value in list(data[kind]["facts"].items())[1:]:
            assert f"  {name.ljust(24)}{value}\n" in text
    assert "2.0 KiB a token, 32.0 KiB a block of 16, in bfloat16" in text
    assert "speculative tokens (k)  15" in text


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen3MoeForCausalLM"])
def test_other_families_are_checked_against_their_own_tensors(
    architecture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_target(tmp_path, architecture=architecture)
    data = inspected(capsys, tmp_path)["target"]
    assert data["format"] == architecture
    assert data["weights"]["num_parameters"] == sum(parameter.numel() for parameter in model.parameters())


def break_shape(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(31)
    save_file(tensors, directory / "model.safetensors")


def lose_tensor(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, directory / "model.safetensors")


def truncate(directory: Path) -> None:
    data = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(data[:-100])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json does not exist"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is not valid JSON"),
        (lambda folder: change(folder, architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel"),
        (lambda folder: change(folder, hidden_size=None), "field 'hidden_size' is missing"),
        (lambda folder: change(folder, intermediate_size=50), "mlp.down_proj.weight' has shape [32, 48]"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no .safetensors file"),
        (break_shape, "tensor 'model.norm.weight' has shape [31]; config.json asks for [32]"),
        (lose_tensor, "tensor 'model.layers.2.mlp.up_proj.weight' is missing"),
        (truncate, "truncated or damaged"),
        (lambda folder: shutil.rmtree(folder), "there is no such directory"),
    ],
)
def test_a_broken_checkpoint_is_one_sentence_and_1(
    spoil: Any, words: str, pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(pair[0])
    assert main(["inspect", str(pair[0])]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err
    assert str(pair[0]) in err


def test_a_broken_drafter_is_refused_too(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    change(pair[1], num_attention_heads=2)
    assert main(["inspect", str(pair[1])]) == 1
    assert "tensor 'layers.0.self_attn." in capsys.readouterr().err


def test_a_drafter_in_the_place_of_the_target_says_the_right_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(DRAFT), "--draft", str(DRAFT)]) == 1
    assert "is a drafter; give the target first and the drafter with --draft" in capsys.readouterr().err
    assert main(["inspect", str(TARGET), "--draft", str(TARGET)]) == 1
    assert "DFlashDraftModel" in capsys.readouterr().err


def test_no_checkpoint_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["inspect"])
    assert ended.value.code == 2
    assert "DIR|ID" in capsys.readouterr().err
