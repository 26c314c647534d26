"""What `checks.dynamo` finds, with servers and a router that the test makes up."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from checks import dynamo


class MadeUpFleet(dynamo.Fleet):
    """A router that sends a request where its prompt was, or always to the next server."""

    def __init__(self, blind: bool = False, parts: int = 16, num_used: int = 2) -> None:
        self._blind, self._parts, self._num_used = blind, parts, num_used
        self._homes: dict[str, int] = {}
        self._tokens, self._cached = [0.0, 0.0], [0.0, 0.0]
        self._next = 0

    def ask(self, prompt: str) -> int:
        start = prompt[:200]
        place = self._homes.get(start)
        if place is None or self._blind:
            place, self._next = self._next % self._num_used, self._next + 1
        self._tokens[place] += 100
        self._cached[place] += 95 * (self._homes.get(start) == place)
        self._homes.setdefault(start, place)
        return self._parts

    def counts(self, name: str) -> list[float]:
        return list(self._tokens if name == "dflash:prompt_tokens_total" else self._cached)


@pytest.mark.parametrize(
    ("fleet", "words"),
    [
        (MadeUpFleet(), []),
        (MadeUpFleet(blind=True), ["requests came to a server that did not have", "of the prompt tokens were cached"]),
        (MadeUpFleet(parts=1), ["did not stream"]),
        (MadeUpFleet(num_used=1), ["a server had no prompt"]),
    ],
)
def test_what_is_missed_is_said(fleet: MadeUpFleet, words: Sequence[str]) -> None:
    misses = dynamo.measure(fleet, num_prompts=5, repeats=3)
    assert len(misses) == len(words)
    assert all(word in miss for word, miss in zip(words, misses, strict=True))


def test_without_dynamo_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["dynamo"])
    monkeypatch.setattr("checks.dynamo.importlib.util.find_spec", lambda name: None)
    assert dynamo.main() == 2
    assert "ai-dynamo is not installed" in capsys.readouterr().err


def test_a_program_that_ends_ends_the_wait_and_its_words_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dynamo, "START_S", 20.0)
    with (
        pytest.raises(RuntimeError, match="the model was not there when a program ended"),
        dynamo.program("worker", ["platform_that_is_not_there"], tmp_path) as worker,
    ):
        dynamo.wait_until("the model", lambda: False, [worker])
    said = capfd.readouterr().err
    assert "worker (exit status 1)" in said
    assert "No module named platform_that_is_not_there" in said
