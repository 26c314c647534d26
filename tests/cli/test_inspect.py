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
from tests.drafters.drafts import make_dflash2, make_dspark, make_eagle3
from tests.support.mxfp4_checkpoint import make_mxfp4_target
from tests.support.speculators_checkpoint import rewrite
from tests.support.tiny_models import make_draft, make_target

TARGET = asset_path("demo", "pair", "target")
DRAFT = asset_path("demo", "pair", "draft")
NORM, UP_PROJ = "model.norm.weight", "model.layers.2.mlp.up_proj.weight"


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A tiny target and a z-lab drafter for it, in folders that a test may break."""
    make_target(tmp_path / "target")
    make_draft(tmp_path / "draft")
    return tmp_path / "target", tmp_path / "draft"


@pytest.fixture
def inspected(cli):
    """What is found out about checkpoints."""

    def inspected(*argv: str | Path, status: int = 0) -> dict[str, Any]:
        ended = cli("inspect", *argv, "--json")
        assert ended.status == status
        return json.loads(ended.out)

    return inspected


def change(directory: Path, **fields: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_dflash2_drafter_is_described_with_what_is_its_own(inspected, pair: tuple[Path, Path]) -> None:
    target, draft = pair
    make_dflash2(draft)
    facts = inspected(target, "--draft", draft)["drafter"]["facts"]
    assert facts["convolutions"] == "2 taps, groups of 8 channels"
    assert facts["candidate selector"] == "the best 5 tokens of each position, edges of rank 6"
    assert facts["block"] == "8 places: the anchor and up to 7 drafts"


def test_an_eagle3_drafter_is_described_with_the_layers_that_it_reads_of_the_target(inspected, tmp_path: Path) -> None:
    make_target(tmp_path / "t", num_hidden_layers=8)
    make_eagle3(tmp_path / "d", eagle_aux_hidden_state_layer_ids=None)
    found = inspected(tmp_path / "t", "--draft", tmp_path / "d")
    facts = found["drafter"]["facts"]
    assert facts["features"] == "layer ids [1, 3, 4] of the target, which are boundary ids [2, 4, 5]"
    assert facts["drafting"] == "a token in each pass, from the output of the pass before"
    assert facts["speculative tokens"].startswith("3")
    assert "by default" in inspected(tmp_path / "d")["drafter"]["facts"]["features"]


def test_a_gpt_oss_target_is_described_with_its_sinks_windows_and_packed_experts(
    inspected, cli, tmp_path: Path
) -> None:
    model = make_mxfp4_target(tmp_path, num_hidden_layers=8)
    target = inspected(tmp_path)["target"]
    assert target["format"] == "GptOssForCausalLM"
    assert target["attention"]["sinks"] is True
    assert target["attention"]["sliding_windows"] == [9]
    facts = target["facts"]
    assert facts["attention"] == "window of 9 in 4 layers (0, 2, 4, ...), full in 4 layers (1, 3, 5, ...)"
    assert facts["attention sinks"] == "a learned logit of each query head"
    # 6 experts of 3 x 64 x 96 weights in 8 layers: 17 bytes for 32 of them, and 4 bytes each.
    assert facts["MXFP4"] == (
        "experts of 0.4 MiB on disk stay so on a GPU, whose products read codes, and are 3.4 MiB of float32 in memory "
        "on a CPU"
    )
    assert target["weights"]["num_parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert "sliding window 9, sinks, head size" in cli("inspect", tmp_path).out


def test_layers_with_a_window_keep_few_blocks_of_a_request(inspected, cli, tmp_path: Path) -> None:
    make_target(tmp_path / "t", architecture="GptOssForCausalLM", num_hidden_layers=8)
    make_draft(tmp_path / "d", num_target_layers=8)
    alone = inspected(tmp_path / "t")["target"]
    kv = alone["kv_cache"]
    windows = kv["layers_with_a_window"]
    # Half of the layers; a window of 9 with 2 positions of the last row, and the ends of both.
    half = kv["bytes_per_token"] // 2
    assert windows == {"window": 9, "num_layers": 4, "bytes_per_token": half, "blocks_per_request": 3}
    blocks = -(-kv["request_tokens"] // 16)
    assert kv["request_bytes_in_one_table"] == blocks * kv["bytes_per_block"]
    assert kv["request_bytes"] == (blocks + 3) * 16 * half
    in_fp8 = alone["kv_cache_fp8"]
    assert in_fp8["request_bytes"] * kv["bytes_per_token"] == kv["request_bytes"] * in_fp8["bytes_per_token"]

    both = inspected(tmp_path / "t", "--draft", tmp_path / "d")
    with_drafts = both["target"]["kv_cache"]
    k = both["pair"]["num_speculative_tokens"]
    assert with_drafts["layers_with_a_window"]["blocks_per_request"] == -(-(8 + 2 * k + 2) // 16) + 2
    drafter = both["drafter"]["kv_cache"]
    assert drafter["layers_with_a_window"] is None
    assert drafter["request_tokens"] == kv["request_tokens"]
    assert both["pair"]["kv_request_bytes"] == with_drafts["request_bytes"] + drafter["request_bytes"]
    assert (
        f"4 layers with a window of at most 9, of which a request keeps {3} blocks"
        in cli("inspect", tmp_path / "t").out
    )


def test_the_kv_in_fp8_has_scales_and_is_the_targets_alone(inspected) -> None:
    data = inspected(TARGET, "--draft", DRAFT)
    target, in_fp8 = data["target"]["kv_cache"], data["target"]["kv_cache_fp8"]
    # In each of 8 layers K and V of 2 heads: 32 bytes and a scale.
    assert in_fp8["bytes_per_token"] == 8 * 2 * 2 * (32 + 4)
    assert in_fp8["request_bytes"] == 4096 * in_fp8["bytes_per_token"] < target["request_bytes"]
    drafter = data["drafter"]
    assert drafter["kv_cache_fp8"] is None
    own = in_fp8["bytes_per_block"] + drafter["kv_cache"]["bytes_per_block"]
    assert data["pair"]["fp8"]["kv_bytes_per_block"] == own < data["pair"]["kv_bytes_per_block"]


def test_a_dspark_drafter_is_described_with_what_is_its_own(inspected, pair: tuple[Path, Path]) -> None:
    target, draft = pair
    make_dspark(draft, kind="gated")
    drafter = inspected(target, "--draft", draft)["drafter"]
    assert drafter["format"] == "deepspec"
    assert drafter["facts"]["Markov head"] == "gated, of rank 6"
    assert drafter["facts"]["confidence head"] == "reads the output and the token before"
    assert drafter["facts"]["block"] == "8 places, each of which gives a draft, the anchor's the first"


def test_a_target_is_described_with_what_it_needs(inspected) -> None:
    target = inspected(TARGET)["target"]
    assert target["format"] == "Qwen3ForCausalLM"
    assert target["facts"]["layers"] == "8"
    assert target["weights"]["num_parameters"] == 2_215_072
    assert target["weights"]["num_bytes"] == 2 * 2_215_072
    assert set(target["weights"]["dtypes"]) == {"BF16"}
    # 8 layers, K and V, 2 heads of size 32, 2 bytes each.
    assert target["kv_cache"]["bytes_per_token"] == 8 * 2 * 2 * 32 * 2
    assert target["kv_cache"]["bytes_per_block"] == 16 * target["kv_cache"]["bytes_per_token"]
    attention = target["attention"]
    assert (attention["causal"], attention["non_causal"], attention["head_size"]) == (True, False, 32)
    assert attention["backends"]["torch"] == {"would_do": True, "lacks": []}


def test_a_zlab_drafter_says_how_its_layers_were_read_and_whose_it_is(inspected) -> None:
    draft = inspected(DRAFT)["drafter"]
    assert draft["format"] == "z-lab"
    assert "layer ids [1, 3, 5]" in draft["facts"]["features"]
    assert "boundary ids [2, 4, 6]" in draft["facts"]["features"]
    assert "8 layers" in draft["facts"]["made for"]
    assert (draft["attention"]["causal"], draft["attention"]["non_causal"]) == (False, True)


def test_a_speculators_drafter_names_its_target_and_its_draft_vocabulary(inspected, tmp_path: Path) -> None:
    folder = rewrite(DRAFT, TARGET, tmp_path / "drafter", kept=range(0, 1536, 8), num_speculative_tokens=7)
    draft = inspected(folder)["drafter"]
    assert draft["format"] == "speculators"
    assert str(TARGET) in draft["facts"]["made for"]
    assert "192 of 1536" in draft["facts"]["vocabulary"]
    assert "I64" in draft["weights"]["dtypes"]
    assert "BOOL" not in draft["weights"]["dtypes"]
    assert inspected(TARGET, "--draft", folder)["pair"]["num_speculative_tokens"] == 7


def test_a_pair_that_fits_has_k_and_the_kv_of_both(inspected) -> None:
    data = inspected(TARGET, "--draft", DRAFT)
    assert (data["pair"]["fits"], data["pair"]["num_speculative_tokens"]) == (True, 15)
    parts = [data[kind]["kv_cache"]["bytes_per_token"] for kind in ("target", "drafter")]
    assert data["pair"]["kv_bytes_per_token"] == sum(parts)


def test_a_drafter_that_reaches_less_far_than_its_target_is_said(cli, inspected, pair: tuple[Path, Path]) -> None:
    target, draft = pair
    assert inspected(target, "--draft", draft)["pair"]["warning"] is None
    change(draft, max_position_embeddings=256)
    warning = inspected(target, "--draft", draft)["pair"]["warning"]
    assert "addresses 256 positions" in warning
    assert f"  warning                 {warning}\n" in cli("inspect", target, "--draft", draft).out


def test_a_drafter_without_a_checkpoint_has_facts_alone(cli, inspected) -> None:
    data = inspected(TARGET, "--draft", "ngram")
    assert (data["pair"]["fits"], data["pair"]["num_speculative_tokens"]) == (True, 5)
    assert data["pair"]["kv_bytes_per_token"] == data["target"]["kv_cache"]["bytes_per_token"]
    assert data["drafter"].keys() == {"method", "facts"}
    text = cli("inspect", TARGET, "--draft", "ngram").out
    for name, value in data["drafter"]["facts"].items():
        assert f"  {name.ljust(24)}{value}\n" in text
    assert "n-grams of 2 to 5 tokens" in data["drafter"]["facts"]["n-grams"]


def test_checkpoints_of_the_hub_are_of_the_revisions_that_are_given(inspected, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def from_hub(name: str, setting: str, revision: str, *more: Any) -> Path:
        asked.append((name, revision))
        return TARGET if "target" in name else DRAFT

    monkeypatch.setattr("dflash_backend.checkpoints.find.from_hub", from_hub)
    both = ["a/target", "--revision", "v1", "--draft", "a/draft", "--draft-revision", "v2"]
    assert inspected(*both)["pair"]["fits"] is True
    assert inspected("a/draft", "--revision", "v3")["drafter"]["format"] == "z-lab"
    assert inspected("a/target").keys() >= {"target"}
    assert asked == [("a/target", "v1"), ("a/draft", "v2"), ("a/draft", "v3"), ("a/target", "")]


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        ([TARGET, "--revision", "v1"], 1, "which has no revision 'v1'; only a model of the hub has some"),
        ([DRAFT / "config.json", "--revision", "v1"], 1, "a file, which has no revision 'v1'; only a model of the hub"),
        ([TARGET, "--draft", DRAFT, "--draft-revision", "v1"], 1, "--draft is"),
        ([TARGET, "--draft", "ngram", "--draft-revision", "v1"], 1, "draft_model is ngram, which has no checkpoint"),
        ([DRAFT, "--draft-revision", "v1"], 2, "of one alone it is --revision"),
    ],
)
def test_what_has_no_revision_is_refused_with_one(cli, argv: list[Any], status: int, words: str) -> None:
    ended = cli("inspect", *argv)
    assert (ended.status, ended.out) == (status, "")
    assert words in ended.err


def test_a_pair_that_does_not_fit_is_shown_and_ends_with_1(cli, inspected, pair: tuple[Path, Path]) -> None:
    argv = [TARGET, "--draft", pair[1]]
    status, out, err = cli("inspect", *argv)
    assert status == 1
    assert "fit together            no: " in out
    assert err == f"dflash-triton: {out.partition('no: ')[2].splitlines()[0]}\n"
    assert "made for 5 target layers, the target has 8" in err
    assert inspected(*argv, status=1)["pair"]["fits"] is False


def test_the_text_says_what_the_json_does(cli, inspected) -> None:
    data = inspected(TARGET, "--draft", DRAFT)
    status, text, _ = cli("inspect", TARGET, "--draft", DRAFT)
    assert status == 0
    for kind in ("target", "drafter"):
        for name, value in list(data[kind]["facts"].items())[1:]:
            assert f"  {name.ljust(24)}{value}\n" in text
    assert "2.0 KiB a token, 32.0 KiB a block of 16, in bfloat16" in text
    assert "speculative tokens (k)  15" in text


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen3MoeForCausalLM"])
def test_other_families_are_checked_against_their_own_tensors(inspected, architecture: str, tmp_path: Path) -> None:
    model = make_target(tmp_path, architecture=architecture)
    data = inspected(tmp_path)["target"]
    assert data["format"] == architecture
    assert data["weights"]["num_parameters"] == sum(parameter.numel() for parameter in model.parameters())


def change_tensors(directory: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of a checkpoint, or take those away that are None."""
    tensors = load_file(directory / "model.safetensors") | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, directory / "model.safetensors")


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
        (
            lambda folder: change_tensors(folder, **{NORM: torch.ones(31)}),
            f"tensor '{NORM}' has shape [31]; config.json asks for [32]",
        ),
        (lambda folder: change_tensors(folder, **{UP_PROJ: None}), f"tensor '{UP_PROJ}' is missing"),
        (truncate, "truncated or damaged"),
        (lambda folder: shutil.rmtree(folder), "there is no such directory"),
    ],
)
def test_a_broken_checkpoint_is_one_sentence_and_1(cli, spoil: Any, words: str, pair: tuple[Path, Path]) -> None:
    spoil(pair[0])
    status, out, err = cli("inspect", pair[0])
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert words in err
    assert str(pair[0]) in err


def test_a_broken_drafter_and_one_in_the_place_of_the_target_are_refused_too(cli, pair: tuple[Path, Path]) -> None:
    change(pair[1], num_attention_heads=2)
    for argv, words in (
        ([pair[1]], "tensor 'layers.0.self_attn."),
        ([DRAFT, "--draft", DRAFT], "is a drafter; give the target first and the drafter with --draft"),
        ([TARGET, "--draft", TARGET], "DFlashDraftModel"),
    ):
        ended = cli("inspect", *argv)
        assert ended.status == 1
        assert words in ended.err


def test_published_drafters_are_listed_and_named_for_their_target(cli, inspected, tmp_path: Path) -> None:
    listed = cli("inspect", "--list")
    assert listed.status == 0
    assert "Qwen/Qwen3-8B (Qwen3)\n  z-lab/Qwen3-8B-DFlash-b16 " in listed.out
    assert listed.out.count("supported") >= 54
    few = cli("inspect", "--list", "peagle", "--json")
    assert [(each["drafter"], each["supported"]) for each in json.loads(few.out)] == [
        ("RedHatAI/Qwen3-8B-speculator.peagle", False)
    ]
    assert json.loads(few.out)[0]["reason"] == "P-EAGLE drafters are not supported"
    make_target(tmp_path / "t")
    change(tmp_path / "t", _name_or_path="Qwen/Qwen3-4B")
    assert inspected(tmp_path / "t")["published_drafters"][0] == "z-lab/Qwen3-4B-DFlash-b16"
    text = cli("inspect", tmp_path / "t").out
    assert "published drafters for it\n  z-lab/Qwen3-4B-DFlash-b16\n" in text


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        ([], 2, "takes one DIR|ID, a model directory or hub id, or --list"),
        (["x", "--list"], 2, "takes one DIR|ID, a model directory or hub id, or --list"),
        (["--list", "--draft", "x"], 2, "takes no --draft"),
        (["--list", "--revision", "x"], 2, "takes no --revision"),
        (["--list", "no such model"], 1, "no published drafter is known for 'no such model'"),
    ],
)
def test_a_list_that_cannot_be_shown_is_refused(cli, argv: list[str], status: int, words: str) -> None:
    ended = cli("inspect", *argv)
    assert (ended.status, ended.out) == (status, "")
    assert words in ended.err
