"""Our DSpark drafter against what its authors' code, DeepSpec, and the speculators library computed.

Needs neither: the results are in `golden/`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_backend.drafters.base import Drafts
from dflash_backend.drafters.registry import read_draft
from tests.oracle import cases, ours
from tests.oracle import dspark_cases as dspark
from tests.oracle.cases import Step
from tests.oracle.write_golden import GOLDEN, as_text, golden_json
from tests.support.tiny_models import save_checkpoint

# Logits have a standard deviation of about 2; other machines sum in another order.
TOLERANCE = {"atol": 1e-4, "rtol": 0.0}
RESULTS = golden_json("dspark")
CONFIDENT = [case for case in dspark.DEEPSPEC if dspark.DEEPSPEC[case].get("confidence", True)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cases.write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "dspark.safetensors")


def saved_by_deepspec(directory: Path, case: str, **changes: Any) -> Path:
    """A checkpoint as DeepSpec saved it: its config with these changes, and the tensors that it named."""
    tensors = dspark.deepspec_tensors(dspark.DEEPSPEC[case])
    assert sorted(tensors) == RESULTS["tensors"][f"deepspec {case}"]
    return save_checkpoint(directory, RESULTS["configs"][f"deepspec {case}"] | changes, tensors)


def run_deepspec(target: Path, draft: Path, case: str) -> list[tuple[torch.Tensor, Drafts]]:
    """Our drafts of one of its cases."""
    features = cases.features(case, sum(step.num_new for step in dspark.STEPS))
    return ours.confident_drafts(target, draft, features, dspark.STEPS, wants_confidence=True)


def texts(found: Sequence[tuple[torch.Tensor, Drafts]]) -> list[str]:
    return [as_text(drafts.token_ids.tolist()) for _, drafts in found]


@pytest.mark.parametrize("case", dspark.DEEPSPEC)
def test_drafts_are_those_of_the_authors_code(
    case: str, target: Path, golden: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """And so is how sure the drafter is of each, behind the one before it."""
    draft = saved_by_deepspec(tmp_path, case)
    assert ["sample_from_anchor = true (as DeepSpec's own code" in note for note in read_draft(draft).notes] == [True]
    found = run_deepspec(target, draft, case)
    assert texts(found) == RESULTS["drafts"][f"deepspec {case}"]
    for i, (logits, drafts) in enumerate(found):
        if i in dspark.KEPT_STEPS:
            torch.testing.assert_close(logits, golden[f"deepspec {case}/{i}"], **TOLERANCE)
        if case in CONFIDENT:
            torch.testing.assert_close(drafts.confidence, golden[f"deepspec {case}/{i}/confidence"], **TOLERANCE)


def test_drafts_differ_by_what_was_drafted_before_them(golden: dict[str, torch.Tensor]) -> None:
    """The test above would not tell a walk from independent drafts otherwise: the heads change most of them."""
    drafts = RESULTS["drafts"]
    plain = drafts["deepspec no heads"]
    assert len({tuple(drafts[f"deepspec {case}"]) for case in dspark.DEEPSPEC}) >= 4
    assert all(one != other for one, other in zip(drafts["deepspec vanilla"], plain, strict=True))


def test_the_comparison_notices_an_anchor_that_does_not_draft(
    target: Path, golden: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    found = run_deepspec(target, saved_by_deepspec(tmp_path, "vanilla", sample_from_anchor=False), "vanilla")
    assert (found[1][0] - golden["deepspec vanilla/1"]).abs().max() > 0.1


@pytest.mark.parametrize("name", dspark.SPECULATORS)
def test_drafts_are_those_of_the_speculators_library(
    name: str, target: Path, golden: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """By the checkpoint that it saved, with the target given by the config alone."""
    case, config = dspark.SPECULATORS[name], copy.deepcopy(RESULTS["configs"][name])
    config["speculators_config"]["verifier"]["name_or_path"] = str(target)
    tensors = dspark.speculators_tensors(case)
    assert sorted(tensors) == RESULTS["tensors"][name]
    draft = save_checkpoint(tmp_path, config, tensors)
    spec = read_draft(draft)
    assert spec.notes == ()
    k = dspark.num_drafts(case)
    assert spec.num_speculative_tokens == k
    ids, features = cases.token_ids(cases.NUM_TOKENS), cases.features(name, cases.NUM_TOKENS)
    steps = [
        Step(anchor - start, int(ids[anchor]), k)
        for start, anchor in zip((0, *cases.ANCHORS), cases.ANCHORS, strict=False)
    ]
    found = ours.confident_drafts(target, draft, features, steps, wants_confidence=True)
    kept = torch.stack([found[i][0] for i in dspark.KEPT_ANCHORS])
    torch.testing.assert_close(kept, golden[name], **TOLERANCE)
    assert texts(found) == RESULTS["drafts"][name]
    for (_, drafts), expected in zip(found, golden[f"{name}/confidence"], strict=True):
        torch.testing.assert_close(drafts.confidence, expected, **TOLERANCE)


def test_the_golden_files_say_what_wrote_them() -> None:
    assert set(RESULTS["versions"]) == {"speculators", "torch", "transformers"}
    assert json.dumps(RESULTS["configs"]).count("TARGET") == len(dspark.SPECULATORS)
