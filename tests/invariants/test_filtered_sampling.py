"""Sampling with top-k, top-p and min-p at a temperature has the very distribution that the target alone would have, on
both runners, while drafts are verified: against `transformers` and cuts in plain Python."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch
from scipy.stats import chisquare

from checks.sampling import PROMPT
from dflash_backend import LLM
from dflash_backend.config import asset_path
from tests.kernels.test_sampling import by_hand
from tests.support.scale import SCALE, by_night
from tests.worker.engines import Outputs, engine, on_device_runner

SAMPLING = {"temperature": 4.0, "top_k": 5, "top_p": 0.8, "min_p": 0.1}
NUM_TOKENS = 3
NUM_SAMPLES = 1500 if SCALE >= 4 else 800
MIN_EXPECTED = 5.0


@cache
def exact() -> tuple[list[int], dict[tuple[int, ...], float]]:
    """The prompt, and the probabilities of all that may follow it."""
    from transformers import AutoModelForCausalLM

    prompt = LLM(draft="").tokenizer.encode(PROMPT)
    model = AutoModelForCausalLM.from_pretrained(asset_path("demo", "pair", "target"), dtype=torch.float32).eval()
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(NUM_TOKENS):
        with torch.inference_mode():
            ids = torch.tensor([[*prompt, *prefix] for prefix in found])
            logits = model(ids, logits_to_keep=1).logits[:, -1].tolist()
        longer: dict[tuple[int, ...], float] = {}
        for (prefix, weight), row in zip(found.items(), logits, strict=True):
            for token, probability in enumerate(by_hand(row, **SAMPLING)):
                if probability > 0.0:
                    longer[(*prefix, token)] = weight * probability
        found = longer
    return prompt, found


@pytest.mark.slow
@pytest.mark.parametrize("runner", [by_night("cpu"), "device"])
def test_sampling_with_every_cut_has_the_distribution_of_the_cut_target(runner: str) -> None:
    prompt, expected = exact()
    settings = {"num_speculative_tokens": 3, "max_num_seqs": 128, "max_model_len": 64, "kv_write_guard": False}
    built = engine(**settings)
    if runner == "device":
        built = on_device_runner(built)
    outputs = Outputs(built)
    for seed in range(NUM_SAMPLES):
        outputs.add(str(seed), prompt, max_tokens=NUM_TOKENS, seed=seed, ignore_eos=True, **SAMPLING)
        if seed % 400 == 399:
            while built.core.has_unfinished():
                outputs.step()
    counts = Counter(map(tuple, outputs.tokens.values()))
    assert counts.keys() <= expected.keys(), "tokens that are cut never come"
    assert built.core.stats().spec_decoding.num_accepted_tokens > NUM_SAMPLES / 20
    common = [tokens for tokens, chance in expected.items() if chance * NUM_SAMPLES >= MIN_EXPECTED]
    observed = [counts[tokens] for tokens in common]
    likely = [expected[tokens] * NUM_SAMPLES for tokens in common]
    assert len(common) >= 10
    rest = [NUM_SAMPLES - sum(observed)], [NUM_SAMPLES - sum(likely)]
    if rest[1][0] > 1.0:
        observed, likely = observed + rest[0], likely + rest[1]
    scale = sum(observed) / sum(likely)
    assert chisquare(observed, [chance * scale for chance in likely]).pvalue > 0.01
