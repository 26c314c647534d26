"""A server that drafts as many tokens as pay."""

from __future__ import annotations

from checks.server_state import MetricsPage
from dflash_client import DFlashClient
from tests.server.conftest import new_server

PROMPTS = [f"What is {a} + {b}?" for a, b in [(3, 4), (12, 9), (25, 31), (7, 70)]]
ASKED = {"max_tokens": 48, "temperature": 0.8, "seed": 4}


def test_texts_are_those_of_a_server_that_always_drafts_and_metrics_say_what_was_expected() -> None:
    texts = []
    for setting in ("true", "false"):
        with new_server({"adaptive_speculation": setting}) as server, DFlashClient(server.grpc_url) as client:
            texts.append([client.generate(prompt, **ASKED).text for prompt in PROMPTS for _ in range(3)])
            page = MetricsPage.read(server.metrics_url)
            steps = page.value("dflash:spec_decode_num_steps_total")
            assert (steps > 0) == (setting == "true")
            if setting == "true":
                expected = page.value("dflash:spec_decode_num_expected_tokens_per_pos_total")
                verified = page.value("dflash:spec_decode_num_draft_tokens_per_pos_total")
                assert 0 < expected < verified == page.value("dflash:spec_decode_num_draft_tokens_total")
    assert texts[0] == texts[1]
