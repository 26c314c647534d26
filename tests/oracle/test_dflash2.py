"""Our DFlash2 drafter against what the authors' and the speculators packages computed.

Needs neither package: the results are in `golden/`.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_backend.drafters.dflash2.config import DFlash2Spec
from dflash_backend.drafters.registry import read_draft
from tests.oracle import cases, ours
from tests.oracle import dflash2_cases as dflash2
from tests.oracle.cases import Step
from tests.oracle.write_golden import GOLDEN, as_text, golden_json
from tests.support.tiny_models import save_checkpoint

# Logits have a standard deviation of about 1.5; other machines sum in another order.
TOLERANCE = {"atol": 1e-4, "rtol": 0.0}
RESULTS = golden_json("dflash2")
Drafts = list[tuple[torch.Tensor, list[int]]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cases.write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "dflash2.safetensors")


def run(target: Path, draft: Path, case: str) -> Drafts:
    """Our drafts of a z-lab case."""
    features = cases.features(case, sum(step.num_new for step in dflash2.STEPS))
    return ours.drafts(target, draft, features, dflash2.STEPS)


@pytest.mark.parametrize("case", dflash2.ZLAB)
def test_drafts_are_those_of_the_authors_code(
    case: str, target: Path, golden: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    found = run(target, dflash2.write_zlab(tmp_path, case), case)
    for i, (logits, _) in enumerate(found):
        torch.testing.assert_close(logits, golden[f"{case}/{i}"], **TOLERANCE)
    assert [as_text(tokens) for _, tokens in found] == RESULTS["drafts"][case]


def test_a_walk_chooses_other_tokens_than_the_likeliest(target: Path, tmp_path: Path) -> None:
    """The test above would not tell them apart otherwise."""
    drafts = run(target, dflash2.write_zlab(tmp_path, "plain"), "plain")
    assert sum(logits.argmax(dim=-1).tolist() != tokens for logits, tokens in drafts) == len(drafts)


MISREADINGS: dict[str, dict[str, Any]] = {
    "one candidate": {"selector_top_k": 1},
    "two candidates": {"selector_top_k": 2},
}


@pytest.mark.parametrize("misreading", MISREADINGS)
def test_the_comparison_notices_a_misread_selector(misreading: str, target: Path, tmp_path: Path) -> None:
    found = run(target, dflash2.write_zlab(tmp_path, "plain", **MISREADINGS[misreading]), "plain")
    assert [as_text(tokens) for _, tokens in found] != RESULTS["drafts"]["plain"]


def saved_checkpoint(directory: Path, name: str, target: Path | None = None) -> Path:
    """A checkpoint as its package saved it: its config, and the tensors that it named."""
    config = copy.deepcopy(RESULTS["configs"][name])
    if target is not None:
        config["speculators_config"]["verifier"]["name_or_path"] = str(target)
    assert sorted(dflash2.tensors()) == RESULTS["tensors"][name]
    return save_checkpoint(directory, config, dflash2.tensors())


def test_drafts_at_every_context_length_are_those_of_the_authors_code(
    target: Path, golden: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """One sequence that grows by a token a step, of which each block is rejected, by the checkpoint that they saved."""
    draft = saved_checkpoint(tmp_path, "zlab")
    assert read_draft(draft).notes == ()
    found = ours.drafts(target, draft, cases.features("growing", dflash2.LENGTHS), dflash2.growing_steps())
    for length in dflash2.KEPT:
        torch.testing.assert_close(found[length - 1][0], golden[f"growing/{length}"], **TOLERANCE)
    assert [as_text(tokens) for _, tokens in found] == RESULTS["drafts"]["growing"]


@pytest.mark.parametrize("chunk", [1, 7, 64, 255])
def test_a_prompt_in_chunks_has_the_drafts_of_one_that_grew(
    chunk: int, target: Path, golden: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    anchors = cases.token_ids(dflash2.LENGTHS)
    ends = [*range(chunk, dflash2.LENGTHS, chunk), dflash2.LENGTHS]
    steps = [
        Step(end - start, int(anchors[end - 1]), dflash2.BLOCK_SIZE - 1)
        for start, end in zip([0, *ends], ends, strict=False)
    ]
    found = ours.drafts(target, saved_checkpoint(tmp_path, "zlab"), cases.features("growing", dflash2.LENGTHS), steps)
    torch.testing.assert_close(found[-1][0], golden["growing/300"], **TOLERANCE)
    assert [as_text(tokens) for _, tokens in found] == [RESULTS["drafts"]["growing"][end - 1] for end in ends]


@pytest.mark.parametrize("name", dflash2.SPECULATORS)
def test_drafts_are_those_of_the_speculators_library(
    name: str, target: Path, golden: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    draft = saved_checkpoint(tmp_path, name, target)
    assert read_draft(draft).notes == ()
    ids, features = cases.token_ids(cases.NUM_TOKENS), cases.features(name, cases.NUM_TOKENS)
    steps = [
        Step(anchor - start, int(ids[anchor]), dflash2.BLOCK_SIZE - 1)
        for start, anchor in zip((0, *cases.ANCHORS), cases.ANCHORS, strict=False)
    ]
    found = ours.drafts(target, draft, features, steps)
    torch.testing.assert_close(torch.stack([logits for logits, _ in found]), golden[name], **TOLERANCE)
    assert [as_text(tokens) for _, tokens in found] == RESULTS["drafts"][name]


def test_tables_may_be_named_as_a_new_model_of_the_authors_names_them(target: Path, tmp_path: Path) -> None:
    """`save_pretrained` of a model that was not loaded adds ".weight" to the names of the selector's tables."""
    config = dflash2.zlab_config("plain")
    draft = save_checkpoint(tmp_path, config, dflash2.tensors(suffix=".weight"))
    spec = read_draft(draft)
    assert isinstance(spec, DFlash2Spec)
    assert spec.selector.codebook_suffix == ".weight"
    assert [as_text(tokens) for _, tokens in run(target, draft, "plain")] == RESULTS["drafts"]["plain"]


def test_the_golden_files_say_what_wrote_them() -> None:
    assert set(RESULTS["versions"]) == {"dflash", "speculators", "torch", "transformers"}
    assert json.dumps(RESULTS["configs"]).count("TARGET") == len(dflash2.SPECULATORS)
