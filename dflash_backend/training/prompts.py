"""Prompts to train on: read from files, or written by the target itself."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_backend.engine.llm import LLM, RequestOutput
from dflash_backend.evaluation.errors import EvaluationError
from dflash_backend.evaluation.questions import Row, read_rows
from dflash_backend.text.chat import PromptError
from dflash_backend.text.tokenizer import Tokenizer
from dflash_backend.traffic import TrafficError, read_traffic
from dflash_backend.training.errors import TrainingError

PROBE = "7a1f3f0e"
MAX_QUESTION_TOKENS = 128
FEWEST_TOKENS = 3
# A text of the target's own, for one without a chat template, and how much of it becomes the prompt.
TEXT_TOKENS, TEXT_PROMPT = 64, (8, 48)
# What a question begins with is drawn as the target has it: cooler, a few kinds of questions would be most of them. The
# rest is cooler: the cooler, the more usual the question, and the more often it comes again.
OPENING_TOKENS = 4
TEMPERATURES = (0.7, 0.85, 1.0)
# Words of which fewer than this share differ are a loop, and so are tokens of an answer that does not end.
LOOP_WORDS, LOOP_SHARE = 12, 0.35
MAX_SCRIPTS = 2
ONE_SCRIPT = {"HIRAGANA": "CJK", "KATAKANA": "CJK", "HANGUL": "CJK", "FULLWIDTH": "CJK"}
SHAREGPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@dataclass(frozen=True)
class Prompt:
    """A prompt's tokens, the text that tells duplicates, and the target's answer where it is known."""

    token_ids: tuple[int, ...]
    text: str
    answer: tuple[int, ...] = ()


def read_prompts(
    files: Sequence[Path], tokenizer: Tokenizer, options: Mapping[str, Any], longest: int, seed: int, most: int
) -> list[Prompt]:
    """The prompts of JSONL files in an order drawn by `seed`, each once; those of more than `longest` tokens are left
    out. All rows are read; where there are more than `most`, as many are drawn, and the others are not tokenised.

    A row has `messages` (or `conversations`, as ShareGPT has them), whose last answer is dropped, or `prompt`, a text
    to continue as it is. options: variables of the chat template. Raises `TrainingError`.
    """
    found: dict[str, Prompt] = {}
    num_long = 0
    try:
        for row in _some_of((row for path in files for row in read_rows(path)), most, random.Random(seed)):
            prompt = _read_row(row, tokenizer, options)
            if len(prompt.token_ids) > longest:
                num_long += 1
            else:
                found.setdefault(prompt.text, prompt)
    except EvaluationError as error:
        raise TrainingError(str(error)) from None
    names = ", ".join(map(str, files))
    if not found:
        what = f"all {num_long} prompts have more than {longest} tokens" if num_long else "there is no prompt in it"
        raise TrainingError(f"{names}: {what}; --data takes a JSON object a line with 'messages' or 'prompt'")
    prompts = list(found.values())
    random.Random(seed).shuffle(prompts)
    return prompts


def _some_of(rows: Iterable[Row], most: int, chance: random.Random) -> list[Row]:
    """`most` of the rows, each as likely as the others: Waterman's reservoir (Knuth, TAOCP 2, algorithm R)."""
    kept: list[Row] = []
    for number, row in enumerate(rows):
        if number < most:
            kept.append(row)
        elif (other := chance.randrange(number + 1)) < most:
            kept[other] = row
    return kept


def recorded_prompts(folder: Path, target: Path, vocab_size: int, longest: int, seed: int) -> list[Prompt]:
    """The prompts that a server wrote down, each once and in an order drawn by `seed`; those of more than `longest`
    tokens are left out. vocab_size: the target's. Raises `TrainingError`."""
    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    try:
        for prompt, answer in read_traffic(folder, target):
            if not all(0 <= token_id < vocab_size for token_id in (*prompt, *answer)):
                raise TrainingError(
                    f"{folder} has a token id that the target has not (allowed: 0 to {vocab_size - 1}); its files are "
                    "damaged"
                )
            if answer or prompt not in found:
                found[prompt] = answer
    except TrafficError as error:
        raise TrainingError(str(error)) from None
    prompts = [Prompt(prompt, "", answer) for prompt, answer in found.items() if len(prompt) <= longest]
    if not prompts:
        raise TrainingError(f"{folder}: all {len(found)} prompts have more than {longest} tokens; raise --max-prompt")
    random.Random(seed).shuffle(prompts)
    return prompts


def _read_row(row: Row, tokenizer: Tokenizer, options: Mapping[str, Any]) -> Prompt:
    if row.has("prompt") and not row.has("messages"):
        text = row.text("prompt")
        return Prompt(tuple(tokenizer.encode(text)), text)
    if not tokenizer.chat_template:
        raise EvaluationError(
            f"{row.where}: the target's tokenizer has no chat template, and the row is a chat; give rows with "
            "'prompt', a text that the target continues"
        )
    messages = _sharegpt(row) if row.has("conversations") else row.data.get("messages")
    while isinstance(messages, list) and messages and isinstance(messages[-1], dict):
        if messages[-1].get("role") != "assistant":
            break
        messages = messages[:-1]
    checked = Row({"messages": messages}, row.where).messages("messages")
    try:
        chat = tokenizer.render_chat(checked, **options)
    except PromptError as error:
        raise EvaluationError(f"{row.where}: {error}") from None
    return Prompt(tuple(tokenizer.encode_chat(chat)), chat.text)


def _sharegpt(row: Row) -> Any:
    turns = row.data["conversations"]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise row.fail("conversations", 'a list of {"from": ..., "value": ...}')
    if all("role" in turn for turn in turns):
        return turns
    for turn in turns:
        if turn.get("from") not in SHAREGPT:
            raise row.fail("conversations", f'"from" as one of {", ".join(SHAREGPT)}')
    return [{"role": SHAREGPT[turn["from"]], "content": turn.get("value")} for turn in turns]


class QuestionWriter:
    """Has the target write prompts: what it would say in its user's place, or without a chat template from the
    beginning of a text.

    Raises `TrainingError` for a chat template that does not show where the user's turn begins.
    """

    def __init__(self, llm: LLM, options: Mapping[str, Any]) -> None:
        self._llm, self._tokenizer, self._options = llm, llm.tokenizer, options
        self._seen: set[str] = set()
        # The tokens with which the prompts of the last `requests` begin.
        self._openings: list[list[int]] = []
        self.has_template = bool(self._tokenizer.chat_template)
        self._params: dict[str, Any] = {"top_p": 0.98, "max_tokens": TEXT_TOKENS}
        if not self.has_template:
            self._start = _beginning(self._tokenizer)
            return
        before, after = self._around_turn()
        self._start = self._tokenizer.encode(before, add_special_tokens=False)
        self._params |= {"max_tokens": MAX_QUESTION_TOKENS} | _end_of_turn(self._tokenizer, after)
        if not self._start:
            self._start = _beginning(self._tokenizer)

    def _around_turn(self) -> tuple[str, str]:
        try:
            text = self._tokenizer.render_chat([{"role": "user", "content": PROBE}], **self._options).text
        except PromptError as error:
            raise TrainingError(f"the target cannot write questions itself: {error}; give prompts by --data") from None
        if text.count(PROBE) != 1:
            raise TrainingError(
                f"the target cannot write questions itself: its chat template prints a user's message "
                f"{text.count(PROBE)} times; give prompts by --data"
            )
        before, _, after = text.partition(PROBE)
        return before, after

    def know(self, text: str) -> None:
        """Take note of a prompt that is there already."""
        self._seen.add(normal(text))

    def write(
        self, count: int, seed: int, on_finished: Callable[[int, RequestOutput], None] | None = None
    ) -> list[Prompt]:
        """The prompts that are left of `count` that the target writes, drawn by seeds from `seed` on. on_finished: as
        of `LLM.generate`."""
        return self.prompts_of(self._llm.generate(*self.requests(count, seed), on_finished), seed)

    def requests(self, count: int, seed: int) -> tuple[list[list[int]], list[dict[str, Any]]]:
        """What `LLM.generate` is to continue so that the target writes `count` prompts, and the parameters of each. The
        target has written their first tokens then."""
        first = self._params | {"temperature": 1.0, "max_tokens": OPENING_TOKENS}
        seeds = range(seed, seed + count)
        openings = self._llm.generate([self._start] * count, [first | {"seed": each} for each in seeds])
        # One that is a whole question begins anew: a short question that comes at once is a usual one.
        self._openings = [[] if opening.finish_reason == "stop" else list(opening.token_ids) for opening in openings]
        params = [
            self._params | {"seed": each, "temperature": TEMPERATURES[each % len(TEMPERATURES)]} for each in seeds
        ]
        return [self._start + opening for opening in self._openings], params

    def prompts_of(self, outputs: Sequence[RequestOutput], seed: int) -> list[Prompt]:
        """The prompts in what came of the last `requests`, which had this seed."""
        found = []
        for index, (opening, output) in enumerate(zip(self._openings, outputs, strict=True)):
            if self.has_template and output.finish_reason != "stop":
                continue
            text = self._tokenizer.decode(opening) + output.text
            prompt = self._prompt([*opening, *output.token_ids], text, random.Random(seed + index))
            if prompt is not None and normal(prompt.text) not in self._seen:
                self._seen.add(normal(prompt.text))
                found.append(prompt)
        return found

    def _prompt(self, token_ids: Sequence[int], text: str, chance: random.Random) -> Prompt | None:
        if not self.has_template:
            kept = list(token_ids)[: chance.randint(*TEXT_PROMPT)]
            text = self._tokenizer.decode(kept)
            return Prompt((*self._start, *kept), text) if is_usable(text, len(kept)) else None
        text = text.strip()
        if not is_usable(text, len(token_ids)):
            return None
        chat = self._tokenizer.render_chat([{"role": "user", "content": text}], **self._options)
        return Prompt(tuple(self._tokenizer.encode_chat(chat)), chat.text)


def _beginning(tokenizer: Tokenizer) -> list[int]:
    """What a text begins with: the tokens that the tokenizer puts before one, else an end of text."""
    start = tokenizer.encode("")
    if not start and not tokenizer.eos_token_ids:
        raise TrainingError("the target's tokenizer has neither a beginning nor an end of text; give prompts by --data")
    return start or [tokenizer.eos_token_ids[-1]]


def _end_of_turn(tokenizer: Tokenizer, after: str) -> dict[str, Any]:
    """What ends a user's turn: the first special token that the template writes behind it, else its first text."""
    found = [(after.find(text), token) for text, token in tokenizer.special_token_ids.items() if text in after]
    if found:
        return {"stop_token_ids": [min(found)[1]]}
    first = after.strip("\n")[:16]
    return {"stop": [first]} if first.strip() else {}


def normal(text: str) -> str:
    """A text as duplicates are told by: without case and white space."""
    return " ".join(text.casefold().split())


def is_usable(text: str, num_tokens: int) -> bool:
    """Whether a text that a target wrote makes a prompt: long enough, no broken characters, no loop, and of at most
    `MAX_SCRIPTS` scripts."""
    words = text.split()
    if num_tokens < FEWEST_TOKENS or not words or "\ufffd" in text or not any(map(str.isalnum, text)):
        return False
    if len(words) >= LOOP_WORDS and len(set(words)) < LOOP_SHARE * len(words):
        return False
    return len(set(_scripts(text))) <= MAX_SCRIPTS


def is_loop(answer: Sequence[int], finish_reason: str | None) -> bool:
    """Whether an answer, as token ids, says the same over and over until it is cut off. Such answers are the longest
    there are: a few of them would be most of what is learnt."""
    return finish_reason == "length" and len(answer) >= LOOP_WORDS and len(set(answer)) < LOOP_SHARE * len(answer)


def _scripts(text: str) -> Iterator[str]:
    for letter in filter(str.isalpha, text):
        name = unicodedata.name(letter, "UNKNOWN").partition(" ")[0]
        yield ONE_SCRIPT.get(name, name)
