"""Bad words as token ids, and masks that would leave no token."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_backend.messages import SamplingParams
from dflash_backend.text.sampling_params import ParameterError
from dflash_backend.text.token_masks import bad_word_token_ids, resolve_token_masks

VOCAB = {" a": 1, " b": 2, "a": 3, "b": 4, " ": 5}


class WordTokenizer:
    """Takes the longest known beginning of a text; 9 is past the vocabulary."""

    def encode_part(self, text: str) -> list[int]:
        ids = []
        while text:
            known = max((word for word in VOCAB if text.startswith(word)), key=len, default=text[0])
            ids.append(VOCAB.get(known, 9))
            text = text[len(known) :]
        return ids


def test_a_word_is_hidden_at_the_beginning_of_a_text_and_behind_a_space() -> None:
    assert bad_word_token_ids(["a"], WordTokenizer(), 6) == ((3,), (1,))
    assert bad_word_token_ids(["a b", " b"], WordTokenizer(), 6) == ((3, 2), (1, 2), (4,), (2,))


def test_a_form_with_another_number_of_tokens_is_hidden_too() -> None:
    class Spaced(WordTokenizer):
        def encode_part(self, text: str) -> list[int]:
            return {"ab": [3, 4], " ab": [5]}[text]

    assert bad_word_token_ids(["ab"], Spaced(), 6) == ((3, 4), (5,))


def test_a_word_of_tokens_that_the_target_has_not_never_comes_anyway() -> None:
    assert bad_word_token_ids(["x", "b"], WordTokenizer(), 6) == ((4,), (2,))


def resolve(**values: Any) -> SamplingParams:
    return resolve_token_masks(SamplingParams(**values), WordTokenizer(), (0,), 6)


def test_parameters_come_back_with_the_ids_of_their_bad_words() -> None:
    assert resolve(bad_words=("a",)).bad_words_token_ids == ((3,), (1,))
    assert resolve() == SamplingParams()


@pytest.mark.parametrize(
    "values",
    [
        {"allowed_token_ids": (1, 3), "bad_words": ("a",)},
        {"allowed_token_ids": (0,), "min_tokens": 1},
        {"allowed_token_ids": (2,), "min_tokens": 1, "stop_token_ids": (2,)},
        {"bad_words": ("a", "b", " "), "min_tokens": 1},
    ],
)
def test_parameters_that_leave_no_token_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match="leave no token"):
        resolve(**values)


def test_parameters_that_leave_one_token_are_taken() -> None:
    resolve(allowed_token_ids=(1, 4), bad_words=("a",))
    resolve(allowed_token_ids=(0,), min_tokens=1, ignore_eos=True)
