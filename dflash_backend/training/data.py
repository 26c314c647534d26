"""What a drafter is trained on: prompts with the target's own answers, kept on disk as they are made.

`samples.jsonl` has a prompt and its answer a line, `held_out.jsonl` the prompts that are kept apart, `rounds` how often
the target was asked for questions. A line that was cut off by the end of a run is taken away, and the next run goes on
behind it. Only their owner can read the files: they may hold what people wrote.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_backend.engine.llm import LLM, RequestOutput
from dflash_backend.traffic import target_digest, tokenizer_digest
from dflash_backend.training.errors import TrainingError, cannot_write
from dflash_backend.training.prompts import Prompt, QuestionWriter, is_loop, read_prompts, recorded_prompts

SAMPLES, HELD_OUT, ROUNDS = "samples.jsonl", "held_out.jsonl", "rounds"
ROUND = 128
"""Prompts that are answered together."""
HELD_OUT_SHARE, FEWEST_HELD_OUT, MOST_HELD_OUT = 0.05, 4, 48
FEWEST_ANSWER_TOKENS = 3
MOST_EMPTY_ROUNDS = 4
Report = Callable[[int, int], None]


@dataclass(frozen=True)
class Sample:
    """A prompt and the target's answer, with the token that ended it."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All of its tokens."""
        return self.prompt + self.answer


@dataclass(frozen=True)
class DataOptions:
    """What is asked of the data. num_tokens: of answers. max_answer, max_prompt: tokens of one. files: prompts;
    traffic: the folder of a server's setting record_traffic; neither: the target writes them. template_options:
    variables of the chat template."""

    num_tokens: int
    temperature: float = 0.0
    max_answer: int = 256
    max_prompt: int = 1024
    seed: int = 0
    files: tuple[Path, ...] = ()
    traffic: Path | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)

    def fingerprint(self, target: Path, numbers: Mapping[str, str] | None = None) -> str:
        """What tells the data of one target and these options, `num_tokens` apart: 16 hexadecimal digits. numbers:
        settings of the engine on which answers depend."""
        digest = hashlib.sha256(f"{target_digest(target)} {tokenizer_digest(target)}".encode())
        for name in ("tokenizer_config.json", "chat_template.jinja"):
            if (target / name).is_file():
                digest.update((target / name).read_bytes())
        own = [self.temperature, self.max_answer, self.max_prompt, self.seed, dict(self.template_options)]
        if self.traffic is not None:
            # Not what is in it: the server goes on writing.
            own.append(str(self.traffic.resolve()))
        if numbers:
            own.append(dict(numbers))
        digest.update(json.dumps(own, sort_keys=True).encode())
        for path in self.files:
            try:
                digest.update(hashlib.sha256(path.read_bytes()).digest())
            except OSError as error:
                raise TrainingError(f"{path} cannot be read: {error.strerror}; --data takes JSONL files") from None
        return digest.hexdigest()[:16]


class Store:
    """Samples and held-out prompts in a folder. Raises `TrainingError` for what cannot be read or written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(folder, error) from None
        self.num_rounds = 0
        # Where it cannot be read the first questions come again, and are left out.
        with contextlib.suppress(OSError, ValueError):
            self.num_rounds = int((folder / ROUNDS).read_text())
        self.held_out = [tuple(row["prompt"]) for row in self._read(HELD_OUT, "prompt")]
        self.samples = [
            Sample(tuple(row["prompt"]), tuple(row["answer"])) for row in self._read(SAMPLES, "prompt", "answer")
        ]

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(sample.answer) for sample in self.samples)

    @property
    def known(self) -> set[tuple[int, ...]]:
        """The prompts that are there."""
        return {sample.prompt for sample in self.samples}.union(self.held_out)

    def hold_out(self, prompts: Iterable[tuple[int, ...]]) -> None:
        """Keep prompts apart."""
        for prompt in prompts:
            self._append(HELD_OUT, {"prompt": prompt})
            self.held_out.append(prompt)

    def add(self, sample: Sample) -> None:
        """Write a sample down."""
        self._append(SAMPLES, {"prompt": sample.prompt, "answer": sample.answer})
        self.samples.append(sample)

    def begin_round(self) -> int:
        """The number of another round of questions, from 1 on."""
        self.num_rounds += 1
        path = self.folder / ROUNDS
        try:
            path.write_text(f"{self.num_rounds}\n")
        except OSError as error:
            raise cannot_write(path, error) from None
        return self.num_rounds

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        path = self.folder / name
        try:
            with open(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                size = file.tell()
                try:
                    file.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")
                    file.flush()
                except OSError:
                    os.truncate(path, size)  # no half line stays
                    raise
        except OSError as error:
            raise cannot_write(path, error) from None

    def _read(self, name: str, *fields: str) -> list[dict[str, Any]]:
        path = self.folder / name
        if not path.exists():
            return []
        try:
            whole = path.read_bytes()
            text, newline, rest = whole.rpartition(b"\n")
            if rest:
                os.truncate(path, len(text) + len(newline))
        except OSError as error:
            raise TrainingError(f"{path} cannot be read: {error.strerror}") from None
        rows = []
        for number, line in enumerate(text.splitlines(), 1):
            try:
                row = json.loads(line)
                if not all(isinstance(n, int) for each in fields for n in row[each]):
                    raise TypeError
            except (ValueError, TypeError, KeyError):
                raise TrainingError(
                    f"{path}, line {number}, is damaged: it is not a row of token ids as this program writes them; "
                    "take the line away, or the file, which is then made anew"
                ) from None
            rows.append(row)
        return rows


def collect(llm: LLM, store: Store, options: DataOptions, report: Report, deadline: float | None = None) -> None:
    """Fill the store up to `options.num_tokens` tokens of answers, or to the last prompt, or to `deadline`
    (`time.monotonic`). Held-out prompts come first. Raises `TrainingError`."""
    report(store.num_tokens, options.num_tokens)
    source = _Source(llm, store, options, deadline)
    with contextlib.suppress(_TimeIsUp):
        _fill(store, source, options, report)
    if not store.samples or len(store.held_out) < 1:
        few = "the files of --data have" if options.files else f"{options.traffic} has"
        where = f"{few} too few prompts" if source.is_finite else "the target writes no usable questions"
        raise TrainingError(
            f"{where}: {len(store.samples)} samples and {len(store.held_out)} held-out prompts came of it; give more "
            "prompts by --data, or more --minutes"
        )


def _fill(store: Store, source: _Source, options: DataOptions, report: Report) -> None:
    known = store.known
    wanted = min(MOST_HELD_OUT, max(FEWEST_HELD_OUT, source.expected_held_out))
    empty = 0
    while store.num_tokens < options.num_tokens:
        prompts = source.next()
        if not prompts:
            empty += 1
            if source.is_finite or empty == MOST_EMPTY_ROUNDS:
                return
            continue
        empty = 0
        fresh = []
        for prompt in prompts:
            if prompt.token_ids not in known:
                known.add(prompt.token_ids)
                fresh.append(prompt)
        held = max(0, min(len(fresh), wanted - len(store.held_out)))
        store.hold_out(prompt.token_ids for prompt in fresh[:held])
        trained = fresh[held:]
        for prompt in trained:
            if len(prompt.answer) >= FEWEST_ANSWER_TOKENS:
                store.add(Sample(prompt.token_ids, prompt.answer[: options.max_answer]))
        source.answer([prompt.token_ids for prompt in trained if not prompt.answer], report)
        report(store.num_tokens, options.num_tokens)


class _TimeIsUp(Exception):
    """The deadline has come, also in the middle of a round: what is answered is kept."""


class _Source:
    """Rounds of prompts, from files or from the target, which writes those of a round beside the answers to the round
    before: answers of different lengths leave rows free."""

    def __init__(self, llm: LLM, store: Store, options: DataOptions, deadline: float | None) -> None:
        self.is_finite = bool(options.files) or options.traffic is not None
        self._llm, self._store, self._options, self._deadline, self._round = llm, store, options, deadline, 0
        self.expected_held_out = MOST_HELD_OUT
        self._prompts: list[Prompt] = []
        self._writer: QuestionWriter | None = None
        self._longest = min(options.max_prompt, llm.engine.ready.max_model_len - 2)
        if self.is_finite:
            if options.traffic is not None:
                prompts = recorded_prompts(
                    options.traffic, llm.target_dir, llm.engine.ready.vocab_size, self._longest, options.seed
                )
            else:
                most = options.num_tokens // FEWEST_ANSWER_TOKENS + MOST_HELD_OUT
                prompts = read_prompts(
                    options.files, llm.tokenizer, options.template_options, self._longest, options.seed, most
                )
            known = store.known
            self.expected_held_out = int(HELD_OUT_SHARE * len(prompts))
            self._prompts = [prompt for prompt in prompts if prompt.token_ids not in known]
            return
        self._writer = QuestionWriter(llm, options.template_options)
        for prompt in store.known:
            self._writer.know(llm.tokenizer.decode(prompt, skip_special_tokens=False))

    @property
    def _seed(self) -> int:
        return self._options.seed * 1_000_003 + self._round * ROUND

    def _check_time(self) -> None:
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise _TimeIsUp

    def next(self) -> list[Prompt]:
        """The next round."""
        self._check_time()
        if self._writer is not None and not self._prompts:
            self._round = self._store.begin_round()
            self._prompts = self._writer.write(ROUND, self._seed, lambda *_: self._check_time())
        taken, self._prompts = self._prompts[:ROUND], self._prompts[ROUND:]
        return [prompt for prompt in taken if len(prompt.token_ids) <= self._longest]

    def answer(self, prompts: Sequence[tuple[int, ...]], report: Report) -> None:
        """Have the prompts answered, and those of the next round written."""
        if not prompts:
            return
        llm, store, options = self._llm, self._store, self._options
        params: list[dict[str, Any]] = [
            {
                "temperature": options.temperature,
                "max_tokens": min(options.max_answer, llm.engine.ready.max_model_len - len(prompt)),
                "seed": options.seed + index + len(store.samples),
            }
            for index, prompt in enumerate(prompts)
        ]

        def keep(index: int, output: RequestOutput) -> None:
            ids = output.token_ids
            if index < len(prompts) and len(ids) >= FEWEST_ANSWER_TOKENS and not is_loop(ids, output.finish_reason):
                store.add(Sample(prompts[index], tuple(ids)))
            report(store.num_tokens, options.num_tokens)
            self._check_time()

        is_last = store.num_tokens + len(prompts) * options.max_answer // 2 >= options.num_tokens
        writer = None if is_last else self._writer
        begun: list[list[int]] = []
        if writer is not None:
            self._round = store.begin_round()
            begun, their_params = writer.requests(ROUND, self._seed)
            params += their_params
        outputs = llm.generate([*map(list, prompts), *begun], params, on_finished=keep)
        if writer is not None:
            self._prompts = writer.prompts_of(outputs[len(prompts) :], self._seed)
