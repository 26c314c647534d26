"""The target and drafter of the core's tests: arithmetic on prefix states in place of a network.

A *prefix state* is a number that stands for the salt of a request and for all of its tokens up to a position. The
target's next token is a function of it and, for a sampled request, of its seed and the token's position. A draft is
accepted if it is that token.

`expected_output` is what a request must yield, worked out without an engine: no blocks, no batches, no queue.
"""

from __future__ import annotations

from itertools import accumulate

from dflash_backend.core.scheduler_config import SchedulerConfig
from dflash_backend.messages import GenerationRequest

VOCAB = 50
EOS = 0
ACCEPTANCE_PERCENT = (0, 35, 75, 100)  # by the request's seed
NONE_ACCEPTED, ALL_ACCEPTED = 0, 3  # such seeds


def root_state(salt: str = "") -> int:
    """The prefix state before the first token."""
    return hash((17, *map(ord, salt)))


def next_state(state: int, token_id: int) -> int:
    """The prefix state after one token more. Hashes of integers are the same in every process."""
    return hash((state, token_id))


def prefix_states(token_ids: list[int], state: int) -> list[int]:
    """The state after each of `token_ids`, from the state before them."""
    return list(accumulate(token_ids, next_state, initial=state))[1:]


def greedy_token(state: int) -> int:
    """The target's most likely token after a prefix, whatever its salt."""
    return hash((11, state)) % VOCAB


def target_token(seed: int, greedy: bool, position: int, state: int) -> int:
    """The target's own token at `position`, from the state before it."""
    return greedy_token(state) if greedy else hash((13, seed, position, state)) % VOCAB


def verify(seed: int, greedy: bool, position: int, state: int, drafts: list[int]) -> list[int]:
    """The accepted drafts and the token after them, from the state of the anchor; `position` is the first draft's."""
    tokens: list[int] = []
    for draft in drafts:
        tokens.append(target_token(seed, greedy, position, state))
        if tokens[-1] != draft:
            return tokens
        state = next_state(state, draft)
        position += 1
    return [*tokens, target_token(seed, greedy, position, state)]


def propose(seed: int, greedy: bool, anchor: int, state: int, k: int) -> list[int]:
    """k drafts after the anchor at position `anchor`, from its state."""
    drafts, anchor_state = [], state
    for i in range(k):
        token = hash((15, seed, anchor_state, anchor, i)) % VOCAB
        if hash((16, seed, anchor, i)) % 100 < ACCEPTANCE_PERCENT[seed % 4]:
            token = target_token(seed, greedy, anchor + 1 + i, state)
        drafts.append(token)
        state = next_state(state, token)
    return drafts


def greedy_continuation(prompt: list[int], count: int) -> list[int]:
    """What the target alone yields."""
    state, tokens = prefix_states(prompt, root_state())[-1], []
    for _ in range(count):
        tokens.append(greedy_token(state))
        state = next_state(state, tokens[-1])
    return tokens


def expected_output(
    request: GenerationRequest, config: SchedulerConfig, seed: int | None = None
) -> tuple[list[int], str]:
    """The output and its finish reason; `seed` is the resolved one where the request has none.

    Drafts do not come into it. The rules for the end of a request are written down a second time.
    """
    sampling, prompt = request.sampling, request.prompt_token_ids
    seed = sampling.seed if seed is None else seed
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(request.eos_token_ids))
    state = prefix_states(prompt, root_state())[-1]
    output: list[int] = []
    while True:
        output.append(target_token(seed, sampling.greedy, len(prompt) + len(output), state))
        state = next_state(state, output[-1])
        if output[-1] in stops and len(output) >= sampling.min_tokens:
            return output, "stop"
        if len(output) >= sampling.max_tokens or len(prompt) + len(output) >= config.max_model_len:
            return output, "length"
