"""Sampling parameters from outside: types, bounds, and what the messages say."""

import pytest

from dflash_backend.messages import SamplingParams
from dflash_backend.sampling_params import LOWEST_TEMPERATURE, ParameterError, parse_sampling_params


def parse(max_speculative_tokens: int | None = 7, **values):
    return parse_sampling_params(values, max_speculative_tokens=max_speculative_tokens)


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


@pytest.mark.parametrize(
    "neutral",
    [
        {"n": 1},
        {"n": "1"},
        {"presence_penalty": 0, "frequency_penalty": "0.0", "repetition_penalty": 1.0},
        {"logit_bias": {}, "logprobs": None},
    ],
)
def test_parameters_of_a_later_version_may_have_their_neutral_values(neutral):
    assert parse(**neutral) == SamplingParams()


@pytest.mark.parametrize(
    ("name", "value"),
    [("n", 2), ("presence_penalty", 0.5), ("repetition_penalty", 1.1), ("logit_bias", {"5": 1}), ("logprobs", 3)],
)
def test_other_values_of_those_say_that_they_are_not_served(name, value):
    with pytest.raises(ParameterError, match=f"'{name}' has the value .* this version does not serve it"):
        parse(**{name: value})


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
    with pytest.raises(ParameterError, match="the sampling parameters are: max_tokens, "):
        parse(xyzzy=5)
