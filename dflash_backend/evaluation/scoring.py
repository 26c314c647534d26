"""Whether a text gives the right answer."""

from __future__ import annotations

import re
from fractions import Fraction

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-+]?\.\d+")
# LaTeX's fractions, a whole number before them included, and a ratio: the sign, the whole number, above, below.
_PART = r"\s*(\{[^{}]*\}|\d)"
_FRACTION = re.compile(rf"([-+]?)(\d*)\s?\\[dt]?frac{_PART}{_PART}")
_RATIO = re.compile(rf"(?:{_NUMBER.pattern})/\d+")
# What a number is read from in a text, its last one.
_FOUND = re.compile(f"{_FRACTION.pattern}|{_RATIO.pattern}|{_NUMBER.pattern}")
# Longer ones are no answer that is a number.
_LONGEST = 300

# A thin space or the like between groups of three digits, and nothing at all.
_JOINT = re.compile(r"\\!|(?<=\d)(?:\\[,;: ]|[~\u00a0\u202f])(?=\d{3}(?!\d))")
_SPACE = re.compile(r"\\(?:[,;: ]|q?quad\b)|[~\u00a0\u202f]")
# Text within mathematics: with a number in it, and without one, which is a unit or a label.
_STYLE = r"\\(?:text[a-z]*|math[a-z]+|mbox)\s*"
_STYLED_NUMBER = re.compile(_STYLE + r"\{([^{}]*\d[^{}]*)\}")
_LABEL = _STYLE + r"\{[^{}\d]*\}"
_POWER = r"(?:\^\{?\d\}?|[\u00b2\u00b3])?"
_BEFORE = re.compile(rf"\A(?:\s+|\\[(\[]|[A-Za-z]\s*=|{_LABEL})")
_AFTER = re.compile(rf"(?:[\s./]+|\\?%|\\[)\]]|\^\s*\{{?\\circ\}}?|\\degree|\u00b0|{_LABEL}{_POWER})\Z")
# Units that stand behind a number as they are: words, and short ones also at its last digit.
_UNIT = re.compile(
    rf"(?:(?<=[\s/])[A-Za-z]{{2,}}|(?<=[\s/])[mgsh]|(?<=\d)(?:[cdkm]?m|k?g|mg|ft|in|mi|yd|lb|oz|hr?s?|min|mph)){_POWER}\Z"
)

_BOXED = "\\boxed{"
_ANSWER = re.compile(r"(?:^|\n)[ \t*]*(?:final )?answer:[ \t*]*", re.IGNORECASE)


def is_correct(text: str, answer: str) -> bool:
    """Whether `text` ends up at `answer`.

    Read is what stands in the last `\\boxed{}`, else the line after the last `Answer:`, else the whole text. If
    `answer` is a number, what is boxed must be that number (`1,234.0` and `1{,}234` are `1234`, and units do not
    count), else the last number there; if it is none, the words there must be the same, the last line's in the case of
    the whole text, apart from case, white space and a full stop.
    """
    stated, is_marked = stated_answer(text)
    expected = _as_number(answer)
    if expected is not None:
        if _last_boxed(text) is not None:
            return _as_number(stated, with_words=True) == expected
        numbers = [match[0] for match in _FOUND.finditer(_plain(stated))]
        return bool(numbers) and _value(numbers[-1]) == expected
    lines = stated.strip().splitlines()
    if not is_marked and lines:
        stated = lines[-1]
    return _words(stated) == _words(answer)


def is_mentioned(text: str, words: str) -> bool:
    """Whether these words, or this number, are in `text`: whole, in this order, apart from case and white space."""
    expected = r"\s+".join(re.escape(word) for word in words.casefold().split())
    return re.search(rf"(?<!\w)(?<!\d[.,]){expected}(?!\w|[.,]\d)", text.casefold()) is not None


def is_number(text: str) -> bool:
    """Whether `text` is a number, also as LaTeX has it, a currency, per cent sign or unit aside."""
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


def _as_number(text: str, with_words: bool = False) -> Fraction | None:
    """The number that `text` is, its currency, per cent sign and unit aside, units that are plain words only
    `with_words`; None when it is anything else, such as a power or a root."""
    if len(text) > _LONGEST:
        return None
    bare = _STYLED_NUMBER.sub(r"\1", re.sub(r"\\?\$", "", _plain(text)))
    before = None
    while bare != before:
        before = bare
        bare = _AFTER.sub("", _BEFORE.sub("", bare))
        if with_words:
            bare = _UNIT.sub("", bare)
    return _value(bare)


def _plain(text: str) -> str:
    """A text with its minus signs, groups of digits and spaces as they are typed outside of LaTeX."""
    return _SPACE.sub(" ", _JOINT.sub("", text.replace("\u2212", "-").replace("{,}", ",")))


def _value(text: str) -> Fraction | None:
    """The value of a number, a ratio or a fraction of LaTeX; None of anything else."""
    try:
        if match := _FRACTION.fullmatch(text):
            sign, whole, *parts = match.groups()
            above, below = (_value(part.strip("{} ")) for part in parts)
            if above is None or below is None:
                return None
            value = int(whole or 0) + above / below
            return -value if sign == "-" else value
        if _NUMBER.fullmatch(text) or _RATIO.fullmatch(text):
            return Fraction(text.replace(",", ""))
    except (ValueError, ZeroDivisionError):
        pass  # too many digits, a ratio of numbers that are not whole, or one by 0
    return None


def _words(text: str) -> str:
    return " ".join(text.split()).rstrip(".").casefold()
