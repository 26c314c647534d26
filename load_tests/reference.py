"""The right answers, made before a run by an engine in a process of its own and kept in a file.

For greedy questions the engine runs without a drafter and without a prefix cache, so the answers are the target's own
and share nothing with what is tested but the target's forward pass. Sampled answers depend on where draft blocks begin,
so those come from the engine with its drafter; a load must not change them either.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_backend.checkpoints import resolve_pair
from dflash_backend.checkpoints.files import weight_files
from dflash_backend.config import ConfigError, EngineConfig
from dflash_cli.commands.progress import Progress
from load_tests.corpus import TURN_END
from load_tests.workload import Question

# Settings of the server that change what is right; the others change speed only.
MODEL_SETTINGS = (
    "target_model",
    "draft_model",
    "num_speculative_tokens",
    "causal",
    "draft_sample_method",
    "device",
    "dtype",
    "attention_backend",
    "max_model_len",
)
BATCH = 32


class ExpectedAnswersError(RuntimeError):
    """The right answers could not be had."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The right answer to a question: its prompt as text and as token ids, and what must come."""

    prompt: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


def expected_answers(
    scenario: str,
    seed: int,
    questions: Sequence[Question],
    settings: Mapping[str, str],
    directory: Path,
    say: Callable[[str], None],
) -> dict[str, Expected]:
    """The right answer to each question, by its id: from the file in `directory` where it fits, else computed.

    Raises `ConfigError` or `CheckpointError` for settings that no engine can be built with or that a question does not
    fit, and `ExpectedAnswersError`.
    """
    model = {name: value for name, value in settings.items() if name in MODEL_SETTINGS}
    key = _key(questions, model)
    path = directory / f"{scenario}-seed{seed}-{key[:16]}.json"
    if path.is_file():
        say(f"expected answers: {len(questions)} from {path}")
        return _load(path)
    say(f"expected answers: computing {len(questions)}, without drafter and prefix cache; they are kept in {path}")
    # A process of its own: what the engine holds would burden the load generator.
    context = multiprocessing.get_context("spawn")
    answered = context.Value("i", 0)
    progress = Progress("expected answers", say)
    with ProcessPoolExecutor(1, context, _begin, (answered,)) as pool:
        try:
            future = pool.submit(_compute_and_count, list(questions), model)
            while True:
                try:
                    answers = future.result(timeout=1.0)
                    break
                except TimeoutError:
                    progress.step(min(answered.value, len(questions) - 1), len(questions))
            progress.step(len(questions), len(questions))
        except BrokenProcessPool:
            raise ExpectedAnswersError(
                "the process that computes the right answers died; it may have been out of memory: try fewer prompts"
            ) from None
        except KeyboardInterrupt:
            for child in multiprocessing.active_children():
                child.terminate()
            raise
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps({id_: asdict(answer) for id_, answer in answers.items()}, ensure_ascii=False)
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
    return answers


# In the process that computes: how many answers it has, for the one that waits.
_answered: Any = None


def _begin(answered: Any) -> None:
    """Ctrl-C is for the process that waits, which then ends this one."""
    global _answered
    _answered = answered
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _compute_and_count(questions: Sequence[Question], settings: Mapping[str, str]) -> dict[str, Expected]:
    def count() -> None:
        _answered.value += 1

    return compute(questions, settings, count)


def compute(
    questions: Sequence[Question], settings: Mapping[str, str], on_answer: Callable[[], None] = lambda: None
) -> dict[str, Expected]:
    """Answer every question offline, and call `on_answer` for each. Questions with a parent come after it; an answer to
    a parent is needed first, so this goes generation by generation."""
    from dflash_backend.engine.llm import LLM, RequestError

    common: dict[str, Any] = {**settings, "enable_prefix_caching": "false", "max_num_seqs": BATCH}
    greedy = LLM(**{**common, "num_speculative_tokens": 0})
    sampled = LLM(**common) if any(question.temperature > 0 for question in questions) else greedy
    answers: dict[str, Expected] = {}
    waiting = list(questions)
    while waiting:
        now = [question for question in waiting if question.parent is None or question.parent in answers]
        if not now:
            raise ValueError(
                f"the question '{waiting[0].id}' has the parent '{waiting[0].parent}', which does not exist"
            )
        for llm, chosen in (
            (greedy, [question for question in now if question.temperature == 0]),
            (sampled, [question for question in now if question.temperature > 0]),
        ):
            prompts = [whole_prompt(question, answers) for question in chosen]
            try:
                parameters = [question.sampling() for question in chosen]
                outputs = llm.generate(prompts, parameters, lambda index, output: on_answer()) if chosen else []
            except RequestError as error:
                raise ConfigError(f"with these settings a question cannot be asked: {error.message}") from None
            for question, prompt, output in zip(chosen, prompts, outputs, strict=True):
                answers[question.id] = Expected(
                    prompt=prompt,
                    prompt_ids=tuple(output.prompt_token_ids),
                    token_ids=tuple(output.token_ids),
                    text=output.text,
                    finish_reason=str(output.finish_reason),
                )
        answered = {question.id for question in now}
        waiting = [question for question in waiting if question.id not in answered]
    return answers


def whole_prompt(question: Question, answers: Mapping[str, Expected]) -> str:
    """The prompt as it is sent; a parent's answer must be known."""
    if question.parent is None:
        return question.text
    parent = answers[question.parent]
    return f"{parent.prompt}{parent.text}{TURN_END}{question.text}"


def _key(questions: Sequence[Question], settings: Mapping[str, str]) -> str:
    """Names the questions, the settings that matter, and the weights (by size and time, which is quick to see)."""
    pair = resolve_pair(EngineConfig.from_values(settings))
    weights = [
        (file.name, file.stat().st_size, file.stat().st_mtime_ns)
        for spec in (pair.target, pair.draft)
        if spec is not None
        for file in weight_files(spec.path)
    ]
    text = json.dumps([[asdict(question) for question in questions], sorted(settings.items()), weights])
    return hashlib.sha256(text.encode()).hexdigest()


def _load(path: Path) -> dict[str, Expected]:
    stored = json.loads(path.read_text(encoding="utf-8"))
    return {
        id_: Expected(
            prompt=entry["prompt"],
            prompt_ids=tuple(entry["prompt_ids"]),
            token_ids=tuple(entry["token_ids"]),
            text=entry["text"],
            finish_reason=entry["finish_reason"],
        )
        for id_, entry in stored.items()
    }
