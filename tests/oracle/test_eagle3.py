"""Our EAGLE-3 drafter against what the speculators library computed. Needs it not: the results are in `golden/`."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflash_backend.drafters.registry import read_draft
from tests.oracle import cases, ours
from tests.oracle import eagle3_cases as eagle3
from tests.oracle.write_golden import GOLDEN, as_text, golden_json
from tests.support.tiny_models import save_checkpoint

# Logits have a standard deviation of about 2; other machines sum in another order.
TOLERANCE = {"atol": 1e-4, "rtol": 0.0}
RESULTS = golden_json("eagle3")
GROWING = tuple(range(1, eagle3.NUM_LENGTHS + 1))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cases.write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "eagle3.safetensors")


def saved_by_speculators(directory: Path, case: str, target: Path) -> Path:
    """A checkpoint as the library saved it, for this target."""
    config = copy.deepcopy(RESULTS["configs"][case])
    config["speculators_config"]["verifier"]["name_or_path"] = str(target)
    tensors = eagle3.saved_tensors(case)
    assert sorted(tensors) == RESULTS["tensors"][case]
    return save_checkpoint(directory, config, tensors)


def run(target: Path, draft: Path, case: str, lengths: tuple[int, ...]) -> tuple[torch.Tensor, list[str]]:
    """Our logits `[lengths, k, draft_vocab]` and drafts of a case at these context lengths."""
    found = ours.drafts(target, draft, cases.features(case, max(lengths)), eagle3.steps(lengths))
    return torch.stack([logits for logits, _ in found]), [as_text(tokens) for _, tokens in found]


@pytest.mark.parametrize("case", eagle3.SPECULATORS)
def test_drafts_are_those_of_the_speculators_library(
    case: str, target: Path, golden: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """By the checkpoint that it saved, with the target given by the config alone."""
    draft = saved_by_speculators(tmp_path, case, target)
    spec = read_draft(draft)
    assert (spec.notes, spec.num_speculative_tokens) == ((), eagle3.K)
    logits, drafts = run(target, draft, case, eagle3.LENGTHS)
    torch.testing.assert_close(logits, golden[case], **TOLERANCE)
    assert drafts == RESULTS["drafts"][case]


@pytest.mark.parametrize("case", eagle3.SPECULATORS)
def test_a_checkpoint_in_the_authors_format_is_the_same_drafter(
    case: str, target: Path, golden: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """With the target's embedding, and the layers by layer ids."""
    draft = eagle3.write_authors_format(tmp_path, case)
    assert read_draft(draft).notes == ()
    logits, drafts = run(target, draft, case, eagle3.LENGTHS)
    torch.testing.assert_close(logits, golden[case], **TOLERANCE)
    assert drafts == RESULTS["drafts"][case]


def test_drafts_at_every_context_length_are_those_of_the_library(
    target: Path, golden: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """One sequence that grows by a token a step, over what the drafts before left behind it."""
    draft = saved_by_speculators(tmp_path, eagle3.GROWING, target)
    logits, drafts = run(target, draft, eagle3.GROWING, GROWING)
    for n in eagle3.KEPT:
        torch.testing.assert_close(logits[n - 1], golden[f"growing/{n}"], **TOLERANCE)
    assert drafts == RESULTS["drafts"]["growing"]


def test_drafts_depend_on_the_drafts_before_them() -> None:
    """The test above would not tell a chain from the same token again."""
    chains = [bytes.fromhex(text) for text in RESULTS["drafts"]["growing"]]
    assert sum(len(set(chain)) > 1 for chain in chains) > 200
    assert len({chain[-1] for chain in chains}) > 10


def test_the_golden_files_say_what_wrote_them() -> None:
    assert set(RESULTS["versions"]) == {"speculators", "torch", "transformers"}
    assert json.dumps(RESULTS["configs"]).count("TARGET") == len(eagle3.SPECULATORS)
