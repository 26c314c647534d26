"""Each sampling option of `generate` against the parameter that it becomes, and what holds where both are given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.commands.client_options import SAMPLING_OPTIONS, sampling_of
from dflash_cli.main import parser

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
    assert set(CASES) == set(SAMPLING_OPTIONS)
    assert sampling() == {}


@pytest.mark.parametrize("name", CASES)
def test_an_option_becomes_its_parameter_and_set_param_holds_over_it(name: str) -> None:
    words, value = CASES[name]
    assert sampling(*words) == {name: value}
    for given in ([*words, "--set-param", f"{name}=99"], ["--set-param", f"{name}=99", *words]):
        assert sampling(*given) == {name: "99" if name == "stop" else 99}


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
