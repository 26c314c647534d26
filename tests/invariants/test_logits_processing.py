"""Penalties, logit bias, bad words, `min_tokens` and log-probabilities, against `transformers` on the demo pair.

The reference is plain Python over the logits that `transformers` has for prompt and output in one pass. A greedy output
is right when every token is the best one after those before it; by induction it is then what a loop over the reference
yields, token by token.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM, AutoTokenizer

from checks.sampling import DRAFT_TEMPERATURE_RATIOS
from checks.sampling import QUESTION as OPEN_QUESTION
from dflash_backend import LLM, SamplingParams
from dflash_backend.config import asset_path
from dflash_backend.engine.llm import Completion, RequestOutput
from dflash_backend.messages import TokenLogprobs
from tests.support.scale import SCALE, by_night, scaled

QUESTION = "Sam fills 4 bags with 6 marbles each and gives away 7 marbles. How many marbles does Sam keep?"
STORY = "<|im_start|>user\nTell me something about Norway and Japan<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = [QUESTION, STORY]
EOS = 2
PENALTIES = {
    "repetition": {"repetition_penalty": 1.8},
    "repetition below 1": {"repetition_penalty": 0.8},
    "frequency": {"frequency_penalty": 1.5},
    "negative frequency": {"frequency_penalty": -2.0, "repetition_penalty": 1.5},
    "presence": {"presence_penalty": 2.0},
    "negative presence": {"presence_penalty": -2.0, "logit_bias": {338: 10.0}},
    "bias": {"logit_bias": {18: 6.0, 202: -9.5, 338: -100.0}},
    "allowed": {"allowed_token_ids": (EOS, *range(3, 900, 2))},
    "bad words": {"bad_words": (".", "Sam", "Norway is", "Step 1: Sam", "the")},
    "all": {
        "repetition_penalty": 1.4,
        "frequency_penalty": 0.9,
        "presence_penalty": 0.6,
        "logit_bias": {18: 8.0, 12: 4.0},
        "min_tokens": 30,
    },
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(adaptive_speculation=False, max_num_seqs=8, max_model_len=512)


@cache
def target() -> Any:
    return AutoModelForCausalLM.from_pretrained(asset_path("demo", "pair", "target"), dtype=torch.float32).eval()


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(asset_path("demo", "pair", "target"))


def raw_logits(prompt: list[int], output: list[int]) -> torch.Tensor:
    """What the target says before each token of `output`: `[len(output), vocab]`."""
    with torch.inference_mode():
        logits: torch.Tensor = target()(torch.tensor([prompt + output])).logits[0]
    return logits[len(prompt) - 1 : -1]


def stops(params: SamplingParams) -> list[int]:
    return [*params.stop_token_ids] if params.ignore_eos else [EOS, *params.stop_token_ids]


def processed(logits: torch.Tensor, prompt: list[int], output: list[int], params: SamplingParams) -> torch.Tensor:
    """`logits` `[vocab]` as a request with `params` sees them after `output`, token by token."""
    logits = logits.clone()
    if params.allowed_token_ids is not None:
        others = torch.ones_like(logits, dtype=torch.bool)
        others[list(params.allowed_token_ids)] = False
        logits[others] = float("-inf")
    for word in params.bad_words:
        for form in (word, f" {word}"):
            *before, last = tokenizer().encode(form, add_special_tokens=False)
            if output[len(output) - len(before) :] == before:
                logits[last] = float("-inf")
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    if len(output) < params.min_tokens:
        logits[stops(params)] = float("-inf")
    for token in set(prompt) | set(output):
        penalty = params.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token, count in Counter(output).items():
        logits[token] -= params.frequency_penalty * count + params.presence_penalty
    return logits


def assert_greedy(output: RequestOutput, params: SamplingParams) -> None:
    prompt, tokens = output.prompt_token_ids, output.token_ids
    logits = raw_logits(prompt, tokens)
    for i, token in enumerate(tokens):
        assert processed(logits[i], prompt, tokens[:i], params).argmax() == token, f"token {i} of {tokens}"
    assert len(tokens) == params.max_tokens or tokens[-1] in stops(params)


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[list[int]]:
    """The prompts' greedy texts without changes."""
    return [output.token_ids for output in llm.generate(PROMPTS, max_tokens=48, temperature=0)]


# Each with drafts, and without them one of a kind; `make nightly` has all.
CHANGES: list[Any] = [
    by_night(name, 15) if name in ("repetition below 1", "negative frequency", "negative presence") else (name, 15)
    for name in PENALTIES
]
CHANGES += [(name, 0) for name in ("bias", "allowed", "bad words", "all")]
if SCALE >= 4:
    others = [name for name in PENALTIES if (name, 0) not in CHANGES]
    CHANGES += [pytest.param(name, 0, marks=pytest.mark.slow) for name in others]


@pytest.mark.parametrize(("name", "k"), CHANGES)
def test_greedy_output_is_the_argmax_of_the_changed_logits_at_every_position(
    llm: LLM, plain: list[list[int]], name: str, k: int
) -> None:
    changes = PENALTIES[name]
    params = SamplingParams(max_tokens=48, temperature=0.0, num_speculative_tokens=k, **changes)
    outputs = llm.generate(PROMPTS, params)
    for output in outputs:
        assert_greedy(output, params)
    if k > 0:
        assert sum(output.stats.spec_decoding.num_accepted_tokens for output in outputs if output.stats) > 0
    assert [output.token_ids for output in outputs] != plain


@pytest.mark.slow
def test_penalties_survive_preemption_and_do_not_touch_their_neighbours() -> None:
    tight = LLM(adaptive_speculation=False, max_num_seqs=8, max_model_len=256, kv_cache_gb=0.0016, kv_write_guard=True)
    asked = [*PENALTIES.values(), {}, {}, {}]
    params = [SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True, **changes) for changes in asked]
    outputs = tight.generate([QUESTION] * len(params), params)
    assert tight.stats().num_preemptions > 0
    for output, one in zip(outputs, params, strict=True):
        assert_greedy(output, one)


@pytest.mark.slow
def test_a_penalised_sampled_request_draws_the_same_after_preemption(llm: LLM) -> None:
    sampling = PENALTIES["all"] | {"max_tokens": 60, "temperature": 1.3, "logprobs": 2}
    params = [sampling | {"seed": seed} for seed in range(8)]
    tight = LLM(adaptive_speculation=False, max_num_seqs=8, max_model_len=256, kv_cache_gb=0.0016, kv_write_guard=True)
    preempted = tight.generate([QUESTION] * 8, params)
    assert tight.stats().num_preemptions > 0
    calm = llm.generate([QUESTION] * 8, params)
    assert [output.token_ids for output in preempted] == [output.token_ids for output in calm]
    for output in sorted(preempted, key=lambda output: -output.stats.num_preemptions if output.stats else 0)[:2]:
        check_logprobs(output, output.prompt_token_ids, 2)


def test_a_prefix_hit_changes_nothing(llm: LLM) -> None:
    params = SamplingParams(max_tokens=32, temperature=0.0, repetition_penalty=1.8, presence_penalty=1.0)
    prompt = llm.tokenizer.encode(STORY * 3)
    llm.generate(prompt, max_tokens=1)
    output = llm.generate(prompt, params)[0]
    assert output.stats is not None
    assert output.stats.num_cached_tokens >= 16
    assert_greedy(output, params)


def test_min_tokens_refuses_stop_tokens_that_were_drafted(llm: LLM) -> None:
    """Target and drafter agree on where this answer ends, and on the tokens before its end."""
    free = llm.generate(QUESTION, max_tokens=96, temperature=0)[0]
    assert free.token_ids[-1] == EOS
    stop = free.token_ids[-3]
    params = SamplingParams(
        max_tokens=96, temperature=0.0, stop_token_ids=(stop,), min_tokens=len(free.token_ids) + 5, logprobs=1
    )
    output = llm.generate(QUESTION, params)[0]
    assert_greedy(output, params)
    assert output.logprobs is not None
    hidden = [entry.token_ids[-1] for entry in output.logprobs if entry.ranks[0] > 1]
    assert {stop, EOS} >= set(hidden)
    assert len(hidden) > 1


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_bias_of_100_always_wins_and_of_minus_100_never(llm: LLM, temperature: float) -> None:
    argmax = llm.generate(STORY, max_tokens=1, temperature=0)[0].token_ids[0]
    for seed in range(scaled(8 if SCALE >= 4 else 3, at_least=3) if temperature else 1):
        forced = llm.generate(STORY, max_tokens=12, temperature=temperature, seed=seed, logit_bias={77: 100})[0]
        assert forced.token_ids == [77] * 12
        params = {"max_tokens": 24, "temperature": temperature, "seed": seed, "logit_bias": {argmax: -100}}
        assert argmax not in llm.generate(STORY, params)[0].token_ids


# " the" and " and" are made so likely that they often come twice, which the penalties then make less likely.
SAMPLED = SamplingParams(
    max_tokens=3,
    temperature=2.0,
    ignore_eos=True,
    repetition_penalty=1.2,
    frequency_penalty=1.5,
    presence_penalty=0.5,
    logit_bias={278: 13.0, 282: 13.0},
)
NUM_SAMPLES = scaled(1_500, at_least=1_500)
MIN_EXPECTED = 5.0


def exact_distribution(prompt: list[int], params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Probabilities of all continuations of three tokens that are expected at least `MIN_EXPECTED` times."""
    prefixes: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer: dict[tuple[int, ...], float] = {}
        with torch.inference_mode():
            logits = target()(torch.tensor([[*prompt, *prefix] for prefix in prefixes]), logits_to_keep=1).logits[:, -1]
        for (prefix, weight), row in zip(prefixes.items(), logits, strict=True):
            changed = processed(row, prompt, list(prefix), params).double()
            probs = (changed / params.temperature).softmax(dim=-1)
            for token in (probs * weight >= MIN_EXPECTED / NUM_SAMPLES).nonzero().flatten().tolist():
                longer[(*prefix, token)] = weight * probs[token].item()
        prefixes = longer
    return prefixes


@pytest.mark.slow
@pytest.mark.parametrize("ratio", DRAFT_TEMPERATURE_RATIOS if SCALE >= 4 else DRAFT_TEMPERATURE_RATIOS[-1:])
def test_sampled_output_has_the_distribution_of_the_changed_logits(ratio: float) -> None:
    llm = LLM(
        draft_temperature_ratio=ratio,
        num_speculative_tokens=3,
        adaptive_speculation=False,
        max_num_seqs=256,
        max_model_len=128,
    )
    prompt = llm.tokenizer.encode(OPEN_QUESTION + "One")
    exact = exact_distribution(prompt, SAMPLED)
    repeats = sum(probability for tokens, probability in exact.items() if len(set(tokens)) < 3)
    assert repeats > 0.2, "the test needs continuations that penalties on drafts change"
    seeded = [msgspec.structs.replace(SAMPLED, seed=seed) for seed in range(NUM_SAMPLES)]
    counts = Counter(tuple(output.token_ids) for output in llm.generate([prompt] * NUM_SAMPLES, seeded))
    observed = [counts[tokens] for tokens in exact]
    expected = [probability * NUM_SAMPLES for probability in exact.values()]
    observed.append(NUM_SAMPLES - sum(observed))
    expected.append(NUM_SAMPLES - sum(expected))
    assert len(expected) >= 15
    assert llm.stats().spec_decoding.num_accepted_tokens > NUM_SAMPLES / 20
    assert chisquare(observed, expected).pvalue > 0.01


def check_logprobs(completion: Completion | RequestOutput, prompt: list[int], num_top: int) -> None:
    """Every entry against log-softmax of what `transformers` says at its place."""
    tokens = completion.token_ids
    assert completion.logprobs is not None
    assert [entry.token_ids[0] for entry in completion.logprobs] == tokens
    for entry, expected in zip(completion.logprobs, raw_logits(prompt, tokens).log_softmax(dim=-1), strict=True):
        check_entry(entry, expected, num_top)
    total = sum(entry.logprobs[0] for entry in completion.logprobs)
    assert completion.cumulative_logprob == pytest.approx(total)


def check_entry(entry: TokenLogprobs, expected: torch.Tensor, num_top: int) -> None:
    assert torch.tensor(entry.logprobs) == pytest.approx(expected[entry.token_ids], abs=1e-4)
    own = expected[entry.token_ids[0]]
    # Tokens that are equally likely up to rounding may change places.
    assert (expected > own + 1e-4).sum() < entry.ranks[0] <= (expected > own - 1e-4).sum()
    by_rank = sorted(zip(entry.ranks, entry.token_ids, strict=True))
    assert [rank for rank, _ in by_rank][:num_top] == list(range(1, num_top + 1))
    assert len(set(entry.token_ids)) == len(entry.token_ids) == num_top + (entry.ranks[0] > num_top)
    top = [token for _, token in by_rank][:num_top]
    assert expected[top] == pytest.approx(expected.topk(num_top).values, abs=1e-4)


@pytest.mark.parametrize("k", [0, 15])
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_logprobs_of_accepted_and_following_tokens_are_the_models_own(llm: LLM, temperature: float, k: int) -> None:
    sampling = {"max_tokens": 40, "temperature": temperature, "seed": 5, "num_speculative_tokens": k}
    outputs = llm.generate(
        [QUESTION, STORY, QUESTION, STORY],
        [sampling | changes for changes in ({"logprobs": 4}, {"logprobs": 0}, {}, {"logprobs": 20})],
    )
    for output, num_top in zip(outputs, (4, 0, None, 20), strict=True):
        if num_top is None:
            assert output.logprobs is None
            assert output.cumulative_logprob is None
        else:
            check_logprobs(output, output.prompt_token_ids, num_top)
    if k > 0:
        assert all(output.stats.spec_decoding.num_accepted_tokens > 0 for output in outputs if output.stats)


def test_asking_for_logprobs_does_not_change_the_output(llm: LLM) -> None:
    sampling = {"max_tokens": 40, "temperature": 1.3, "seed": 11}
    silent, telling = llm.generate([STORY] * 2, [sampling, sampling | {"logprobs": 7}])
    assert silent.token_ids == telling.token_ids


def test_logprobs_are_those_before_penalties_and_bias(llm: LLM) -> None:
    changes = PENALTIES["all"] | {"logprobs": 3}
    output = llm.generate(STORY, max_tokens=40, temperature=0, **changes)[0]
    check_logprobs(output, output.prompt_token_ids, 3)
    assert output.logprobs is not None
    assert max(entry.ranks[0] for entry in output.logprobs) > 1


def test_each_request_gets_the_tokens_that_it_names(llm: LLM) -> None:
    """Beside one that wants the likeliest, in the same steps and with drafts that are accepted."""
    sampling = {"max_tokens": 12, "temperature": 0}
    named = llm.generate(
        [QUESTION] * 3,
        [sampling | {"logprobs": 3, "logprob_token_ids": ids} for ids in ([300, 7], [5], [])],
    )
    for output, ids in zip(named, ([300, 7], [5], None), strict=True):
        assert output.logprobs is not None
        assert output.token_ids == named[2].token_ids
        for entry, token in zip(output.logprobs, output.token_ids, strict=True):
            assert entry.token_ids[0] == token
            assert len(set(entry.token_ids)) == len(entry.token_ids)
            assert ids is None or set(entry.token_ids) == {token, *ids}
    first = [dict(zip(entry.token_ids, entry.logprobs, strict=True)) for entry in named[0].logprobs or ()]
    likeliest = [dict(zip(entry.token_ids, entry.logprobs, strict=True)) for entry in named[2].logprobs or ()]
    for here, there in zip(first, likeliest, strict=True):
        for token in here.keys() & there.keys():
            assert here[token] == pytest.approx(there[token], abs=1e-4)
        assert here[300] <= max(there.values())


def test_logprobs_end_with_the_output(llm: LLM) -> None:
    """Drafts past the end that `max_tokens` makes were accepted, and are not told of."""
    for changes in ({"max_tokens": 96}, {"max_tokens": 7}):
        output = llm.generate(QUESTION, temperature=0, logprobs=1, **changes)[0]
        assert output.logprobs is not None
        assert len(output.logprobs) == len(output.token_ids)
