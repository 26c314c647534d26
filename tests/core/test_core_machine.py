"""Hypothesis chooses config, arrivals, cancels, stops, time and overlap; what breaks an invariant shrinks to a
short script."""

from __future__ import annotations

from checked_engine import CheckedEngine
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from toy_core import EOS, make_config, make_request

from tests.scale import scaled

STEMS = ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [1, 2, 3, 4, 9, 9, 9, 9, 9, 9, 9, 9])
MAX_MODEL_LEN = 36


class EngineMachine(RuleBasedStateMachine):
    """Any order of arrivals, steps, cancels and stops on a small pool keeps every invariant and every output."""

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        spare_blocks=st.integers(0, 8),
        k=st.sampled_from([0, 1, 3]),
        budget=st.integers(0, 30),
        prefill=st.sampled_from([None, 1, 5]),
        window=st.sampled_from([MAX_MODEL_LEN, 20, 500]),
        caching=st.sampled_from([True, True, False]),
        lag=st.sampled_from([None, 0, 1, 2]),
        weights=st.sampled_from([{}, {"a": 3.0, "b": 0.25}]),
        max_step_s=st.sampled_from([None, 0.5]),
    )
    def start(
        self,
        block_size: int,
        spare_blocks: int,
        k: int,
        budget: int,
        prefill: int | None,
        window: int,
        caching: bool,
        lag: int | None,
        weights: dict[str, float],
        max_step_s: float | None,
    ) -> None:
        config = make_config(
            block_size=block_size,
            num_blocks=MAX_MODEL_LEN // block_size + spare_blocks,
            num_speculative_tokens=k,
            max_num_batched_tokens=1 + k + budget,
            max_prefill_tokens_per_step=prefill,
            min_prefill_tokens_per_step=4,
            max_model_len=MAX_MODEL_LEN,
            drafter_max_len=window,
            max_num_seqs=4,
            enable_prefix_caching=caching,
            tenant_weights=weights,
            max_step_s=max_step_s,
        )
        self.engine = CheckedEngine(config, None if lag is None else lambda: lag)

    @rule(
        stem=st.sampled_from(STEMS),
        shared=st.integers(0, 12),
        tail=st.lists(st.integers(1, 3), min_size=1, max_size=4),
        seed=st.integers(0, 3),
        temperature=st.sampled_from([0.0, 1.0]),
        max_tokens=st.integers(1, 20),
        min_tokens=st.sampled_from([0, 0, 1]),
        salt=st.sampled_from(["", "", "other"]),
        k=st.sampled_from([None, None, 0, 1]),
        deadline_s=st.sampled_from([0.0, 0.0, 6.0]),
        tenant=st.sampled_from(["", "", "a", "b"]),
        priority=st.sampled_from([0, 0, 1, 101]),
    )
    def arrive(
        self,
        stem: list[int],
        shared: int,
        tail: list[int],
        seed: int,
        temperature: float,
        max_tokens: int,
        min_tokens: int,
        salt: str,
        k: int | None,
        deadline_s: float,
        tenant: str,
        priority: int,
    ) -> None:
        allowed = self.engine.core.config.num_speculative_tokens
        self.engine.add(
            make_request(
                f"r{len(self.engine.requests)}",
                stem[:shared] + tail,
                seed=seed,
                temperature=temperature,
                max_tokens=max_tokens,
                min_tokens=min_tokens,
                eos_token_ids=(EOS,),
                cache_salt=salt,
                num_speculative_tokens=k if k is None else min(k, allowed),
                deadline_s=deadline_s,
                tenant=tenant,
                priority=priority,
            )
        )

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
    max_examples=scaled(120, at_least=40), stateful_step_count=30, deadline=None, derandomize=True
)
