"""Texts of JSON from clients: what they may hold, and that reading them costs little."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_backend.text.chat import SpecialTokens
from dflash_backend.text.client_json import JsonError, count_parts, read_json, texts

BOUNDS = {"max_chars": 1_000_000, "max_brackets": 1000}
strings = st.text(alphabet='a,"\\é{[\n', max_size=8)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), strings),
    lambda inner: st.one_of(st.lists(inner, max_size=6), st.dictionaries(strings, inner, max_size=6)),
    max_leaves=30,
)


def parts(value: Any) -> Iterator[Any]:
    """All that is in a value, keys too, in the order of its text."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from parts(item)
    elif isinstance(value, list):
        for item in value:
            yield from parts(item)
    else:
        yield value


def brackets_and_commas(value: Any) -> tuple[int, int]:
    """How many the JSON text of a value has outside of strings."""
    if not isinstance(value, dict | list):
        return 0, 0
    inner = [brackets_and_commas(item) for item in (value.values() if isinstance(value, dict) else value)]
    return 1 + sum(one[0] for one in inner), max(0, len(inner) - 1) + sum(one[1] for one in inner)


@given(value=values, ascii_only=st.booleans())
def test_brackets_and_commas_are_counted_outside_of_strings(value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert count_parts(text, 0, 0) == brackets_and_commas(value)
    assert count_parts(text, 10**6, 10**6) == (text.count("[") + text.count("{"), text.count(","))


@given(value=values)
def test_what_is_read_is_what_was_written_and_its_texts_are_found_in_order(value: Any) -> None:
    assert read_json(json.dumps(value), **BOUNDS) == value
    assert texts(value) == [part for part in parts(value) if isinstance(part, str)]


def test_values_are_counted_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    most = json.dumps([1] * 101)
    assert len(read_json(most, max_commas=100, **BOUNDS)) == 101
    assert read_json(json.dumps(['",' * 500]), max_commas=100, **BOUNDS) == ['",' * 500]
    monkeypatch.setattr(json, "loads", lambda *args, **kwargs: pytest.fail("it was read"))
    with pytest.raises(JsonError, match=r"^has too many parts: 101 commas outside of strings; allowed: 100$"):
        read_json(json.dumps([1] * 102), max_commas=100, **BOUNDS)
    with pytest.raises(JsonError, match=r"1001 brackets; allowed: 1000$"):
        read_json(json.dumps(["[" * 900, [[]] * 999]), **BOUNDS)
    with pytest.raises(JsonError, match="20001 commas outside of strings; allowed: 20000"):
        read_json(json.dumps([1] * 20_002), **BOUNDS)


@pytest.mark.parametrize("sign", ["", "-"])
@pytest.mark.parametrize("around", ["{}", "[1, {}]", '{{"a": {{"b": {}}}}}'])
def test_an_integer_has_at_most_100_digits(sign: str, around: str) -> None:
    longest = sign + "1234567890" * 10
    assert longest in str(read_json(around.format(longest), **BOUNDS))
    for count in (101, 5000):
        with pytest.raises(JsonError, match=f"a number has {count} digits, more than 100"):
            read_json(around.format(sign + "5" * count), **BOUNDS)


def test_other_digits_may_be_many() -> None:
    value = ["7" * 500, 0.5, 12]
    assert read_json(f'["{"7" * 500}", 0.5{"0" * 200}, 12]', **BOUNDS) == value


@pytest.mark.parametrize("around", ["{}", '["a", {}]', "{{{}: 1}}", '{{"a": [{{"b": {}}}]}}'])
def test_half_a_surrogate_pair_is_refused_wherever_it_is(around: str) -> None:
    assert "🙂" in str(read_json(around.format(r'"\ud83d\ude42"'), **BOUNDS))
    for half in (r'"\ud83d"', r'"\uDE42"', r'"\ude42\ud83d"'):
        with pytest.raises(JsonError, match="half a surrogate pair"):
            read_json(around.format(half), **BOUNDS)


@pytest.mark.parametrize(("begin", "end"), [("[", "]"), ('{"a": ', "}")])
def test_values_are_nested_16_times_at_most(begin: str, end: str) -> None:
    siblings = "[1, [], {}, "
    for depth, fits in ((16, True), (17, False)):
        text = siblings + begin * (depth - 1) + end * (depth - 1) + "]"
        text = text.replace(": }", ": 1}")
        if fits:
            assert read_json(text, **BOUNDS)
        else:
            with pytest.raises(JsonError, match="nested too deeply; allowed: 16 levels"):
                read_json(text, **BOUNDS)


def calls_of(function: Callable[[], object]) -> int:
    """How many functions of Python are called."""
    count = 0

    def profile(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


def test_numbers_cost_no_calls_of_their_own() -> None:
    """The thread that answers everybody waits meanwhile."""
    special = SpecialTokens(["<s>"])

    def read(count: int) -> None:
        text = json.dumps([{"a": "<s>\ud83d\ude42", "x": [[]] * 20 + [1, 2.5, None, True] * count}])
        value = read_json(text, **BOUNDS)
        assert special.marked(value)[1] is not None

    few, many = (calls_of(lambda count=count: read(count)) for count in (1, 2000))
    assert many <= few + 10
