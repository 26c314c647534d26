"""The expected answers, computed before a run by an engine in a process of its own and kept in a file.

For greedy questions the engine runs without a drafter and without a prefix cache, so the answers share nothing with
what is tested but the target's forward pass. Sampled answers depend on where draft blocks begin, so those come from the
engine with its drafter.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_backend.checkpoints import resolve_pair
from dflash_backend.checkpoints.files import weight_files
from dflash_backend.config import ConfigError, EngineConfig
from dflash_cli.commands.progress import Progress
from load_tests.prompts import TURN_END
from load_tests.workload import Question

if TYPE_CHECKING:
    from dflash_backend.engine.llm import LLM

# Settings of the server that change answers; the others change speed only.
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
    """`compute` in a process of its own: the engine's memory and threads would burden the load generator."""
    context = multiprocessing.get_context("spawn")
    num_answered = context.Value("i", 0)
    progress = Progress("expected answers", log)
    with ProcessPoolExecutor(1, context, _begin, (num_answered,)) as pool:
        try:
            future = pool.submit(_compute_and_count, list(questions), settings)
            while not wait([future], timeout=1.0).done:
                progress.step(min(num_answered.value, len(questions) - 1), len(questions))
            answers = future.result()
            progress.step(len(questions), len(questions))
            return answers
        except BrokenProcessPool:
            raise ExpectedAnswersError(
                "the process that computes the right answers died; it may have been out of memory: try fewer prompts"
            ) from None
        except KeyboardInterrupt:
            for child in multiprocessing.active_children():
                child.terminate()
            raise


# In the process that computes: the number of answers so far, shared with the process that waits.
_num_answered: Any = None


def _begin(num_answered: Any) -> None:
    """Leave Ctrl-C to the process that waits, which then ends this one."""
    global _num_answered
    _num_answered = num_answered
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _compute_and_count(questions: Sequence[Question], settings: Mapping[str, str]) -> dict[str, ExpectedAnswer]:
    def count() -> None:
        _num_answered.value += 1

    return compute(questions, settings, count)


def compute(
    questions: Sequence[Question], settings: Mapping[str, str], on_answer: Callable[[], None] = lambda: None
) -> dict[str, ExpectedAnswer]:
    """Answer every question offline, and call `on_answer` for each. A question needs the answer to its parent, so this
    goes generation by generation."""
    from dflash_backend.engine.llm import LLM

    common: dict[str, Any] = {**settings, "enable_prefix_caching": "false", "max_num_seqs": BATCH}
    greedy = LLM(**{**common, "num_speculative_tokens": 0})
    sampled = LLM(**common) if any(question.temperature > 0 for question in questions) else greedy
    answers: dict[str, ExpectedAnswer] = {}
    waiting = list(questions)
    while waiting:
        ready = [question for question in waiting if question.parent is None or question.parent in answers]
        if not ready:
            raise ValueError(f"the question '{waiting[0].id}' has the parent '{waiting[0].parent}', which is missing")
        waiting = [question for question in waiting if question not in ready]
        _answer(greedy, [question for question in ready if question.temperature == 0], answers, on_answer)
        _answer(sampled, [question for question in ready if question.temperature > 0], answers, on_answer)
    return answers


def _answer(
    llm: LLM, questions: Sequence[Question], answers: dict[str, ExpectedAnswer], on_answer: Callable[[], None]
) -> None:
    """Add the answers to questions whose parents are answered."""
    from dflash_backend.engine.llm import RequestError

    prompts = [whole_prompt(question, answers) for question in questions]
    parameters = [question.sampling() for question in questions]
    try:
        outputs = llm.generate(prompts, parameters, lambda index, output: on_answer()) if prompts else []
    except RequestError as error:
        raise ConfigError(f"with these settings a question cannot be asked: {error.message}") from None
    for question, prompt, output in zip(questions, prompts, outputs, strict=True):
        answers[question.id] = ExpectedAnswer(
            prompt=prompt,
            prompt_ids=tuple(output.prompt_token_ids),
            token_ids=tuple(output.token_ids),
            text=output.text,
            finish_reason=str(output.finish_reason),
        )


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
        for spec in (pair.target, pair.draft)
        if spec is not None
        for file in weight_files(spec.path)
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
