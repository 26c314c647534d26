"""Words that are private to this project or say nothing, and the field's word for each.

An identifier is split into its words (`HostRows` into `host` and `rows`), and compared word by word or, for a pair, two
words at a time. A text is a comment, a docstring or a page.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from itertools import pairwise

from tests.lint.source_files import definitions

IN_IDENTIFIERS = {
    "judge": "verify, score, check",
    "judged": "to verify, scored",
    "stands": "accepted",
    "falls": "rejected",
    "fell": "rejected",
    "race": "gumbel, sample",
    "cut": "filter, truncate, split",
    "best": "argmax",
    "learn": "add",
    "forget": "remove",
    "forgotten": "removed, finished",
    "flight": "request_state",
    "flights": "request_states",
    "ladder": "capture_sizes",
    "room": "budget, space, capacity",
    "wish": "explicit",
    "wished": "explicit",
    "bury": "reap",
    "hear": "poll, receive",
    "nobody": "no_client, unused",
    "somebody": "owner",
    "places": "positions, slots",
    "shot": "request",
    "shots": "requests",
    "shoot": "send",
    "deck": "shuffled",
    "uncertain": "num_unverified_drafts",
    "strange": "invalid",
    "speculation counts": "spec_decoding_counts",
}
# Identifiers in which such a word is the field's.
ALLOWED_IDENTIFIERS = re.compile(r"in_?flight|cut_?off|best_of(?!_)|best_fit|race_condition|best_effort", re.I)

# Regular expressions of texts, compared without case.
IN_TEXTS = {
    r"judge[sd]?(?! by)": "verifies, scores, checks",
    r"stands(?! (for|in|still|alone|between)\b)": "is accepted; is; is written",
    r"(?<!it )falls(?! (back|below|to|off|behind|in|into|under)\b)": "is rejected; decreases",
    r"(runs?|decides?|wins?|loses?) (the|a) race": "samples by Gumbel-max",
    r"cut (distribution|softmax)": "filtered distribution",
    r"forgets?": "removes",
    r"flights?(?<!in flight)(?<!in-flight)": "request state",
    r"ladder": "capture sizes",
    r"rooms?": "space, budget; package",
    r"wish(es|ed)?": "explicit value",
    r"bur(y|ies)": "reaps",
    r"hears?": "receives, is called with",
    r"(?<!only )so many": "this many, as many, a number",
    r"shots?|shoots?": "request, sends",
    r"strange": "invalid",
    r"trap \d": "the fact or the invariant",
    r"serving contract|design pages?": "docs/clients.md, docs/operators.md, docs/architecture.md",
    r"called by|used by `": "what it does; the imports show who uses it",
}

_PATTERNS = [(re.compile(rf"(?<![\w-])(?:{pattern})(?![\w-])", re.I), instead) for pattern, instead in IN_TEXTS.items()]
# Of threads, processes, requests and blocks; pages use these words of people.
_PERSONS = re.compile(r"\b(?:nobody|somebody|whoever)\b", re.I)
# A docstring that only refers to another one.
_ONLY_SEE = re.compile(r"See `[\w.]+`\.?")


def wrong_words(source: str) -> Iterator[str]:
    """Each private word of a Python file, as `line: word -> what to write`."""
    docstrings = _docstring_lines(source)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        line = token.start[0]
        if token.type == tokenize.NAME:
            words = _words(ALLOWED_IDENTIFIERS.sub("", token.string))
            for word in (*words, *map(" ".join, pairwise(words))):
                if word in IN_IDENTIFIERS:
                    yield f"{line}: {token.string} -> {IN_IDENTIFIERS[word]}"
        elif token.type == tokenize.COMMENT or (token.type == tokenize.STRING and line in docstrings):
            for found in wrong_phrases(token.string):
                yield f"{line}: {found}"
            for match in _PERSONS.finditer(token.string):
                yield f"{line}: {match[0]} -> no client, the caller, the owner: the noun that is meant"
            if _ONLY_SEE.fullmatch(token.string.strip('"').strip()):
                yield f"{line}: {token.string} -> a sentence"


def wrong_phrases(text: str) -> Iterator[str]:
    """Each private phrase of a text, as `phrase -> what to write`."""
    text = re.sub(r"`[^`]*`", "``", " ".join(text.split()))
    for pattern, instead in _PATTERNS:
        for match in pattern.finditer(text):
            yield f"'{match[0]}' in '{text[max(0, match.start() - 30) : match.end() + 20]}' -> {instead}"


def _words(identifier: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", identifier)]


def _docstring_lines(source: str) -> set[int]:
    return {node.body[0].lineno for node in definitions(source) if ast.get_docstring(node, clean=False) is not None}
