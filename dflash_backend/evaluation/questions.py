"""Questions of a data set, and how a row of a JSONL file becomes one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_backend.evaluation.errors import EvaluationError
from dflash_backend.text.client_json import is_text

Message = Mapping[str, str]
DEFAULT_MAX_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Question:
    """One row of a data set.

    Either `prompt` (text, continued as it is) or `messages` (a conversation, through the chat template). `follow_ups`
    are what the user says next, each after the model's answer to what came before, as in MT-Bench. `answer` is the
    right one of the last turn, where it is known, or a right one has one of the texts in `mentions`. `category` begins
    with the name of the data set. `max_tokens`: for each turn, where the caller asks for nothing else.
    """

    id: str
    dataset: str
    category: str
    prompt: str | None = None
    messages: tuple[Message, ...] = ()
    follow_ups: tuple[str, ...] = ()
    answer: str | None = None
    mentions: tuple[str, ...] = ()
    max_tokens: int = DEFAULT_MAX_TOKENS

    @property
    def num_turns(self) -> int:
        """How many answers the model gives."""
        return 1 + len(self.follow_ups)


@dataclass(frozen=True, slots=True)
class Row:
    """A JSON object from a file, with typed access. `where` names file and line (`set.jsonl, line 3`)."""

    data: Mapping[str, Any]
    where: str

    def fail(self, field: str, expected: str) -> EvaluationError:
        """The error for a field with the wrong value."""
        if self.data.get(field) is None:
            return EvaluationError(f"{self.where}: field '{field}' is missing; expected {expected}")
        shown = json.dumps(self.data[field])
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return EvaluationError(f"{self.where}: field '{field}' is {shown}; expected {expected}")

    def has(self, field: str) -> bool:
        """Whether the field is there and not null."""
        return self.data.get(field) is not None

    def text(self, field: str, default: str | None = None) -> str:
        """A string that is not empty."""
        value = self.data.get(field)
        if value is None and default is not None:
            return default
        if not _is_text(value):
            raise self.fail(field, "text")
        return str(value)

    def text_or_number(self, field: str, default: str | None = None) -> str | None:
        """Text, or a number as text; `default` when the field is missing or null."""
        value = self.data.get(field)
        if value is None:
            return default
        if isinstance(value, bool) or not (_is_text(value) or isinstance(value, int | float)):
            raise self.fail(field, "text or a number")
        return str(value)

    def mentions(self, field: str) -> tuple[str, ...]:
        """A text or a number, or a list of such; none where the field is missing or null."""
        value = self.data.get(field)
        listed = [value] if not isinstance(value, list) else value
        rows = [Row({field: each}, self.where).text_or_number(field) for each in listed]
        if value == [] or (isinstance(value, list) and None in rows):
            raise self.fail(field, "text or a number, or a list of such")
        return tuple(row for row in rows if row is not None)

    def texts(self, field: str) -> tuple[str, ...]:
        """A list of strings, at least one."""
        value = self.data.get(field)
        if not isinstance(value, list) or not value or not all(_is_text(item) for item in value):
            raise self.fail(field, "a list of texts, one for each turn")
        return tuple(value)

    def messages(self, field: str) -> tuple[Message, ...]:
        """Chat messages, the last of which asks for an answer."""
        value = self.data.get(field)
        listed = value if isinstance(value, list) else []
        if not listed or not all(map(_is_message, listed)) or listed[-1]["role"] == "assistant":
            raise self.fail(field, 'a list of {"role": ..., "content": ...}, the last one not the assistant\'s')
        return tuple({"role": message["role"], "content": message["content"]} for message in listed)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and _is_text(value.get("role")) and _is_text(value.get("content"))


def _is_text(value: Any) -> bool:
    """A string that is not empty and has a UTF-8 form: JSON can also write half of a surrogate pair."""
    return isinstance(value, str) and value != "" and is_text(value)


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a JSONL file; empty lines are skipped. Raises `EvaluationError` that names file and line."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _parse_row(line, f"{path}, line {number}")
    except OSError as error:
        raise EvaluationError(f"{path} cannot be read: {error.strerror}") from None


def _parse_row(line: bytes, where: str) -> Row:
    try:
        data = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise EvaluationError(f"{where}: this is not JSON in UTF-8 ({error}); expected one object a line") from None
    if not isinstance(data, dict):
        raise EvaluationError(f"{where}: this is {type(data).__name__}; expected a JSON object")
    return Row(data, where)


def read_question(row: Row, dataset: str, number: int) -> Question:
    """A row in our own format: `messages`, `turns` or `prompt`, and what else it may have. Raises `EvaluationError`.

    `prompt` beside one of the other two is their rendered form, as in the embedded sets, and is not read.
    """
    if row.has("messages") and row.has("turns"):
        raise EvaluationError(f"{row.where}: there are both 'messages' and 'turns'; give one of them")
    if row.has("answer") and row.has("mentions"):
        raise EvaluationError(f"{row.where}: there are both 'answer' and 'mentions'; give one of them")
    prompt: str | None = None
    messages: tuple[Message, ...] = ()
    follow_ups: tuple[str, ...] = ()
    if row.has("messages"):
        messages = row.messages("messages")
    elif row.has("turns"):
        first, *rest = row.texts("turns")
        messages, follow_ups = ({"role": "user", "content": first},), tuple(rest)
    else:
        if not row.has("prompt"):
            raise EvaluationError(f"{row.where}: no field 'prompt', 'messages' or 'turns'; a row needs one of them")
        prompt = row.text("prompt")
    return Question(
        id=str(row.text_or_number("id", f"{dataset}-{number}")),
        dataset=dataset,
        category=category_of(dataset, row.text("category", dataset)),
        prompt=prompt,
        messages=messages,
        follow_ups=follow_ups,
        answer=row.text_or_number("answer"),
        mentions=row.mentions("mentions"),
    )


def category_of(dataset: str, name: str) -> str:
    """The label of a category: that of two data sets never mix. A set that is all one category is labelled once."""
    return dataset if name == dataset else f"{dataset}/{name}"
