"""Whether a text gives the right answer."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-+]?\.\d+")
_BOXED = "\\boxed{"
_ANSWER = re.compile(r"(?:^|\n)[ \t*]*(?:final )?answer:[ \t*]*", re.IGNORECASE)


def is_correct(text: str, answer: str) -> bool:
    """Whether `text` ends up at `answer`.

    Read is what stands in the last `\\boxed{}`, else the line after the last `Answer:`, else the whole text. If
    `answer` is a number, the last number there must equal it (`1,234.0` is `1234`); if not, the words there must, the
    last line's in the case of the whole text, apart from case, white space and a full stop.
    """
    stated, is_marked = stated_answer(text)
    expected = _as_number(answer)
    if expected is not None:
        numbers = _NUMBER.findall(stated)
        return bool(numbers) and _as_number(numbers[-1]) == expected
    lines = stated.strip().splitlines()
    if not is_marked and lines:
        stated = lines[-1]
    return _words(stated) == _words(answer)


def is_mentioned(text: str, words: str) -> bool:
    """Whether these words, or this number, are in `text`: whole, in this order, apart from case and white space."""
    expected = r"\s+".join(re.escape(word) for word in words.casefold().split())
    return re.search(rf"(?<!\w)(?<!\d[.,]){expected}(?!\w|[.,]\d)", text.casefold()) is not None


def is_number(text: str) -> bool:
    """Whether `text` is a number, a currency or per cent sign aside."""
    return _as_number(text) is not None


def stated_answer(text: str) -> tuple[str, bool]:
    """The part of `text` that states its answer, and whether the text marks it as such."""
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed, True
    marks = list(_ANSWER.finditer(text))
    return (text[marks[-1].end() :].strip().partition("\n")[0], True) if marks else (text, False)


def _last_boxed(text: str) -> str | None:
    """What is in the last `\\boxed{...}` that is closed, braces inside it included."""
    start = text.rfind(_BOXED)
    while start >= 0:
        depth, begin = 1, start + len(_BOXED)
        for end in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[begin:end]
        start = text.rfind(_BOXED, 0, start)
    return None


def _as_number(text: str) -> Decimal | None:
    """The number that `text` is, a currency or per cent sign aside; None when it is anything else."""
    bare = text.strip().strip("$%\\ ").rstrip(".")
    if not _NUMBER.fullmatch(bare):
        return None
    try:
        return Decimal(bare.replace(",", ""))
    except InvalidOperation:
        return None


def _words(text: str) -> str:
    return " ".join(text.split()).rstrip(".").casefold()
