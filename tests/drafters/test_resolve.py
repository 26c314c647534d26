"""Settings lead to a pair: a speculators drafter is enough by itself, and a pair that does not fit is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from dflash_backend.checkpoints import CheckpointError, find_model
from dflash_backend.config import EngineConfig, asset_path
from dflash_backend.drafters.dflash.config import DFlashSpec
from dflash_backend.drafters.registry import read_draft
from dflash_backend.drafters.resolve import ModelPair, find_drafter, resolve_dirs, resolve_pair, resolve_target_dir
from tests.drafters.drafts import edit, make_speculators, put
from tests.support.tiny_models import make_draft, make_target


def config(**settings: Any) -> EngineConfig:
    return EngineConfig.from_values({name: str(value) for name, value in settings.items()})


def resolve(**settings: Any) -> ModelPair:
    return resolve_pair(config(**settings))


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A target `t`, its z-lab drafter `z`, and a speculators drafter `s` that does not name it."""
    make_target(tmp_path / "t")
    make_draft(tmp_path / "z")
    make_speculators(tmp_path / "s")
    return tmp_path


def test_the_drafter_that_comes_with_a_model_has_its_name(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_backend.checkpoints.find.named_file", lambda name: models / f"{name}.gguf")
    monkeypatch.setattr("dflash_backend.checkpoints.find._converted", lambda path, report: models / "t")
    for draft, expected in (
        ("smollm2", asset_path("demo", "smollm2")),
        ("", None),
        ("ngram", None),
        (str(models / "z"), models / "z"),
    ):
        found = resolve_dirs(EngineConfig(target_model="smollm2", draft_model=draft))
        assert (found.target, found.draft, found.warning) == (models / "t", expected, None)
    assert find_drafter("smollm2", "--draft") == asset_path("demo", "smollm2")
    plain = resolve_dirs(EngineConfig(target_model="smollm2"))
    assert plain.draft is None
    assert plain.warning is not None
    spec = read_draft(asset_path("demo", "smollm2"))
    assert isinstance(spec, DFlashSpec)
    assert (spec.vocab_size, spec.decoder.hidden_size) == (49152, 576)


def name_verifier(models: Path, name: str | None) -> None:
    edit(
        models / "s" / "config.json",
        lambda data: data["speculators_config"].update(verifier={"name_or_path": name}),
    )


@pytest.mark.parametrize("setting", ["target_model", "draft_model"])
@pytest.mark.parametrize("how", ["absolute", "relative"])
def test_a_speculators_drafter_alone_is_enough(models: Path, setting: str, how: str) -> None:
    name_verifier(models, str(models / "t") if how == "absolute" else "../t")
    settings = config(**{setting: models / "s"})
    pair = resolve_pair(settings)
    assert pair.target.path.resolve() == (models / "t").resolve() == resolve_target_dir(settings).resolve()
    assert pair.draft is not None
    assert (pair.draft.format, pair.num_speculative_tokens) == ("speculators", 5)


def test_a_verifier_may_be_a_hub_id(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def snapshot(name: str, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((name, set(allow_patterns)))
        return str(models / "t")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    name_verifier(models, "example/target")
    assert resolve(target_model=models / "s").target.path == models / "t"
    ((name, patterns),) = asked
    assert name == "example/target"
    assert patterns >= {"*.json", "*.safetensors", "*.jinja", "mask_embedding.pt"}
    assert not patterns & {"*.bin", "*.pt", "*.py"}


def test_an_explicit_target_wins_over_the_one_that_the_drafter_names(models: Path) -> None:
    name_verifier(models, "/no/such/model")
    pair = resolve(target_model=models / "t", draft_model=models / "s")
    assert pair.target.path == models / "t"
    assert pair.draft is not None


def test_a_speculators_drafter_without_drafting_serves_its_target_alone(models: Path) -> None:
    name_verifier(models, "../t")
    pair = resolve(target_model=models / "s", draft_model="")
    assert (pair.draft, pair.target.architecture) == (None, "Qwen3ForCausalLM")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (None, "name_or_path is missing.*set target_model"),
        ("", "name_or_path is missing.*set target_model"),
        (".", "the drafter itself"),
        ("../nowhere/at/all", "no such directory"),
    ],
)
def test_a_verifier_that_leads_nowhere_is_named_with_its_file(models: Path, name: str | None, expected: str) -> None:
    name_verifier(models, name)
    with pytest.raises(CheckpointError, match=expected) as caught:
        resolve(target_model=models / "s")
    assert str(models / "s" / "config.json") in str(caught.value)


def test_a_zlab_drafter_alone_does_not_say_its_target(models: Path) -> None:
    with pytest.raises(CheckpointError, match="does not say its target; set target_model"):
        resolve(target_model=models / "z")


def test_a_drafter_for_target_and_another_for_draft_is_a_mistake(models: Path) -> None:
    with pytest.raises(CheckpointError, match="target_model is .*/s', which is a drafter, and draft_model is"):
        resolve(target_model=models / "s", draft_model=models / "z")


def test_a_zlab_drafter_without_a_target_is_tried_with_the_demo_target(models: Path) -> None:
    assert resolve_target_dir(config(draft_model=models / "z")) == asset_path("demo", "pair", "target")


@pytest.mark.parametrize(("k", "expected"), [(1, 1), (7, 7), ("auto", 5)])
def test_k_may_be_any_number_that_the_block_can_hold(models: Path, k: Any, expected: int) -> None:
    pair = resolve(target_model=models / "t", draft_model=models / "s", num_speculative_tokens=k)
    assert pair.num_speculative_tokens == expected


def test_k_past_the_block_is_refused_with_the_reason(models: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is 8; .*blocks of 8, so at most 7 are possible: the anchor takes one"):
        resolve(target_model=models / "t", draft_model=models / "s", num_speculative_tokens=8)


def layer(**fields: Any) -> Any:
    return lambda models: edit(models / "s" / "config.json", lambda d: d["transformer_layer_config"].update(fields))


def top(**fields: Any) -> Any:
    return lambda models: put(models / "s" / "config.json", **fields)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (top(aux_hidden_state_layer_ids=[1, 6]), r"boundary ids \[1, 6\], the target of 5 layers has 1 to 5"),
        (top(target_hidden_size=48), "target_hidden_size is 48, the target's is 32"),
        (layer(hidden_size=64), "hidden_size is 64, the target's is 32"),
        (layer(vocab_size=96), "vocab_size is 96, the target's is 97"),
        (top(draft_vocab_size=98), "draft_vocab_size is 98, more than the target's 97 tokens"),
        (top(mask_token_id=97), "mask_token_id is 97, the target's vocabulary has 97 tokens"),
    ],
)
def test_a_drafter_made_for_another_target_is_refused_with_both_numbers(
    models: Path, change: Any, expected: str
) -> None:
    change(models)
    with pytest.raises(CheckpointError, match=expected) as caught:
        resolve(target_model=models / "t", draft_model=models / "s")
    assert str(models / "s") in str(caught.value)
    assert str(models / "t") in str(caught.value)


def test_the_last_boundary_id_is_the_last_layer(models: Path) -> None:
    put(models / "s" / "config.json", aux_hidden_state_layer_ids=[1, 5])
    draft = resolve(target_model=models / "t", draft_model=models / "s").draft
    assert draft is not None
    assert draft.target_layer_ids == (0, 4)


def test_a_drafter_of_another_width_needs_its_own_embedding_and_head(models: Path) -> None:
    change = layer(hidden_size=64)
    change(models)
    put(models / "s" / "config.json", target_hidden_size=32)
    with pytest.raises(
        CheckpointError, match="hidden_size is 64, the target's is 32, and the drafter has no embedding"
    ):
        resolve(target_model=models / "t", draft_model=models / "s")


def test_a_draft_vocabulary_without_a_head_of_its_own_is_left_to_the_targets(models: Path) -> None:
    put(models / "z" / "config.json", draft_vocab_size=24)
    draft = resolve(target_model=str(models / "t"), draft_model=str(models / "z")).draft
    assert draft is not None
    assert draft.maps_vocabulary
    assert not draft.has_lm_head


@pytest.mark.parametrize("name", ["", " ", "\0", "x" * 5000, "~nobody-of-that-name/x/y", "a/b/c"])
def test_a_name_that_is_no_path_is_refused_in_a_sentence(name: str) -> None:
    with pytest.raises(CheckpointError, match="target_model is "):
        find_model(name, "target_model")
