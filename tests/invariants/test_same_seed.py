"""Sampled text follows from target, prompt, parameters and seed alone: `checks.sampled_text`, smaller."""

from __future__ import annotations

from pathlib import Path

import pytest

from checks.sampled_text import Request, answers, partings, random_drafter, requests, target_alone, ways
from dflash_backend import LLM
from load_tests.prompts import load_prompts
from tests.support.scale import SCALE, by_night, scaled
from tests.worker.engines import Outputs, triton_engine

pytestmark = pytest.mark.slow
NUM_PROMPTS = scaled(16, at_least=16)
MAX_TOKENS = 48 if SCALE >= 4 else 32
KERNEL_TOKENS = 8 if SCALE >= 4 else 5  # under the interpreter: a step with drafts and its next one at least
LEFT = ("alone", "k = 3", "always all of k", "n-grams")  # tests/invariants/test_lossless.py has such, of greedy text
NAMES = [by_night(way.name) if way.name in LEFT else way.name for way in ways(Path())]


@pytest.fixture(scope="module")
def asked() -> list[Request]:
    return requests(NUM_PROMPTS, [1], MAX_TOKENS)


@pytest.fixture(scope="module")
def expected(asked: list[Request]) -> list[list[int]]:
    return target_alone(asked)


@pytest.mark.parametrize("name", NAMES)
def test_every_way_to_run_gives_the_text_of_the_target_alone(
    name: str, asked: list[Request], expected: list[list[int]], tmp_path: Path
) -> None:
    (way,) = (way for way in ways(random_drafter(tmp_path)) if way.name == name)
    found, llm = answers(way, asked)
    parted = partings(asked, expected, found)
    assert len(parted) <= 1, parted
    assert all(each.is_tie for each in parted), parted
    stats = llm.stats()
    if way.settings.get("draft") != "":
        # On a busy machine the rule may say of every step that drafts of random weights do not pay.
        rests = stats.speculation.num_steps_without_drafts == stats.speculation.num_steps > 0
        assert stats.spec_decoding.num_draft_tokens > 0 or rests
    assert (stats.num_preemptions > 0) == (name == "after preemptions")
    if name == "with prefix hits":
        assert stats.prefix_cache_hits > 0


def test_our_kernels_give_it_too(asked: list[Request], expected: list[list[int]]) -> None:
    some = range(0, len(asked), len(asked) // scaled(2))
    outputs = Outputs(triton_engine(max_model_len=256, max_num_seqs=4))
    for i in some:
        sampling = {
            name: getattr(asked[i].sampling, name) for name in ("temperature", "seed", "top_p", "top_k", "min_p")
        }
        outputs.add(str(i), list(asked[i].prompt), max_tokens=KERNEL_TOKENS, ignore_eos=True, **sampling)
    found = outputs.finish()
    assert [found[str(i)] for i in some] == [expected[i][:KERNEL_TOKENS] for i in some]


def test_a_prompt_continued_with_its_output_goes_on_as_it_would_have() -> None:
    llm = LLM(max_model_len=512)
    sampling = {"temperature": 1.0, "seed": 11, "ignore_eos": True}
    prompt = llm.tokenizer.encode(load_prompts(1)[0].prompt)
    whole = llm.generate([prompt], max_tokens=40, **sampling)[0].token_ids
    rest = llm.generate([prompt + whole[:17]], max_tokens=23, **sampling)[0].token_ids
    assert whole[17:] == rest


def test_the_comparison_sees_a_wrong_token_and_a_missing_one(asked: list[Request], expected: list[list[int]]) -> None:
    wrong = [*expected[0][:5], (expected[0][5] + 1) % 1024, *expected[0][6:]]
    found = partings(asked[:1], expected[:1], [wrong])
    assert [(each.position, each.is_tie) for each in found] == [(5, False)]
    assert not partings(asked[:1], expected[:1], [expected[0][:-1]])[0].is_tie
