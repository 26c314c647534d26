"""Steps that ask only which logit is the largest find it by the codes of the head, and all others have logits."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_backend.config import asset_path
from dflash_backend.messages import StructuredOutputs
from dflash_backend.models.decoder import DecoderTarget, LayeredTarget
from dflash_backend.text.tokenizer import Tokenizer
from dflash_backend.worker.step import SpecDecodeModel
from dflash_kernels import cpu_head
from load_tests.prompts import load_prompts
from tests.support.tiny_models import make_target
from tests.worker.engines import Outputs, engine, outputs_of

pytestmark = [
    pytest.mark.skipif(not cpu_head.MAX_ROWS[torch.float32], reason="needs a C++ compiler and AVX2"),
    pytest.mark.usefixtures("single_thread"),
]
TARGET = asset_path("demo", "pair", "target")
GREEDY: dict[str, Any] = {"max_tokens": 40, "temperature": 0.0}
SPECIAL: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 2},
    "penalties": {"repetition_penalty": 1.4},
    "bias": {"logit_bias": {7: 30.0}},
    "min_tokens": {"min_tokens": 12, "stop_token_ids": tuple(range(30, 90))},
    "allowed": {"allowed_token_ids": tuple(range(5, 40))},
    "top_p alone": {"temperature": 0.9, "seed": 5, "top_p": 0.9},
    "grammar": {"structured_outputs": StructuredOutputs("regex", "[a-z]{3,9}(-[0-9]{2}){1,3}")},
}


@cache
def prompts() -> list[list[int]]:
    """What the demo target was trained for, so that its logits are clear."""
    tokenizer = Tokenizer.load(TARGET)
    return [tokenizer.encode(row.prompt) for row in load_prompts(3)]


@pytest.fixture(autouse=True)
def small_heads_and_many_rows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_head, "LEAST_OUTPUTS", 1)
    monkeypatch.setattr(cpu_head, "MAX_ROWS", dict.fromkeys(cpu_head.MAX_ROWS, sys.maxsize))


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """Of each step that chooses tokens: whether codes found them, and whether there are logits."""
    seen: list[tuple[bool, bool]] = []
    likeliest, verify = LayeredTarget.likeliest, SpecDecodeModel.verify
    found: list[bool] = []

    def watched(self: LayeredTarget, hidden: torch.Tensor, *sampling: torch.Tensor) -> torch.Tensor | None:
        tokens = likeliest(self, hidden, *sampling)
        found.append(tokens is not None)
        return tokens

    def verified(self: SpecDecodeModel, step: Any, *others: Any) -> Any:
        found.clear()
        step = verify(self, step, *others)
        if step.traits.chooses:
            seen.append((any(found), step.logits is not None))
        return step

    monkeypatch.setattr(LayeredTarget, "likeliest", watched)
    monkeypatch.setattr(SpecDecodeModel, "verify", verified)
    return seen


@pytest.mark.parametrize("draft", ["", None, "ngram"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 2.0},
        {"temperature": 9.0, "top_k": 2},
        {"temperature": 9.0, "min_p": 0.35},
        {"temperature": 9.0, "top_k": 3, "top_p": 0.7},
    ],
    ids=str,
)
def test_texts_are_the_same_without_logits(
    changes: dict[str, Any], draft: str | None, steps: list[tuple[bool, bool]]
) -> None:
    settings: dict[str, Any] = {} if draft is None else {"target_model": str(TARGET), "draft_model": draft}
    sampling = [GREEDY | changes | {"seed": i} for i in range(2)] + [GREEDY]
    texts = outputs_of(engine(**settings), prompts(), sampling).tokens
    by_codes = [found for found, has_logits in steps if not has_logits]
    assert all(by_codes)
    assert len(by_codes) > len(steps) / 4
    steps.clear()
    assert outputs_of(engine(enable_coarse_head=False, **settings), prompts(), sampling).tokens == texts
    assert set(steps) == {(False, True)}
    if changes:
        greedy = outputs_of(engine(**settings), prompts(), [GREEDY] * 3).tokens
        assert (greedy["0"] != texts["0"], greedy["1"] != texts["1"], greedy["2"]) == (True, True, texts["2"])


@pytest.mark.parametrize("name", SPECIAL)
def test_what_looks_at_logits_has_them_and_the_others_beside_it_the_same_text(
    name: str, steps: list[tuple[bool, bool]]
) -> None:
    found: list[Outputs] = []
    for codes in (True, False):
        outputs = Outputs(engine(target_model=str(TARGET), draft_model="", enable_coarse_head=codes))
        for index, (prompt, own) in enumerate(
            zip(prompts(), ({}, {"max_tokens": 12} | SPECIAL[name], {}), strict=True)
        ):
            outputs.add(str(index), prompt, eos_token_ids=(2,), **GREEDY | own)
        outputs.finish()
        assert not outputs.failed
        found.append(outputs)
        assert ((False, True) in steps, (True, False) in steps, (True, True) in steps) == (True, codes, False)
        steps.clear()
    assert found[0].tokens == found[1].tokens
    ids = [[each.token_ids for each in outputs.logprobs.get("1", [])] for outputs in found]
    assert ids[0] == ids[1]


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_a_head_under_a_soft_cap_has_no_codes(softcap: float | None, tmp_path: Path) -> None:
    make_target(tmp_path, architecture="Gemma4ForCausalLM", final_logit_softcapping=softcap)
    built = engine(target_model=str(tmp_path), draft_model="", dtype="float32")
    target = built.runner.model.target
    assert isinstance(target, LayeredTarget)
    assert (target.coarse_head is None) == (softcap is not None)


def test_a_head_with_codes_is_fetched_by_them() -> None:
    target = engine().runner.model.target
    assert isinstance(target, DecoderTarget)
    assert target.stack is not None
    assert target.coarse_head is not None
    codes = target.coarse_head.data
    assert target.stack.order[-1].described[4:].tolist() == [codes.data_ptr(), codes.nbytes]
