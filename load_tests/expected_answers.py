"""The expected answers, computed before a run by an engine in a process of its own and kept in a file.

That engine runs without a drafter and without a prefix cache, so the answers share nothing with what is tested but the
target's forward pass and its sampling.
"""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_backend.checkpoints.files import weight_files
from dflash_backend.config import ConfigError, EngineConfig
from dflash_backend.drafters.resolve import resolve_pair
from dflash_cli.commands.progress import Progress
from load_tests.prompts import TURN_END
from load_tests.workload import Question

if TYPE_CHECKING:
    from dflash_backend.engine.llm import LLM

# Settings of the server that change answers; the others change speed only.
MODEL_SETTINGS = (
    "target_model",
    "target_revision",
    "device",
    "dtype",
    "quantization",
    "activation_quantization",
    "kv_cache_dtype",
    "attention_backend",
    "batch_invariant",
    "max_model_len",
)
BATCH = 32
CHUNK = 2 * BATCH


class ExpectedAnswersError(RuntimeError):
    """The expected answers could not be computed."""


@dataclass(frozen=True, slots=True)
class ExpectedAnswer:
    """The right answer to a question, and its prompt as text and as token ids."""

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
    log: Callable[[str], None],
) -> dict[str, ExpectedAnswer]:
    """The right answer to each question, by its id: from the file in `directory` where it fits, else computed.

    Raises `ConfigError` or `CheckpointError` for settings that no engine can be built with or that a question does not
    fit, and `ExpectedAnswersError`.
    """
    model = {name: value for name, value in settings.items() if name in MODEL_SETTINGS}
    path = directory / f"{scenario}-seed{seed}-{key(questions, model)[:16]}.json"
    if path.is_file():
        log(f"expected answers: {len(questions)} from {path}")
        return _load(path)
    log(f"expected answers: computing {len(questions)}, without drafter and prefix cache; they are kept in {path}")
    answers = _compute_in_process(questions, model, log)
    directory.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump({id_: asdict(answer) for id_, answer in answers.items()}, file, ensure_ascii=False)
    partial.replace(path)
    return answers


def _compute_in_process(
    questions: Sequence[Question], settings: Mapping[str, str], log: Callable[[str], None]
) -> dict[str, ExpectedAnswer]:
    """`compute` with the engine in a process of its own, whose memory and threads do not burden the load generator."""
    # Ctrl-C is left to this process, which then ends that one.
    context = multiprocessing.get_context("spawn")
    progress = Progress("expected answers", log)
    with ProcessPoolExecutor(1, context, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        try:
            return compute(
                questions,
                lambda ready, prompts: pool.submit(generate, dict(settings), ready, prompts).result(),
                lambda num_answered: progress.step(num_answered, len(questions)),
            )
        except BrokenProcessPool:
            raise ExpectedAnswersError(
                "the process that computes the right answers died; it may have been out of memory: try fewer prompts"
            ) from None
        except KeyboardInterrupt:
            for child in multiprocessing.active_children():
                child.terminate()
            raise


def compute(
    questions: Sequence[Question],
    answer: Callable[[Sequence[Question], Sequence[str]], list[ExpectedAnswer]],
    on_answers: Callable[[int], None] = lambda num_answered: None,
) -> dict[str, ExpectedAnswer]:
    """The answer to every question, from `answer`, which gets questions with their prompts. A prompt
    contains the answer to its parent, so this goes generation by generation."""
    answers: dict[str, ExpectedAnswer] = {}
    waiting = list(questions)
    while waiting:
        ready = [question for question in waiting if question.parent is None or question.parent in answers]
        if not ready:
            raise ValueError(f"the question '{waiting[0].id}' has the parent '{waiting[0].parent}', which is missing")
        chosen = ready[:CHUNK]  # no more than shows progress
        found = answer(chosen, [whole_prompt(question, answers) for question in chosen])
        answers |= {question.id: one for question, one in zip(chosen, found, strict=True)}
        waiting = [question for question in waiting if question.id not in answers]
        on_answers(len(answers))
    return answers


def generate(
    settings: Mapping[str, str], questions: Sequence[Question], prompts: Sequence[str]
) -> list[ExpectedAnswer]:
    """Answer questions with an engine that is kept for the next ones."""
    from dflash_backend.engine.llm import RequestError

    llm = _engine(tuple(sorted(settings.items())))
    try:
        outputs = llm.generate(prompts, [question.sampling() for question in questions])
    except RequestError as error:
        raise ConfigError(f"with these settings a question cannot be asked: {error.message}") from None
    return [
        ExpectedAnswer(
            prompt=prompt,
            prompt_ids=tuple(output.prompt_token_ids),
            token_ids=tuple(output.token_ids),
            text=output.text,
            finish_reason=str(output.finish_reason),
        )
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


@functools.cache
def _engine(settings: tuple[tuple[str, str], ...]) -> LLM:
    """An engine without a drafter and a prefix cache."""
    from dflash_backend.engine.llm import LLM

    arguments: dict[str, Any] = {**dict(settings), "enable_prefix_caching": "false", "max_num_seqs": BATCH}
    return LLM(**arguments, num_speculative_tokens=0)


def whole_prompt(question: Question, answers: Mapping[str, ExpectedAnswer]) -> str:
    """The prompt as it is sent; the parent must be answered."""
    if question.parent is None:
        return question.text
    parent = answers[question.parent]
    return f"{parent.prompt}{parent.text}{TURN_END}{question.text}"


def key(questions: Sequence[Question], settings: Mapping[str, str]) -> str:
    """A hash of the questions, the settings that matter, and the size and time of the weights."""
    pair = resolve_pair(EngineConfig.from_values(settings))
    weights = [
        (file.name, file.stat().st_size, file.stat().st_mtime_ns)
        for directory in pair.checkpoints
        for file in weight_files(directory)
    ]
    text = json.dumps([[asdict(question) for question in questions], sorted(settings.items()), weights])
    return hashlib.sha256(text.encode()).hexdigest()


def _load(path: Path) -> dict[str, ExpectedAnswer]:
    stored = json.loads(path.read_text(encoding="utf-8"))
    return {
        id_: ExpectedAnswer(
            **{**answer, "prompt_ids": tuple(answer["prompt_ids"]), "token_ids": tuple(answer["token_ids"])}
        )
        for id_, answer in stored.items()
    }
