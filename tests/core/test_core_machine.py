"""Hypothesis chooses config, arrivals, cancels, stops, time and overlap; what breaks an invariant shrinks to a
short script."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.core.checked_engine import CheckedEngine
from tests.core.toy_engine import fewest_window_blocks, make_config, make_request
from tests.core.toy_model import EOS
from tests.support.scale import SCALE, scaled

STEMS = ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [1, 2, 3, 4, 9, 9, 9, 9, 9, 9, 9, 9])
MAX_MODEL_LEN = 36


class EngineMachine(RuleBasedStateMachine):
    """Any order of arrivals, steps, cancels and stops on a small pool keeps every invariant and every output."""

    @initialize(
        limits=st.fixed_dictionaries(
            {
                "block_size": st.sampled_from([1, 2, 4]),
                "num_speculative_tokens": st.sampled_from([0, 1, 3]),
                "adaptive_speculation": st.booleans(),
                "reads_next_tokens": st.booleans(),
                "max_prefill_tokens_per_step": st.sampled_from([None, 1, 5]),
                "drafter_max_len": st.sampled_from([MAX_MODEL_LEN, 20, 500]),
                "enable_prefix_caching": st.sampled_from([True, True, False]),
                "num_state_snapshots": st.sampled_from([None, None, 0, 1, 3]),
                "sliding_window": st.sampled_from([0, 0, 1, 3, 10]),
                "tenant_weights": st.sampled_from([{}, {"a": 3.0, "b": 0.25}]),
                "max_step_s": st.sampled_from([None, 0.5]),
            }
        ),
        spare_blocks=st.integers(0, 8),
        spare_tokens=st.integers(0, 30),
        spare_window_blocks=st.integers(0, 8),
        lag=st.sampled_from([None, 0, 1, 2]),
    )
    def start(
        self, limits: dict[str, Any], spare_blocks: int, spare_tokens: int, spare_window_blocks: int, lag: int | None
    ) -> None:
        config = make_config(
            num_blocks=MAX_MODEL_LEN // limits["block_size"] + spare_blocks,
            max_num_batched_tokens=1 + limits["num_speculative_tokens"] + spare_tokens,
            min_prefill_tokens_per_step=4,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=4,
            **limits,
        )
        if limits["sliding_window"]:
            least = fewest_window_blocks(config)
            config = replace(config, num_window_blocks=least + spare_window_blocks)
        self.engine = CheckedEngine(config, lag)
        self.engine.worker.target_s = lambda plan: 0.01 * (4 + plan.num_tokens)

    @rule(
        stem=st.sampled_from(STEMS),
        shared=st.integers(0, 12),
        tail=st.lists(st.integers(1, 3), min_size=1, max_size=4),
        k=st.sampled_from([None, None, 0, 1]),
        sampling=st.fixed_dictionaries(
            {
                "seed": st.integers(0, 3),
                "temperature": st.sampled_from([0.0, 1.0]),
                "max_tokens": st.integers(1, 20),
                "min_tokens": st.sampled_from([0, 0, 1]),
                "cache_salt": st.sampled_from(["", "", "other"]),
                "deadline_s": st.sampled_from([0.0, 0.0, 6.0]),
                "tenant": st.sampled_from(["", "", "a", "b"]),
                "priority": st.sampled_from([0, 0, 1, 101]),
            }
        ),
    )
    def arrive(self, stem: list[int], shared: int, tail: list[int], k: int | None, sampling: dict[str, Any]) -> None:
        name = f"r{len(self.engine.requests)}"
        k = k and min(k, self.engine.core.config.num_speculative_tokens)
        prompt = stem[:shared] + tail
        self.engine.add(make_request(name, prompt, eos_token_ids=(EOS,), num_speculative_tokens=k, **sampling))

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.clock.now += 1.0
            self.engine.step()

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data(), aborts=st.booleans())
    def end_one(self, data: st.DataObject, aborts: bool) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.engine.requests)))
        (self.engine.abort if aborts else self.engine.stop)(request_id)

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.finish()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=scaled(120 if SCALE >= 4 else 60, at_least=40), stateful_step_count=30, deadline=None, derandomize=True
)
