"""Each sampling option of `generate` against its parameter, and what holds where both are given; and what is
told of an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.commands.client_options import sampling_of
from dflash_cli.commands.timing import Report
from dflash_cli.main import parser
from dflash_client import NULL, Completion, GenerationResult, Sampling

# Options with a value each, and the parameter.
CASES: dict[str, tuple[list[str], Any]] = {
    "max_tokens": (["--max-tokens", "3"], 3),
    "temperature": (["--temperature", "0.5"], 0.5),
    "top_p": (["--top-p", "0.25"], 0.25),
    "top_k": (["--top-k", "4"], 4),
    "min_p": (["--min-p", "0.125"], 0.125),
    "seed": (["--seed", "-6"], -6),
    "stop": (["--stop", "a", "--stop", "7"], ["a", "7"]),
    "n": (["--n", "2"], 2),
    "min_tokens": (["--min-tokens", "1"], 1),
    "presence_penalty": (["--presence-penalty", "-1.5"], -1.5),
    "frequency_penalty": (["--frequency-penalty", "1.25"], 1.25),
    "repetition_penalty": (["--repetition-penalty", "1.125"], 1.125),
    "logprobs": (["--logprobs", "5"], 5),
    "num_speculative_tokens": (["--num-speculative-tokens", "0"], 0),
    "enable_thinking": (["--no-thinking"], False),
}


def sampling(*words: str) -> dict[str, Any]:
    return sampling_of(parser().parse_args(["generate", "x", *words]))


def test_every_option_has_a_case() -> None:
    options = vars(parser().parse_args(["generate"])).keys() - {"timeout"}
    assert set(CASES) == options & Sampling.__annotations__.keys()
    assert sampling() == {}


@pytest.mark.parametrize("name", CASES)
def test_an_option_becomes_its_parameter_and_set_param_holds_over_it(name: str) -> None:
    words, value = CASES[name]
    assert sampling(*words) == {name: value}
    for given in ([*words, "--set-param", f"{name}=99"], ["--set-param", f"{name}=99", *words]):
        assert sampling(*given) == {name: "99" if name == "stop" else 99}


def test_null_reaches_the_server_but_for_parameters_that_are_text() -> None:
    assert sampling("--max-tokens", "3", "--set-param", "max_tokens=null") == {"max_tokens": NULL}
    assert sampling("--set-param", "cache_salt=null") == {"cache_salt": "null"}


@pytest.mark.parametrize("option", ["--json-schema", "--regex", "--choice", "--grammar"])
def test_a_format_becomes_the_structured_outputs(option: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text('{"type": "object"}')
    value, found = {
        "--json-schema": (str(file), {"json": {"type": "object"}}),
        "--regex": ("a+", {"regex": "a+"}),
        "--choice": ("yes", {"choice": ["yes"]}),
        "--grammar": (str(file), {"grammar": '{"type": "object"}'}),
    }[option]
    assert sampling(option, value) == {"structured_outputs": found}
    given = json.dumps({"regex": "b"})
    assert sampling(option, value, "--set-param", f"structured_outputs={given}") == {
        "structured_outputs": {"regex": "b"}
    }


def test_speed_is_that_of_all_completions_which_have_unlike_lengths() -> None:
    stats = {"num_drafts": 2, "acceptance_length": 2.5, "num_accepted_tokens": 3, "num_cached_tokens": 4}
    completions = (
        Completion("abc", "length", (1, 2, 3), 3, spec_stats=stats),
        Completion("a", "stop", (1,), 1, spec_stats=stats),
        Completion("abcdefgh", "stop", tuple(range(8)), 8, spec_stats=stats),
    )
    report = Report(GenerationResult(completions, num_input_tokens=20), 0.25, 1.5)
    assert (report.num_output_tokens, report.tokens_per_s) == (12, 8.0)
    told = json.loads(report.as_json())
    assert (told["num_output_tokens"], told["num_input_tokens"], told["tokens_per_s"]) == (3, 20, 8.0)
    assert [one["num_output_tokens"] for one in told["completions"]] == [3, 1, 8]
    text = report.as_text()
    assert "20 in (4 cached), 12 out, finish reason length" in text
    assert "time to first token    250.0 ms" in text
    assert "speed                  8.0 tokens/s over 1.500 s in all" in text
