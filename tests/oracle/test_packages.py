"""The packages themselves, where they are installed (`make oracle`): they still compute what `golden/` holds."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.oracle import (
    cases,
    deepspec,
    dflash2_cases,
    dspark_cases,
    eagle3_cases,
    ours,
    speculators_library,
    write_golden,
    zlab,
)
from tests.oracle.cases import Step
from tests.oracle.write_golden import GOLDEN

NOT_INSTALLED = "the oracle packages are not installed; run make oracle; tests/oracle/deepspec.py is about DeepSpec"
TOLERANCE = {"atol": 1e-4, "rtol": 0.0}
Results = Callable[[Path], tuple[dict[str, torch.Tensor], dict[str, Any]]]


def needs(package: str) -> pytest.MarkDecorator:
    """Skips where a package is not installed."""
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=NOT_INSTALLED)


@pytest.mark.parametrize(
    ("results", "name"),
    [
        pytest.param(write_golden.zlab_results, "zlab", marks=needs("dflash")),
        pytest.param(write_golden.speculators_results, "speculators", marks=needs("speculators")),
        pytest.param(write_golden.dflash2_results, "dflash2", marks=[needs("dflash"), needs("speculators")]),
        pytest.param(write_golden.dspark_results, "dspark", marks=[needs("deepspec"), needs("speculators")]),
        pytest.param(write_golden.eagle3_results, "eagle3", marks=needs("speculators")),
    ],
)
def test_a_package_computes_and_writes_what_golden_holds(results: Results, name: str, tmp_path: Path) -> None:
    tensors, data = results(tmp_path)
    expected = load_file(GOLDEN / f"{name}.safetensors")
    assert tensors.keys() == expected.keys()
    for tensor_name, tensor in tensors.items():
        torch.testing.assert_close(tensor, expected[tensor_name], **TOLERANCE)
    golden = write_golden.golden_json(name)
    assert {field: value for field, value in data.items() if field != "versions"} == {
        field: value for field, value in golden.items() if field != "versions"
    }


@needs("dflash")
@pytest.mark.parametrize("saved", ["as loaded", "as made new"])
def test_logits_at_every_context_length_are_those_of_the_authors_dflash2(saved: str, tmp_path: Path) -> None:
    """Of a checkpoint that their code saves, which names two tensors by whether the model was loaded or made new."""
    from dflash.model import DFlash2DraftModel

    target = cases.write_target(tmp_path / "target")
    draft, out = dflash2_cases.write_zlab(tmp_path / "draft", dflash2_cases.GROWING), tmp_path / "saved"
    _, drafter = zlab.load_pair(target, draft)
    if saved == "as made new":
        made = DFlash2DraftModel(drafter.config)
        made.load_state_dict(drafter.state_dict())
        drafter = made
    drafter.save_pretrained(out)
    steps = dflash2_cases.growing_steps()
    found = ours.drafts(target, out, cases.features("growing", dflash2_cases.LENGTHS), steps)
    for (logits, tokens), (their_logits, their_tokens) in zip(
        found, zlab.drafts(target, draft, "growing", steps), strict=True
    ):
        torch.testing.assert_close(logits, their_logits, **TOLERANCE)
        assert tokens == their_tokens


@needs("deepspec")
@pytest.mark.parametrize("case", ["gated", "recurrent"])
def test_drafts_at_every_context_length_are_those_of_deepspec(case: str, tmp_path: Path) -> None:
    """One sequence that grows by a token a step, of which each block is rejected."""
    target = cases.write_target(tmp_path / "target")
    draft = deepspec.save_case(case, target, tmp_path / "draft")
    steps = [Step(1, int(anchor), dspark_cases.BLOCK_SIZE) for anchor in cases.token_ids(300)]
    found = ours.confident_drafts(target, draft, cases.features(case, len(steps)), steps, wants_confidence=True)
    for (logits, drafts), theirs in zip(found, deepspec.drafts(draft, case, steps), strict=True):
        torch.testing.assert_close(logits, theirs[0], **TOLERANCE)
        assert drafts.token_ids.tolist() == theirs[1]
        torch.testing.assert_close(drafts.confidence, theirs[2], **TOLERANCE)


@needs("speculators")
@pytest.mark.parametrize("case", ["llama, normed before fc", "qwen3, each feature normed"])
def test_logits_at_every_context_length_are_those_of_speculators_eagle3(case: str, tmp_path: Path) -> None:
    """One sequence that grows by a token a step, of which all drafts are rejected; of the checkpoint that it saves."""
    target, lengths = cases.write_target(tmp_path / "target"), tuple(range(1, 301))
    model = speculators_library.build_eagle3(case, target)
    model.save_pretrained(str(tmp_path / "draft"))
    found = ours.drafts(target, tmp_path / "draft", cases.features(case, 300), eagle3_cases.steps(lengths))
    for (logits, tokens), (their_logits, their_tokens) in zip(
        found, speculators_library.eagle3_drafts(model, case, lengths), strict=True
    ):
        torch.testing.assert_close(logits, their_logits, **TOLERANCE)
        assert tokens == their_tokens


@needs("speculators")
def test_the_far_end_of_a_window_is_the_one_difference_from_how_speculators_trains() -> None:
    """There every query of a block sees the window before the anchor; here, as in vLLM and the authors' code, each sees
    its own. Nothing else of the mask differs."""
    from speculators.models.dflash.attention import create_anchor_block_mask_mod

    anchor, block, window, length = 20, 8, 9, 40
    for non_causal in (False, True):
        mask, num_queries, num_keys = create_anchor_block_mask_mod(
            torch.zeros(length, dtype=torch.long), length, torch.tensor([anchor]), block, window, non_causal
        )
        zero = torch.tensor(0)
        trained = mask(zero, zero, torch.arange(num_queries)[:, None], torch.arange(num_keys)[None])
        for i in range(block):
            context = set(trained[i, :length].nonzero().flatten().tolist())
            position = anchor + i
            assert context == set(range(anchor - window, anchor))
            ours = set(range(max(0, position - window + 1), anchor))
            assert context - ours == set(range(anchor - window, min(anchor, position - window + 1)))
            own = trained[i, length:].nonzero().flatten().tolist()
            assert own == list(range(block if non_causal else i + 1))


def test_nothing_of_this_project_is_called_dflash_alone() -> None:
    """So that the authors' package, its import name and its console script can lie beside it."""
    ours = importlib.metadata.distribution("dflash-triton")
    scripts = {entry.name for entry in ours.entry_points if entry.group == "console_scripts"}
    assert scripts == {"dflash-triton"}
    assert not (Path(__file__).parents[2] / "dflash").exists()
    assert not any((Path(entry) / "dflash" / "1" / "model.py").exists() for entry in sys.path)


@needs("dflash")
def test_the_name_dflash_is_the_authors_package() -> None:
    spec = importlib.util.find_spec("dflash")
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).name == "__init__.py"
    assert "site-packages" in spec.origin
    scripts = importlib.metadata.entry_points(group="console_scripts", name="dflash")
    assert {entry.value for entry in scripts} == {"dflash.cli:main"}


@needs("speculators")
def test_a_checkpoint_that_the_library_saves_is_read_without_a_warning(tmp_path: Path) -> None:
    from dflash_backend.drafters.registry import read_draft

    target = cases.write_target(tmp_path / "target")
    speculators_library.build(cases.SPECULATORS["causal window"], target).save_pretrained(str(tmp_path / "draft"))
    draft = read_draft(tmp_path / "draft")
    assert draft.notes == ()
    assert draft.decoder.sliding_windows == (64, None)
    assert draft.causal == (True, False)
