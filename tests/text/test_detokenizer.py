"""Incremental text: nothing lost, nothing torn, nothing past a stop string."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checks.byte_tokenizer import EOS, START
from dflash_backend.messages import SamplingParams, StructuredOutputs
from dflash_backend.text.detokenizer import Detokenizer
from dflash_backend.text.stop_strings import StopAutomaton, StopStrings
from dflash_backend.text.tokenizer import Tokenizer

part_sizes = st.lists(st.integers(1, 5), min_size=1, max_size=6)
byte_ids = st.lists(st.integers(0, 255), max_size=40)
texts = st.text(alphabet="aé漢🙂�\n ", max_size=20)
special_or_not = st.lists(st.one_of(st.just(START), st.integers(0, 255)), max_size=12)


def pieces(items, sizes):
    """`items` in pieces of these sizes, over and over; at least one, so that there is a last."""
    found, start, turn = [], 0, 0
    while start < len(items) or not found:
        found.append(items[start : start + sizes[turn % len(sizes)]])
        start += sizes[turn % len(sizes)]
        turn += 1
    return found


def long_run(token_id: int):
    """Token ids around a long run of one of them."""
    return st.tuples(special_or_not, st.integers(60, 200), special_or_not).map(
        lambda drawn: [*drawn[0], *[token_id] * drawn[1], *drawn[2]]
    )


# Runs of silent tokens among bytes of characters, whole, cut off and damaged.
silent_run = st.integers(0, 80).map(lambda count: [START] * count)
part = st.sampled_from([*b"a\xe6\xbc\xa2\xf0\x9f\x99\x82\xef\xbf\xbd"]).map(lambda byte: [byte])
torn_and_silent = st.lists(st.one_of(part, part, silent_run, st.just([*"漢🙂".encode()])), max_size=60).map(
    lambda runs: [token_id for run in runs for token_id in run]
)


def run(tokenizer: Tokenizer, token_ids, sizes, **sampling) -> tuple[list[str], bool]:
    detokenizer = Detokenizer(tokenizer, SamplingParams(**sampling))
    parts = pieces(list(token_ids), sizes)
    deltas = [detokenizer.append(list(part), index == len(parts) - 1) for index, part in enumerate(parts)]
    return [delta.text for delta in deltas], deltas[-1].stopped


# Without limits of time, which a machine that does other work as well does not keep.
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    ids=st.one_of(
        byte_ids,
        st.lists(st.integers(0, START), max_size=30),
        long_run(0xE6),
        long_run(START),
        torn_and_silent,
        st.tuples(torn_and_silent, st.integers(2, 80)).map(lambda drawn: (drawn[0] * drawn[1])[:2000]),
    ),
    sizes=part_sizes,
    skip=st.booleans(),
)
def test_deltas_of_any_tokens_join_to_the_decoded_text(tokenizer, ids, sizes, skip):
    """Bytes that are no text and special tokens among them, also long runs of either."""
    deltas, _ = run(tokenizer, ids, sizes, ignore_eos=True, skip_special_tokens=skip)
    assert "".join(deltas) == tokenizer.decode(ids, skip)


# An incomplete character at the end; parts of characters before a run of special tokens, of which four were taken for
# the end of a longer run, and far apart; a character in which thousands of special tokens lie.
TORN = [
    [*b"ok", 0xE6, 0xBC],
    *([128] * num_bytes + [START] * num_special for num_bytes in (1, 3, 4, 5, 60, 70) for num_special in (1, 62, 200)),
    ([128] + [START] * 60) * 80,
    [0xE6, *[START] * 3000, 0xBC, 0xA2],
    [0xE6, *[START] * 5, 0xBC, *[START] * 200, 0xA2],
    ([START] * 64 + [0xE6]) * 70,
    [0xE6, *[START] * 3000, 0xBC, *[START] * 3000, 0xA2],
]


@pytest.mark.parametrize("ids", TORN, ids=len)
def test_deltas_of_torn_characters_join_to_the_decoded_text(tokenizer, ids):
    for sizes in ([1], [7]):
        deltas, _ = run(tokenizer, ids, sizes, ignore_eos=True)
        assert "".join(deltas) == tokenizer.decode(ids)
    assert tokenizer.decode(TORN[0]) == "ok\ufffd"
    assert tokenizer.decode(TORN[-1]) == tokenizer.decode(TORN[-3]) == "漢"


def test_the_demo_tokenizer_streams_what_it_decodes(demo):
    text = "Ω≈ç√ naïve 漢字 🙂🙃 def f(x):\n    return x"
    assert "".join(run(demo, demo.encode(text), [3])[0]) == text
    # Its first space is that of a text, also after special tokens.
    ids = [*[demo.eos_token_ids[0]] * 200, *demo.encode(" a b")]
    assert "".join(run(demo, ids, [1], ignore_eos=True)[0]) == demo.decode(ids)


@given(text=texts, sizes=part_sizes)
def test_a_replacement_character_shows_only_where_it_is_genuine(tokenizer, text, sizes):
    """Not where a character is split over tokens."""
    assert "".join(run(tokenizer, text.encode(), sizes)[0]) == text


def test_the_end_of_sequence_token_adds_no_text(tokenizer):
    for last in (EOS, 7):
        assert "".join(run(tokenizer, [*b"abc", last], [2], skip_special_tokens=False)[0]) == "abc"


def test_a_stop_token_adds_text_only_when_it_is_to_be_included(tokenizer):
    assert "".join(run(tokenizer, b"abc", [3], stop_token_ids=(ord("c"),))[0]) == "ab"
    included, _ = run(tokenizer, b"abc", [3], stop_token_ids=(ord("c"),), include_stop_str_in_output=True)
    assert "".join(included) == "abc"


def test_the_end_of_sequence_token_of_a_grammar_adds_no_text_also_where_it_is_ignored(tokenizer):
    """The engine ends the answer with it all the same."""
    grammar = StructuredOutputs("choice", '["abc"]')
    sampling = {"structured_outputs": grammar, "ignore_eos": True, "skip_special_tokens": False}
    assert "".join(run(tokenizer, [*b"abc", EOS], [2], **sampling)[0]) == "abc"


def test_an_ignored_end_of_sequence_token_is_text_like_any_other(tokenizer):
    deltas, _ = run(tokenizer, [*b"ab", 9], [3], ignore_eos=True)
    assert "".join(deltas) == "ab\t"


@given(
    text=texts.map(lambda t: t.replace("�", "b")),
    stops=st.lists(texts.filter(bool), min_size=1, max_size=3),
    sizes=part_sizes,
)
def test_where_a_text_stops_does_not_depend_on_how_it_came(tokenizer, text, stops, sizes):
    whole, whole_stopped = run(tokenizer, text.encode(), [1000], stop=tuple(stops))
    parts, stopped = run(tokenizer, text.encode(), sizes, stop=tuple(stops))
    assert ("".join(parts), stopped) == ("".join(whole), whole_stopped)
    assert stopped == any(stop in text for stop in stops)
    assert not any(stop in "".join(parts) for stop in stops)


def test_text_past_a_stop_string_never_leaves(tokenizer):
    deltas, stopped = run(tokenizer, b"one END two END", [4], stop=("END",))
    assert (deltas[:2], "".join(deltas), stopped) == (["one ", ""], "one ", True)


def test_a_held_back_beginning_of_a_stop_string_comes_out_at_the_end(tokenizer):
    deltas, stopped = run(tokenizer, b"one EN", [3], stop=("END",))
    assert ("".join(deltas), stopped) == ("one EN", False)


def test_a_stop_string_can_be_included():
    assert StopStrings(("b", "bc"), include=True).append("abc", False) == ("ab", True)


def test_of_stop_strings_that_end_together_the_longest_counts():
    assert StopStrings(("c", "bc"), include=False).append("abcd", False) == ("a", True)


@given(
    text=st.text(alphabet="aé漢🙂", max_size=20),
    stop=st.text(alphabet="aé漢🙂", min_size=1, max_size=3),
    sizes=part_sizes,
)
def test_no_token_past_the_one_that_completes_a_stop_string_counts(tokenizer, text, stop, sizes):
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=(stop,)))
    parts = pieces(list(text.encode()), sizes)
    count = sum(detokenizer.append(part, part is parts[-1]).num_tokens for part in parts)
    expected = text[: text.index(stop) + len(stop)] if stop in text else text
    assert count == len(expected.encode())


@pytest.mark.parametrize(
    ("text", "stops", "min_tokens", "expected"),
    [
        (b"abcabxab", ("ab", "abcd"), 3, "abc"),
        # It ends in the last of them, and in the first after them.
        (b"xabyab", ("ab",), 3, "xaby"),
        (b"xabyab", ("ab",), 2, "x"),
        (b"xxabab", ("ab",), 3, "xx"),
    ],
)
def test_a_stop_string_counts_that_ends_after_min_tokens(tokenizer, text, stops, min_tokens, expected):
    for sizes in ([1], [2], [3], [40]):
        deltas, stopped = run(tokenizer, text, sizes, stop=stops, min_tokens=min_tokens)
        assert ("".join(deltas), stopped) == (expected, True)


@given(ids=st.one_of(byte_ids, torn_and_silent))
def test_what_each_token_would_add_joins_to_the_text(tokenizer, ids):
    detokenizer = Detokenizer(tokenizer, SamplingParams(ignore_eos=True))
    added = []
    for index, token_id in enumerate(ids):
        last = index == len(ids) - 1
        added.append(detokenizer.would_add(token_id, last))
        detokenizer.append([token_id], last)
    assert "".join(added) == tokenizer.decode(ids)


def test_a_part_of_a_character_adds_nothing_and_its_last_byte_all_of_it(tokenizer):
    detokenizer = Detokenizer(tokenizer, SamplingParams())
    added = []
    for byte in "é".encode():
        added.append(detokenizer.would_add(byte, False))
        detokenizer.append([byte], False)
    assert added == ["", "é"]
    assert detokenizer.would_add(EOS, True) == ""


# The thread that turns tokens into text answers everybody: what a token costs must not grow with what came before.


@pytest.mark.parametrize(
    ("head", "token_id", "longest"),
    [(b"", 0xE6, 300), (b"", START, 100), (b"abc", START, 100), (b"ab\xe6", START, 100)],
    ids=["no text", "special tokens", "special tokens after text", "special tokens after a part of a character"],
)
def test_the_window_does_not_grow_with_a_long_run(tokenizer, head, token_id, longest):
    detokenizer = Detokenizer(tokenizer, SamplingParams(ignore_eos=True))
    detokenizer.append(list(head), False)
    for _ in range(2000):
        detokenizer.append([token_id], False)
    assert len(detokenizer._window) < longest


PATTERNS = {
    "silent tokens and half a character": ([START] * 64 + [0xE6], 1),
    "silent tokens and part of a character, together": ([START] * 6 + [0xF0, 0x9F, 0x99], 9),
    "a letter and half a character, together": ([ord("a"), 0xE6], 2),
    "parts of characters and a letter": ([0xF0, 0x9F, 0x99] * 64 + [ord("a")], 1),
    "silent tokens and a letter": ([START] * 300 + [ord("a")], 4),
}


@pytest.mark.parametrize(("unit", "size"), PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("stop", [(), ("never",)])
def test_a_token_costs_little_whatever_came_before(tokenizer, monkeypatch, unit, size, stop):
    detokenizer = Detokenizer(tokenizer, SamplingParams(ignore_eos=True, stop=stop))
    num_decoded = 0

    def decode(token_ids, skip_special_tokens):
        nonlocal num_decoded
        num_decoded += len(token_ids)
        return Tokenizer.decode(tokenizer, token_ids, skip_special_tokens)

    monkeypatch.setattr(tokenizer, "decode", decode)
    ids = (unit * 4000)[:8000]
    texts = []
    for part in pieces(ids, [size]):
        texts.append(detokenizer.append(part, False).text)
        assert len(detokenizer._window) < 400
    assert num_decoded < 500 * len(ids)
    texts.append(detokenizer.append([], True).text)
    assert "".join(texts) == Tokenizer.decode(tokenizer, ids)


class CountingAutomaton(StopAutomaton):
    """Counts its look-ups."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.looks = 0
        super().__init__(stops)
        self.looks = 0
        self._next = [CountingEdges(edges, self) for edges in self._next]


class CountingEdges(dict):
    def __init__(self, edges: dict[str, int], owner: CountingAutomaton) -> None:
        super().__init__(edges)
        self._owner = owner

    def get(self, key, default=None):
        self._owner.looks += 1
        return super().get(key, default)


@pytest.mark.parametrize(
    "stops",
    [
        ("a" * 1023 + "b",),
        ("a" * 1023 + "b", *["a" * 256 + "b" + "a" * (192 + i) for i in range(63)]),
        ("a" * 1023 + "b", *["b" + "a" * (400 + i) for i in range(63)]),
        tuple(f"stop{i}" for i in range(64)),
    ],
    ids=["one", "alike", "turned", "ordinary"],
)
def test_a_character_costs_two_look_ups_at_most_on_average_whatever_the_stop_strings_are(stops):
    machine = CountingAutomaton(stops)
    strings = StopStrings(stops, include=False)
    strings._automaton = machine
    count = 5000
    for _ in range(count):
        assert not strings.append("a", False)[1]
    assert machine.looks <= 2 * count
    assert len(strings._held) < 1024


@given(
    text=st.text(alphabet="ab", max_size=40),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4),
    sizes=part_sizes,
    unsearched=st.integers(0, 3),
)
def test_stop_strings_are_found_where_a_search_of_the_whole_text_finds_them(text, stops, sizes, unsearched):
    strings, parts = StopStrings(tuple(stops), include=False), pieces(text, sizes)
    sent, stopped = "", False
    for index, part in enumerate(parts):
        if not stopped:
            new, stopped = strings.append(part, index == len(parts) - 1, search=index >= unsearched)
            sent += new
    free = len("".join(parts[:unsearched]))
    ends = [
        (end, end - len(stop)) for stop in stops for end in range(free + 1, len(text) + 1) if text[:end].endswith(stop)
    ]
    assert stopped is bool(ends)
    assert sent == (text[: min(ends)[1]] if ends else text)
