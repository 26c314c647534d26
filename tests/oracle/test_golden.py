"""Our drafter, features, checkpoints and engine against what the authors' and the speculators packages computed.

Needs neither package: the results are in `golden/`.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_backend import LLM
from dflash_backend.drafters.registry import read_draft
from tests.oracle import cases, ours
from tests.oracle.write_golden import FEATURE_LAYERS, GOLDEN, NUM_FEATURE_TOKENS, golden_json
from tests.support.tiny_models import HIDDEN, TARGET_LAYERS, save_checkpoint

# Logits have a standard deviation of about 1.5; other machines sum in another order.
TOLERANCE = {"atol": 1e-4, "rtol": 0.0}
ZLAB, SPECULATORS = golden_json("zlab"), golden_json("speculators")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cases.write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "zlab.safetensors") | load_file(GOLDEN / "speculators.safetensors")


def zlab_difference(target: Path, draft: Path, case: str, golden: dict[str, torch.Tensor]) -> float:
    """The largest difference of any logit of any step from those of the authors' code."""
    features = cases.features(case, sum(step.num_new for step in cases.STEPS))
    found = ours.draft_logits(target, draft, features, cases.STEPS)
    expected = [golden[f"{case}/{i}"] for i in range(len(cases.STEPS))]
    assert [a.shape for a in found] == [b.shape for b in expected]
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("case", cases.ZLAB)
def test_draft_logits_are_those_of_the_authors_code(
    case: str, target: Path, golden: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    assert zlab_difference(target, ours.write_zlab(tmp_path, case), case, golden) <= TOLERANCE["atol"]


# Each is what a reader of the config could get wrong.
MISREADINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "not causal": ("is_causal", {"is_causal": False}),
    "causal": ("plain", {"is_causal": True}),
    "sliding layers not causal": ("sliding causal", {"is_causal": False}),
    "sliding layers causal": ("sliding non-causal", {"is_causal": None}),
    "no window": ("sliding non-causal", {"layer_types": [cases.FULL] * 2}),
    "a window one longer": ("sliding causal", {"sliding_window": 10}),
    "layers from max_window_layers on not causal": ("windows of the upper layers", {"is_causal": False}),
    "no yarn": ("yarn", {"rope_scaling": None}),
    "no scales": ("scales", cases.zlab_config("plain")),
}


@pytest.mark.parametrize("misreading", MISREADINGS)
def test_the_comparison_notices_a_misread_config(
    misreading: str, target: Path, golden: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    case, changes = MISREADINGS[misreading]
    assert zlab_difference(target, ours.write_zlab(tmp_path, case, **changes), case, golden) > 1e-2


def test_features_are_those_of_the_authors_code_the_last_layers_too(
    target: Path, golden: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    dflash = {"target_layer_ids": FEATURE_LAYERS, "mask_token_id": cases.MASK_TOKEN_ID}
    draft = ours.write_zlab(tmp_path, "plain", dflash_config=dflash)
    assert FEATURE_LAYERS[-1] == TARGET_LAYERS - 1
    features = ours.target_features(target, draft, cases.token_ids(NUM_FEATURE_TOKENS))
    torch.testing.assert_close(features, golden["features"], **TOLERANCE)


def speculators_checkpoint(directory: Path, target: Path, name: str) -> Path:
    """The checkpoint that the library saved for a case: its config, and the tensors that it named."""
    config = copy.deepcopy(SPECULATORS["configs"][name])
    config["speculators_config"]["verifier"]["name_or_path"] = str(target)
    tensors = cases.drafter_tensors()
    if cases.SPECULATORS[name].small_vocabulary:
        tensors |= cases.vocabulary_maps()
        tensors["lm_head.weight"] = cases.hashed("head", (cases.VOCAB_SIZE, HIDDEN), 0.5)[cases.DRAFT_VOCAB]
    assert sorted(tensors) == SPECULATORS["tensors"][name]
    return save_checkpoint(directory, config, tensors)


@pytest.mark.parametrize("name", cases.SPECULATORS)
def test_draft_logits_are_those_of_the_speculators_library(
    name: str, target: Path, golden: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    draft, block_size = speculators_checkpoint(tmp_path, target, name), cases.SPECULATORS[name].block_size
    assert read_draft(draft).notes == ()
    ids, features = cases.token_ids(cases.NUM_TOKENS), cases.features(name, cases.NUM_TOKENS)
    starts = (0, *cases.ANCHORS)
    steps = [
        cases.Step(anchor - start, int(ids[anchor]), block_size - 1)
        for start, anchor in zip(starts, cases.ANCHORS, strict=False)
    ]
    found = torch.stack(ours.draft_logits(target, draft, features, steps))
    torch.testing.assert_close(found, golden[name], **TOLERANCE)


def test_a_draft_vocabulary_without_a_head_has_the_rows_that_the_library_would_ship(
    target: Path, golden: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    draft = speculators_checkpoint(tmp_path, target, "cut vocabulary")
    tensors = load_file(draft / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, draft / "model.safetensors")
    ids = cases.token_ids(cases.NUM_TOKENS)
    step = cases.Step(cases.ANCHORS[0], int(ids[cases.ANCHORS[0]]), 7)
    found = ours.draft_logits(target, draft, cases.features("cut vocabulary", cases.NUM_TOKENS), [step])
    torch.testing.assert_close(found[0], golden["cut vocabulary"][0], **TOLERANCE)


def converted(directory: Path) -> Path:
    """The demo drafter as the library's converter wrote it."""
    config = copy.deepcopy(SPECULATORS["configs"]["converted"])
    config["speculators_config"]["verifier"]["name_or_path"] = str(ours.DEMO_TARGET)
    tensors = load_file(ours.DEMO_DRAFT / "model.safetensors")
    assert sorted(tensors) == SPECULATORS["tensors"]["converted"]
    return save_checkpoint(directory, config, tensors)


@pytest.mark.parametrize("form", ["as published", "as the converter wrote it"])
def test_the_engine_gives_the_text_and_the_accepted_counts_of_the_authors_loop(form: str, tmp_path: Path) -> None:
    """`dflash_generate` on the demo pair. A step of theirs that gives n tokens has n - 1 accepted drafts here; the last
    one has n where the token that ends the sequence was a draft."""
    draft = ours.DEMO_DRAFT if form == "as published" else converted(tmp_path)
    llm = LLM(target=str(ours.DEMO_TARGET), draft=str(draft), dtype="float32", adaptive_speculation=False)
    generated = ZLAB["generated"]
    found = ours.generate(llm, [one["prompt"] for one in generated.values()], ZLAB["max_tokens"])
    for (tokens, counts), one in zip(found, generated.values(), strict=True):
        *earlier, last = one["acceptance_lengths"]
        assert tokens == one["tokens"]
        assert counts.num_drafts == len(earlier) + 1
        by_position = [
            count - sum(length > i + 1 for length in earlier)
            for i, count in enumerate(counts.num_accepted_tokens_per_pos)
        ]
        assert by_position in ([1] * n + [0] * (15 - n) for n in (last - 1, last))


def test_the_prompts_are_still_those_of_the_demo_pair() -> None:
    assert dict(ours.demo_prompts()) == {name: one["prompt"] for name, one in ZLAB["generated"].items()}


# Bytes of all files with these names' endings.
SIZES = {"safetensors": 280_000, "json": 100_000}


def test_the_golden_files_stay_small_and_say_what_wrote_them() -> None:
    sizes = {suffix: sum(file.stat().st_size for file in GOLDEN.glob(f"*.{suffix}")) for suffix in SIZES}
    assert all(size < SIZES[suffix] for suffix, size in sizes.items()), sizes
    assert set(ZLAB["versions"]) == {"dflash", "torch", "transformers"}
    assert set(SPECULATORS["versions"]) == {"speculators", "torch", "transformers"}
