"""The demo drafter as a speculators checkpoint: the same weights in another format serve the same tokens, from the one
directory alone, with the same acceptance; and what a cut vocabulary, another k or misread layers change is speed only.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.worse_drafters import shifted_drafter
from dflash_backend import LLM
from dflash_backend.config import asset_path
from dflash_backend.engine.llm import RequestOutput
from dflash_backend.evaluation.figures import parse_spec_stats
from dflash_backend.messages import SamplingParams
from dflash_backend.spec_stats import SpecDecodingStats
from load_tests.prompts import held_out_dir, load_prompts
from tests.server.conftest import new_server
from tests.support.scale import SCALE, by_night, scaled
from tests.support.speculators_checkpoint import frequent_tokens, rewrite

DRAFT, TARGET = asset_path("demo", "pair", "draft"), asset_path("demo", "pair", "target")
VOCAB_SIZE = 1536
DRAFT_VOCAB = VOCAB_SIZE // 10
NUM_PROMPTS = scaled(12 if SCALE >= 4 else 6, at_least=6)
MAX_TOKENS = 96


@dataclass(frozen=True)
class Answers:
    """Greedy answers to the same prompts, and how many drafts were accepted in each."""

    token_ids: list[list[int]]
    counts: list[SpecDecodingStats]

    @property
    def acceptance_length(self) -> float:
        return SpecDecodingStats.total(self.counts).acceptance_length


def answers(**settings: Any) -> Answers:
    """What an engine with these settings makes of the first held-out prompts."""
    prompts = [row.prompt for row in load_prompts(NUM_PROMPTS)]
    outputs = LLM(max_model_len=512, adaptive_speculation=False, **settings).generate(
        prompts, max_tokens=MAX_TOKENS, temperature=0
    )
    return Answers([output.token_ids for output in outputs], counts_of(outputs))


def counts_of(outputs: list[RequestOutput]) -> list[SpecDecodingStats]:
    return [output.stats.spec_decoding for output in outputs if output.stats is not None]


@pytest.fixture(scope="module")
def original() -> Answers:
    return answers()


@pytest.fixture(scope="module")
def rewritten(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rewrite(DRAFT, TARGET, tmp_path_factory.mktemp("speculators"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the draft vocabulary cut to a tenth."""
    kept = frequent_tokens(TARGET, sorted(held_out_dir().glob("*.jsonl")), DRAFT_VOCAB)
    return rewrite(DRAFT, TARGET, tmp_path_factory.mktemp("cut"), kept)


@pytest.mark.parametrize("setting", ["target", by_night("draft")])
def test_the_speculators_directory_alone_serves_the_same_with_the_same_acceptance(
    setting: str, rewritten: Path, original: Answers
) -> None:
    assert answers(**{setting: str(rewritten)}) == original


def test_with_a_tenth_of_the_vocabulary_the_output_is_the_same(small: Path, original: Answers) -> None:
    found = answers(target=str(small))
    assert found.token_ids == original.token_ids
    assert 1.5 < found.acceptance_length < original.acceptance_length


@pytest.mark.parametrize("k", [by_night(1), 6])
def test_a_smaller_k_gives_the_same_output(k: int, rewritten: Path, original: Answers) -> None:
    found = answers(target=str(rewritten), num_speculative_tokens=k)
    assert found.token_ids == original.token_ids
    assert 1.5 < found.acceptance_length <= 1 + k


@pytest.mark.slow
@pytest.mark.parametrize("offset", [-1, by_night(1)])
def test_layers_off_by_one_in_either_convention_cost_acceptance_and_nothing_else(
    offset: int, tmp_path: Path, original: Answers
) -> None:
    boundary_ids = answers(target=str(rewrite(DRAFT, TARGET, tmp_path / "s", boundary_offset=1 + offset)))
    layer_ids = answers(draft=str(shifted_drafter(offset, tmp_path)))
    assert boundary_ids == layer_ids
    assert layer_ids.token_ids == original.token_ids
    assert layer_ids.acceptance_length <= 0.95 * original.acceptance_length


@pytest.mark.slow
def test_a_mask_embedding_beside_the_weights_takes_the_place_of_the_tables_row(
    rewritten: Path, tmp_path: Path, original: Answers
) -> None:
    draft = Path(shutil.copytree(rewritten, tmp_path / "d"))
    mask_token_id = json.loads((draft / "config.json").read_text())["mask_token_id"]
    row = load_file(draft / "model.safetensors")["embed_tokens.weight"][mask_token_id].clone()
    torch.save(row, draft / "mask_embedding.pt")
    assert answers(target=str(draft)) == original
    torch.save({"embedding": -row, "mask_token_id": mask_token_id}, draft / "mask_embedding.pt")
    found = answers(target=str(draft))
    assert found.token_ids == original.token_ids
    assert found.acceptance_length < 0.9 * original.acceptance_length


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [by_night(0.0), 1.0])
def test_sampled_text_does_not_depend_on_a_drafter_with_a_smaller_vocabulary(small: Path, ratio: float) -> None:
    prompts = [prompt.prompt for prompt in load_prompts(12)]
    params = [SamplingParams(max_tokens=48, temperature=1.0, seed=i, ignore_eos=True) for i in range(len(prompts))]
    expected = [output.token_ids for output in LLM(draft="").generate(prompts, params)]
    drafting = LLM(draft=str(small), draft_temperature_ratio=ratio, adaptive_speculation=False)
    outputs = drafting.generate(prompts, params)
    assert [output.token_ids for output in outputs] == expected
    assert SpecDecodingStats.total(counts_of(outputs)).acceptance_length > 1.5


@pytest.mark.nightly
@pytest.mark.server
def test_a_server_given_the_speculators_directory_alone_answers(rewritten: Path, original: Answers) -> None:
    body = {"text_input": load_prompts(1)[0].prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
    asked = {"return_token_ids": True, "return_spec_stats": True}
    settings = {"target_model": str(rewritten), "adaptive_speculation": "false"}
    with new_server(settings) as server, httpx.Client(trust_env=False, verify=False, timeout=60) as http:
        answer = http.post(f"http://{server.http_url}/v2/models/dflash/generate", json=body | asked).json()
    assert answer["token_ids"] == original.token_ids[0]
    assert parse_spec_stats(json.loads(answer["spec_stats"])) == original.counts[0]
