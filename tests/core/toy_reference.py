"""What a request must yield, worked out without an engine: no blocks, no batches, no queue. Called by the core's tests.

Speculative decoding of one sequence with the arithmetic of `toy_core`, and the rules for k and for the end of a request
written down a second time: all of k or none, none past the drafter's window, none for a last token.
"""

from __future__ import annotations

from toy_core import next_state, prefix_states, propose, root_state, verify

from dflash_backend.core.scheduler_config import SchedulerConfig
from dflash_backend.messages import GenerationRequest


def expected_output(request: GenerationRequest, config: SchedulerConfig, seed: int) -> tuple[list[int], str]:
    """The output and its finish reason; `seed` is the resolved one."""
    sampling, prompt = request.sampling, request.prompt_token_ids
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(request.eos_token_ids))
    k = config.num_speculative_tokens if sampling.num_speculative_tokens is None else sampling.num_speculative_tokens
    window = min(config.drafter_max_len, config.max_model_len)
    state = prefix_states(prompt, root_state())[-1]
    output: list[int] = []
    drafts: list[int] = []
    while True:
        num_tokens = len(prompt) + len(output)
        fits = num_tokens + len(drafts) + 1 + k <= window
        next_k = k if fits and len(output) + 1 < sampling.max_tokens else 0
        for token in verify(seed, sampling.greedy, num_tokens, state, drafts):
            output.append(token)
            state = next_state(state, token)
            if token in stops and len(output) >= sampling.min_tokens:
                return output, "stop"
            if len(output) >= sampling.max_tokens or len(prompt) + len(output) >= config.max_model_len:
                return output, "length"
        drafts = propose(seed, sampling.greedy, len(prompt) + len(output) - 1, state, next_k)
