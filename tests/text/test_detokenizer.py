"""Incremental text: nothing lost, nothing torn, nothing past a stop string."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_backend.messages import SamplingParams
from dflash_backend.text.detokenizer import Detokenizer
from dflash_backend.text.stop_strings import StopAutomaton, StopStrings
from dflash_backend.text.tokenizer import Tokenizer
from tests.byte_tokenizer import EOS, START

cuts = st.lists(st.integers(1, 5), min_size=1, max_size=6)
byte_ids = st.lists(st.integers(0, 255), max_size=40)
texts = st.text(alphabet="aé漢🙂�\n ", max_size=20)


def pieces(items, sizes):
    """`items` cut into pieces of these sizes, over and over; at least one, so that there is a last."""
    cut, start, turn = [], 0, 0
    while start < len(items) or not cut:
        cut.append(items[start : start + sizes[turn % len(sizes)]])
        start += sizes[turn % len(sizes)]
        turn += 1
    return cut


def run(tokenizer: Tokenizer, token_ids, sizes, **sampling) -> tuple[list[str], bool]:
    detokenizer = Detokenizer(tokenizer, SamplingParams(**sampling))
    parts = pieces(list(token_ids), sizes)
    deltas = [detokenizer.append(list(part), index == len(parts) - 1) for index, part in enumerate(parts)]
    return [delta.text for delta in deltas], deltas[-1].stopped


@given(ids=byte_ids, sizes=cuts)
def test_deltas_of_any_bytes_join_to_the_decoded_text(tokenizer, ids, sizes):
    deltas, _ = run(tokenizer, ids, sizes, ignore_eos=True)
    assert "".join(deltas) == tokenizer.decode(ids)


@given(ids=st.lists(st.integers(0, START), max_size=30), sizes=cuts, skip=st.booleans())
def test_special_tokens_between_bytes_change_nothing_about_that(tokenizer, ids, sizes, skip):
    deltas, _ = run(tokenizer, ids, sizes, ignore_eos=True, skip_special_tokens=skip)
    assert "".join(deltas) == tokenizer.decode(ids, skip)


@given(text=st.text(alphabet="aé漢🙂", max_size=20), sizes=cuts)
def test_a_character_split_over_tokens_never_shows_as_a_replacement(tokenizer, text, sizes):
    deltas, _ = run(tokenizer, text.encode(), sizes)
    assert "".join(deltas) == text
    assert all("\ufffd" not in delta for delta in deltas)


@given(text=texts, sizes=cuts)
def test_a_genuine_replacement_character_is_kept(tokenizer, text, sizes):
    assert "".join(run(tokenizer, text.encode(), sizes)[0]) == text


def test_an_incomplete_character_at_the_end_comes_out_as_decode_would(tokenizer):
    ids = [*b"ok", 0xE6, 0xBC]
    deltas, _ = run(tokenizer, ids, [1])
    assert "".join(deltas) == "ok\ufffd" == tokenizer.decode(ids)


def test_the_demo_tokenizer_streams_what_it_decodes():
    from dflash_backend.config import asset_path

    demo = Tokenizer.load(asset_path("demo", "pair", "target"))
    text = "Ω≈ç√ naïve 漢字 🙂🙃 def f(x):\n    return x"
    ids = demo.encode(text)
    assert "".join(run(demo, ids, [3])[0]) == text


def test_the_end_of_sequence_token_adds_no_text(tokenizer):
    for last in (EOS, 7):
        assert "".join(run(tokenizer, [*b"abc", last], [2], skip_special_tokens=False)[0]) == "abc"


def test_a_stop_token_adds_text_only_when_it_is_to_be_included(tokenizer):
    assert "".join(run(tokenizer, b"abc", [3], stop_token_ids=(ord("c"),))[0]) == "ab"
    included, _ = run(tokenizer, b"abc", [3], stop_token_ids=(ord("c"),), include_stop_str_in_output=True)
    assert "".join(included) == "abc"


def test_an_ignored_end_of_sequence_token_is_text_like_any_other(tokenizer):
    deltas, _ = run(tokenizer, [*b"ab", 9], [3], ignore_eos=True)
    assert "".join(deltas) == "ab\t"


@given(
    text=texts.map(lambda t: t.replace("�", "b")),
    stops=st.lists(texts.filter(bool), min_size=1, max_size=3),
    sizes=cuts,
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


@given(head=byte_ids, count=st.integers(60, 200), tail=byte_ids, sizes=cuts)
def test_a_long_run_of_bytes_that_are_no_text_leaves_before_its_end(tokenizer, head, count, tail, sizes):
    ids = [*head, *[0xE6] * count, *tail]
    deltas, _ = run(tokenizer, ids, sizes, ignore_eos=True)
    assert "".join(deltas) == tokenizer.decode(ids)


def test_the_window_does_not_grow_with_such_a_run(tokenizer):
    detokenizer = Detokenizer(tokenizer, SamplingParams())
    for _ in range(2000):
        detokenizer.append([0xE6], False)
    assert len(detokenizer._window) < 300


@given(
    text=st.text(alphabet="aé漢🙂", max_size=20), stop=st.text(alphabet="aé漢🙂", min_size=1, max_size=3), sizes=cuts
)
def test_no_token_past_the_one_that_completes_a_stop_string_counts(tokenizer, text, stop, sizes):
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=(stop,)))
    parts = pieces(list(text.encode()), sizes)
    count = sum(detokenizer.append(part, part is parts[-1]).num_tokens for part in parts)
    expected = text[: text.index(stop) + len(stop)] if stop in text else text
    assert count == len(expected.encode())


def test_a_stop_string_within_the_first_min_tokens_does_not_count(tokenizer):
    sampling = {"stop": ("ab", "abcd"), "min_tokens": 3}
    for sizes in ([1], [2], [40]):
        deltas, stopped = run(tokenizer, b"abcabxab", sizes, **sampling)
        assert ("".join(deltas), stopped) == ("abc", True)


def test_a_stop_string_that_ends_in_the_last_of_min_tokens_does_not_count(tokenizer):
    for sizes in ([1], [2], [3], [40]):
        deltas, stopped = run(tokenizer, b"xabyab", sizes, stop=("ab",), min_tokens=3)
        assert ("".join(deltas), stopped) == ("xaby", True)
        deltas, stopped = run(tokenizer, b"xabyab", sizes, stop=("ab",), min_tokens=2)
        assert ("".join(deltas), stopped) == ("x", True)


def test_a_stop_string_that_begins_within_min_tokens_and_ends_after_counts(tokenizer):
    for sizes in ([1], [2], [40]):
        deltas, stopped = run(tokenizer, b"xxabab", sizes, stop=("ab",), min_tokens=3)
        assert ("".join(deltas), stopped) == ("xx", True)


@given(ids=byte_ids)
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

special_or_not = st.lists(st.one_of(st.just(START), st.integers(0, 255)), max_size=12)


@pytest.mark.parametrize("num_bytes", [1, 3, 4, 5, 60, 70])
@pytest.mark.parametrize("num_special", [1, 62, 200])
def test_parts_of_characters_before_a_run_of_special_tokens_are_all_there(tokenizer, num_bytes, num_special):
    """Four of them were taken for the end of a longer run, and cut off."""
    ids = [128] * num_bytes + [START] * num_special
    for sizes in ([1], [7]):
        deltas, _ = run(tokenizer, ids, sizes, ignore_eos=True)
        assert "".join(deltas) == tokenizer.decode(ids)


def test_parts_of_characters_far_apart_between_special_tokens_are_all_there(tokenizer):
    ids = ([128] + [START] * 60) * 80
    deltas, _ = run(tokenizer, ids, [1], ignore_eos=True)
    assert "".join(deltas) == tokenizer.decode(ids)


@given(head=special_or_not, count=st.integers(60, 200), tail=special_or_not, sizes=cuts)
def test_a_long_run_of_skipped_special_tokens_changes_no_text(tokenizer, head, count, tail, sizes):
    ids = [*head, *[START] * count, *tail]
    deltas, _ = run(tokenizer, ids, sizes, ignore_eos=True)
    assert "".join(deltas) == tokenizer.decode(ids)


@pytest.mark.parametrize("head", [b"", b"abc", b"ab\xe6"], ids=["nothing", "text", "a part of a character"])
def test_the_window_does_not_grow_with_skipped_special_tokens(tokenizer, head):
    detokenizer = Detokenizer(tokenizer, SamplingParams(ignore_eos=True))
    detokenizer.append(list(head), False)
    for _ in range(2000):
        detokenizer.append([START], False)
    assert len(detokenizer._window) < 100


def test_a_character_is_whole_although_thousands_of_special_tokens_lie_in_it(tokenizer):
    first, *rest = "漢".encode()
    deltas, _ = run(tokenizer, [first, *[START] * 3000, *rest], [1])
    assert "".join(deltas) == "漢"


def test_the_demo_tokenizers_first_space_survives_a_run_of_special_tokens():
    from dflash_backend.config import asset_path

    demo = Tokenizer.load(asset_path("demo", "pair", "target"))
    ids = [*[demo.eos_token_ids[0]] * 200, *demo.encode(" a b")]
    assert "".join(run(demo, ids, [1], ignore_eos=True)[0]) == demo.decode(ids)


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
    sizes=cuts,
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
