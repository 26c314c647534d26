"""Sampling parameters from outside: types, bounds, and what the messages say."""

import pytest

from dflash_backend.messages import ENCODER, ENGINE_INPUT, GenerationRequest, SamplingParams
from dflash_backend.sampling_params import (
    INT64_MAX,
    LOWEST_TEMPERATURE,
    MAX_LOGPROBS,
    ParameterError,
    child,
    parse_sampling_params,
)


def parse(max_speculative_tokens: int | None = 7, **values):
    return parse_sampling_params(values, max_speculative_tokens=max_speculative_tokens, vocab_size=100, max_n=8)


def test_nothing_given_is_the_defaults():
    assert parse() == SamplingParams()
    assert parse(temperature=None, stop=None, seed=None) == SamplingParams()


def test_numbers_and_booleans_may_be_text():
    params = parse(max_tokens="64", temperature="0.5", top_k="20", ignore_eos="true", skip_special_tokens="False")
    assert params == SamplingParams(
        max_tokens=64, temperature=0.5, top_k=20, ignore_eos=True, skip_special_tokens=False
    )


@pytest.mark.parametrize(
    ("value", "stops"),
    [("END", ("END",)), (["a", "b"], ("a", "b")), ('["a", "b"]', ("a", "b")), ("[x", ("[x",)), ([], ())],
)
def test_stop_is_a_string_or_a_list_or_a_list_in_a_string(value, stops):
    assert parse(stop=value).stop == stops


@pytest.mark.parametrize("value", [[5, 6], "[5, 6]", ("5", 6)])
def test_stop_token_ids_are_a_list_or_a_list_in_a_string(value):
    assert parse(stop_token_ids=value).stop_token_ids == (5, 6)


def test_minus_one_is_all_tokens_and_the_servers_seed():
    params = parse(top_k=-1, seed=-1)
    assert (params.top_k, params.seed) == (0, None)


def test_a_tiny_temperature_is_raised_and_zero_stays_greedy():
    assert parse(temperature=1e-9).temperature == LOWEST_TEMPERATURE
    assert parse(temperature=0).greedy


def test_names_of_triton_are_skipped():
    assert parse(triton_anything="x") == SamplingParams()


def test_penalties_bias_logprobs_and_n_may_be_text():
    params = parse(
        n="3",
        presence_penalty="-0.5",
        frequency_penalty="2",
        repetition_penalty="1.1",
        logit_bias='{"17": -100, "5": "1.5"}',
        logprobs="0",
    )
    assert params == SamplingParams(
        n=3,
        presence_penalty=-0.5,
        frequency_penalty=2.0,
        repetition_penalty=1.1,
        logit_bias={17: -100.0, 5: 1.5},
        logprobs=0,
    )


@pytest.mark.parametrize("value", [{17: 3}, {"17": 3}, '{"17": 3}'])
def test_logit_bias_is_an_object_or_its_text(value):
    assert parse(logit_bias=value).logit_bias == {17: 3.0}


def test_a_bias_is_cut_to_100_either_way():
    assert parse(logit_bias={"1": 1e9, "2": -101}).logit_bias == {1: 100.0, 2: -100.0}


def test_a_bias_for_no_token_is_refused_where_the_vocabulary_is_known():
    with pytest.raises(
        ParameterError, match="'logit_bias' has the value .*; allowed: token ids from 0 to 99.* not 100"
    ):
        parse(logit_bias={"99": 1, "100": 1})
    unknown = parse_sampling_params({"logit_bias": {"100": 1}}, max_speculative_tokens=None)
    assert unknown.logit_bias == {100: 1.0}


def test_a_long_value_is_quoted_in_part():
    with pytest.raises(ParameterError) as caught:
        parse(stop_token_ids=["x" * 10_000])
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("values", "penalised"),
    [
        ({}, False),
        ({"logit_bias": {"5": 1}, "min_tokens": 3}, False),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"repetition_penalty": 0.9}, True),
    ],
)
def test_only_the_three_penalties_make_a_request_penalised(values, penalised):
    assert parse(**values).penalised is penalised


def test_children_of_a_seeded_request_have_seeds_of_their_own():
    params = SamplingParams(n=3, seed=INT64_MAX, top_p=0.5)
    assert [child(params, index).seed for index in range(3)] == [INT64_MAX, 0, 1]
    assert child(params, 2) == SamplingParams(n=1, seed=1, top_p=0.5)
    assert child(SamplingParams(n=2), 1) == SamplingParams()


def test_what_was_parsed_survives_the_way_to_the_engine():
    params = parse(max_tokens=INT64_MAX, seed=INT64_MAX, logit_bias={"17": -5}, logprobs=3, stop="x")
    request = GenerationRequest("a", [1], params)
    assert ENGINE_INPUT.decode(ENCODER.encode(request)) == request


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", "many"),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("temperature", -0.1),
        ("temperature", "nan"),
        ("temperature", float("inf")),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("min_p", 1.1),
        ("seed", 2**63),
        ("seed", "x"),
        ("stop", ""),
        ("stop", ["a", 1]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["x"]),
        ("ignore_eos", "maybe"),
        ("num_speculative_tokens", 8),
        ("cache_salt", 5),
        ("n", 0),
        ("n", 9),
        ("n", "two"),
        ("presence_penalty", 2.01),
        ("presence_penalty", "nan"),
        ("frequency_penalty", -2.01),
        ("frequency_penalty", True),
        ("repetition_penalty", 0),
        ("repetition_penalty", "inf"),
        ("logprobs", -1),
        ("logprobs", MAX_LOGPROBS + 1),
        ("logprobs", "all"),
        ("logit_bias", "17"),
        ("logit_bias", [17]),
        ("logit_bias", '{"17": -100'),
        ("logit_bias", "[" * 100_000),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1.5": 1}),
        ("logit_bias", {"5": "much"}),
        ("logit_bias", {"5": float("nan")}),
        ("logit_bias", {"5": None}),
        ("max_tokens", INT64_MAX + 1),
        ("top_k", INT64_MAX + 1),
        ("stop_token_ids", [INT64_MAX + 1]),
    ],
)
def test_a_value_that_is_not_allowed_is_named_with_what_is(name, value):
    with pytest.raises(ParameterError, match=f"'{name}' has the value .*; allowed: "):
        parse(**{name: value})


def test_speculation_is_unbounded_where_the_server_is_not_known():
    assert parse(None, num_speculative_tokens=100).num_speculative_tokens == 100


def test_an_unknown_name_gets_the_nearest_valid_one():
    with pytest.raises(ParameterError, match="unknown sampling parameter 'max_token'; did you mean 'max_tokens'"):
        parse(max_token=5)
    with pytest.raises(ParameterError, match="the sampling parameters are: n, max_tokens, "):
        parse(xyzzy=5)
