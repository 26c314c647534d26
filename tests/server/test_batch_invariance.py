"""`batch_invariant` through Triton: in bfloat16 a text does not depend on the requests beside it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from dflash_client import DFlashClient
from load_tests.prompts import load_prompts
from tests.server.conftest import new_server

MAX_TOKENS = 48
NUM_PROMPTS = 24


@pytest.mark.slow
@pytest.mark.nightly
def test_greedy_texts_in_bfloat16_are_the_same_alone_and_in_a_batch() -> None:
    prompts = [row.prompt for row in load_prompts(NUM_PROMPTS)]
    settings = {"dtype": "bfloat16", "batch_invariant": "true", "max_num_seqs": "16", "adaptive_speculation": "true"}

    def answer(prompt: str) -> tuple[str, float | None]:
        """The text, and what the log-probabilities of its tokens add up to."""
        found = client.generate(prompt, max_tokens=MAX_TOKENS, temperature=0, logprobs=0)
        return found.text, found.cumulative_logprob

    with new_server(settings) as server, DFlashClient(server.grpc_url, "grpc", timeout_s=120) as client:
        alone = [answer(prompt) for prompt in prompts]
        with ThreadPoolExecutor(NUM_PROMPTS) as pool:
            together = list(pool.map(answer, prompts))
    assert together == alone
    assert all(logprob is not None for _, logprob in alone)
