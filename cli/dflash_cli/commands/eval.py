"""`dflash-triton eval`: acceptance length and accuracy on data sets, in this process or on a running server."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_cli.commands.arguments import (
    add_settings_option,
    non_negative_float,
    non_negative_int,
    positive_int,
)
from dflash_cli.commands.client_options import add_connection_options, client_of
from dflash_cli.commands.console import INTERRUPTED, fail, say, show
from dflash_cli.commands.packages import engine_missing
from dflash_cli.commands.progress import Progress

if TYPE_CHECKING:
    from dflash_backend.evaluation import Answerer, Evaluation, Question
    from dflash_backend.evaluation.datasets import Source
    from dflash_cli.server_backend import Encode

    Model = tuple[Answerer, dict[str, Any]]

SERVER_CONCURRENCY = 16


class _UsageError(Exception):
    """The options do not go together, or one has a value that makes no sense."""


def add_parser(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "eval",
        help="measure acceptance length and accuracy on data sets",
        description="Measure how many tokens a step of speculative decoding yields, and how many answers are right. "
        "The models run in this process; with --url a running server is measured instead. Without --target it is the "
        "demo pair, without --dataset the embedded sets math, code and chat (docs/evaluation.md).",
    )
    parser.add_argument(
        "--target", metavar="DIR|ID", help="target model; with --url: whose tokenizer renders conversations"
    )
    parser.add_argument("--draft", metavar="DIR|ID", help="DFlash drafter; '' for no speculation")
    add_settings_option(parser)
    parser.add_argument(
        "--dataset",
        dest="datasets",
        metavar="NAME|FILE",
        action="append",
        default=[],
        help="math, code, chat, gsm8k, math500, humaneval, mbpp, mt-bench, or a JSONL file; gsm8k=FILE.jsonl reads the "
        "published rows from a file; may be repeated",
    )
    parser.add_argument("--limit", type=positive_int, metavar="N", help="only the first N rows of each data set")
    parser.add_argument(
        "--shuffle", action="store_true", help="take the rows in the order of the DFlash authors' benchmark (seed 42)"
    )
    parser.add_argument(
        "--max-tokens", type=positive_int, metavar="N", help="most tokens of an answer (256; 2048 for sets of the hub)"
    )
    parser.add_argument(
        "--temperature", type=non_negative_float, default=0.0, metavar="T", help="0 is greedy (%(default)g)"
    )
    parser.add_argument("--seed", type=non_negative_int, default=0, metavar="N", help="where T > 0 (%(default)s)")
    parser.add_argument(
        "--concurrency",
        type=positive_int,
        metavar="N",
        help=f"requests at a time (max_num_seqs; with --url {SERVER_CONCURRENCY})",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write eval.json, eval.md and eval.png there")
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the tables")
    add_connection_options(parser, url_needed=False, timeout=600.0)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the sub-command and return the exit status."""
    from dflash_backend.config import ConfigError
    from dflash_backend.evaluation import EvaluationError

    try:
        return _run(arguments)
    except (_UsageError, ConfigError) as error:
        return fail(str(error), status=2)
    except EvaluationError as error:
        return fail(str(error))


def _run(arguments: argparse.Namespace) -> int:
    """Measure and show. Raises `_UsageError`, `ConfigError` or `EvaluationError`."""
    from dflash_backend.evaluation import report
    from dflash_backend.evaluation.datasets import load_questions

    _check_usage(arguments)
    questions = load_questions(_sources(arguments.datasets), arguments.limit, arguments.shuffle)
    if arguments.out is not None:
        report.prepare(arguments.out)
    with _server(arguments) if arguments.url is not None else _engine(arguments) as (answerer, about):
        evaluation = _evaluate(answerer, questions, arguments)
    about |= {
        "datasets": [group.name for group in evaluation.datasets],
        "limit": arguments.limit,
        "shuffled": arguments.shuffle,
        "max_tokens": sorted({arguments.max_tokens or question.max_tokens for question in questions}),
        "temperature": arguments.temperature,
        "seed": arguments.seed,
    }
    if arguments.out is not None:
        report.write(arguments.out, evaluation, about)
        say(f"wrote eval.json, eval.md and eval.png to {arguments.out}")
    if arguments.json:
        show(json.dumps(report.as_dict(evaluation, about), ensure_ascii=False))
    else:
        show(report.tables(evaluation, about).rstrip("\n"))
    return fail("cancelled; this is what was answered until then", INTERRUPTED) if evaluation.num_left_out else 0


def _check_usage(arguments: argparse.Namespace) -> None:
    if arguments.url is not None and (arguments.draft is not None or arguments.settings):
        option = "--set" if arguments.settings else "--draft"
        raise _UsageError(f"{option} is for an engine in this process, --url names one that runs; give one of them")
    if arguments.concurrency is not None and any(name == "max_num_seqs" for name, _ in arguments.settings):
        raise _UsageError("--concurrency sets max_num_seqs; give one of them")


def _sources(texts: list[str]) -> list[Source]:
    from dflash_backend.evaluation.datasets import EMBEDDED_SETS, parse_source

    try:
        return [parse_source(text) for text in texts or EMBEDDED_SETS]
    except ValueError as error:
        raise _UsageError(str(error)) from None


def _evaluate(answerer: Answerer, questions: list[Question], arguments: argparse.Namespace) -> Evaluation:
    from dflash_backend.evaluation import Sampling, evaluate

    sampling = Sampling(arguments.max_tokens, arguments.temperature, arguments.seed)
    return evaluate(answerer, questions, sampling, Progress("answers", say).step)


@contextmanager
def _engine(arguments: argparse.Namespace) -> Iterator[Model]:
    """The engine in this process. Settings come from the environment as a server's do, the command line over it."""
    from dflash_backend.evaluation import EvaluationError

    try:
        from dflash_backend.config import ConfigError, EngineConfig, environment_settings
        from dflash_backend.engine.build import LOAD_ERRORS, CheckpointError
        from dflash_backend.engine.llm import LLM, RequestError
        from dflash_backend.evaluation.engine import EngineAnswerer
        from dflash_backend.text.sampling_params import ParameterError
    except ImportError as error:
        raise _engine_missing(error) from None
    given = dict(arguments.settings)
    options = {"target_model": arguments.target, "draft_model": arguments.draft, "max_num_seqs": arguments.concurrency}
    given |= {name: value for name, value in options.items() if value is not None}
    settings = environment_settings(os.environ) | given
    # Each layer is checked with the name of where it comes from; `LLM` only knows arguments.
    EngineConfig.from_layers([("environment", environment_settings(os.environ)), ("command line", given)])
    try:
        llm = LLM(progress=lambda message, fraction: say(message), **settings)
    except ConfigError:
        raise
    except LOAD_ERRORS as error:
        raise EvaluationError(str(error)) from None
    about = {"engine": llm.engine.ready.description, "num_speculative_tokens": llm.engine.ready.num_speculative_tokens}
    try:
        yield EngineAnswerer(llm), about
    except ParameterError as error:
        raise _UsageError(str(error)) from None
    except (RequestError, CheckpointError) as error:
        raise EvaluationError(str(error)) from None


@contextmanager
def _server(arguments: argparse.Namespace) -> Iterator[Model]:
    """A server that runs. `--target` names whose tokenizer renders conversations here, with thinking off."""
    from dflash_cli.server_backend import ServerAnswerer

    encode = None if arguments.target is None else _encoder(arguments.target)
    try:
        client = client_of(arguments)
    except ValueError as error:
        raise _UsageError(str(error)) from None
    with client:
        about = {"server": client.address, "protocol": client.protocol, "model": client.model}
        yield ServerAnswerer(client, arguments.concurrency or SERVER_CONCURRENCY, encode), about


def _encoder(target: str) -> Encode:
    """What turns a request into token ids with the tokenizer of `target`."""
    from dflash_backend.evaluation import EvaluationError, ModelRequest

    try:
        from dflash_backend.checkpoints import CheckpointError
        from dflash_backend.config import EngineConfig
        from dflash_backend.drafters.resolve import resolve_target_dir
        from dflash_backend.evaluation.engine import encode
        from dflash_backend.text.tokenizer import Tokenizer
    except ImportError as error:
        raise _engine_missing(error) from None
    try:
        tokenizer = Tokenizer.load(resolve_target_dir(EngineConfig.from_values({"target_model": target})))
    except CheckpointError as error:
        raise EvaluationError(str(error)) from None

    def encoder(request: ModelRequest) -> list[int]:
        return encode(tokenizer, request)

    return encoder


def _engine_missing(error: ImportError) -> Exception:
    from dflash_backend.evaluation import EvaluationError

    return EvaluationError(engine_missing(error))
