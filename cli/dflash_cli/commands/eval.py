"""`dflash-triton eval`: acceptance length and accuracy on data sets, in this process or on a running server."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dflash_cli.commands.arguments import (
    add_settings_option,
    json_object,
    non_negative_float,
    non_negative_int,
    positive_int,
)
from dflash_cli.commands.client_options import add_connection_options, client_of
from dflash_cli.commands.console import INTERRUPTED, fail, say, show
from dflash_cli.commands.packages import engine_missing
from dflash_cli.commands.progress import Progress

if TYPE_CHECKING:
    from dflash_backend.evaluation.measure import Model

SERVER_CONCURRENCY = 16


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
    parser.add_argument(
        "--draft", metavar="DIR|ID|ngram", help="DFlash drafter, or prompt lookup; '' for no speculation"
    )
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
    _add_request_options(parser)
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


def _add_request_options(parser: argparse.ArgumentParser) -> None:
    """What each request asks for."""
    parser.add_argument(
        "--max-tokens", type=positive_int, metavar="N", help="most tokens of an answer (256; 2048 for sets of the hub)"
    )
    parser.add_argument(
        "--temperature", type=non_negative_float, default=0.0, metavar="T", help="0 is greedy (%(default)g)"
    )
    parser.add_argument("--seed", type=non_negative_int, default=0, metavar="N", help="where T > 0 (%(default)s)")
    parser.add_argument(
        "--chat-template-kwargs",
        type=json_object,
        default={"enable_thinking": False},
        metavar="JSON",
        help="variables of the chat template (%(default)s, as the published figures are measured)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the sub-command and return the exit status."""
    from dflash_backend.config import ConfigError
    from dflash_backend.evaluation import EvaluationError, InvalidSetting

    try:
        return _run(arguments)
    except (InvalidSetting, ConfigError) as error:
        return fail(str(error), status=2)
    except EvaluationError as error:
        return fail(str(error))


def _run(arguments: argparse.Namespace) -> int:
    """Measure and show. Raises `ConfigError` or `EvaluationError`."""
    from dflash_backend.evaluation import Sampling, report
    from dflash_backend.evaluation.measure import EvaluationSettings, measure

    _check_usage(arguments)
    sampling = Sampling(arguments.max_tokens, arguments.temperature, arguments.seed)
    settings = EvaluationSettings(arguments.datasets, arguments.limit, arguments.shuffle, sampling)
    model = _server(arguments) if arguments.url is not None else _engine(arguments)
    evaluation, about = measure(settings, model, Progress("answers", say).step, arguments.out)
    if arguments.out is not None:
        say(f"wrote eval.json, eval.md and eval.png to {arguments.out}")
    if arguments.json:
        show(json.dumps(report.as_dict(evaluation, about), ensure_ascii=False))
    else:
        show(report.tables(evaluation, about).rstrip("\n"))
    return fail("cancelled; this is what was answered until then", INTERRUPTED) if evaluation.num_left_out else 0


def _check_usage(arguments: argparse.Namespace) -> None:
    from dflash_backend.evaluation import InvalidSetting

    if arguments.url is not None and (arguments.draft is not None or arguments.settings):
        option = "--set" if arguments.settings else "--draft"
        raise InvalidSetting(f"{option} is for an engine in this process, --url names one that runs; give one of them")
    if arguments.concurrency is not None and any(name == "max_num_seqs" for name, _ in arguments.settings):
        raise InvalidSetting("--concurrency sets max_num_seqs; give one of them")


@contextmanager
def _engine(arguments: argparse.Namespace) -> Iterator[Model]:
    """The engine in this process. Settings come from the environment as a server's do, the command line over it."""
    options = {"target_model": arguments.target, "draft_model": arguments.draft, "max_num_seqs": arguments.concurrency}
    given = dict(arguments.settings) | {name: value for name, value in options.items() if value is not None}
    with _local().engine_model(given, say, arguments.chat_template_kwargs) as model:
        yield model


@contextmanager
def _server(arguments: argparse.Namespace) -> Iterator[Model]:
    """A server that runs. `--target` names whose tokenizer renders conversations here."""
    from dflash_backend.evaluation import InvalidSetting
    from dflash_cli.server_backend import ServerAnswerer

    options = arguments.chat_template_kwargs
    encode = None if arguments.target is None else _local().encoder(arguments.target, options)
    try:
        client = client_of(arguments)
    except ValueError as error:
        raise InvalidSetting(str(error)) from None
    with client:
        about = {"server": client.address, "protocol": client.protocol, "model": client.model}
        yield ServerAnswerer(client, arguments.concurrency or SERVER_CONCURRENCY, encode, options), about


def _local() -> ModuleType:
    """What needs the engine's packages. Raises `EvaluationError` where they are not installed."""
    from dflash_backend.evaluation import EvaluationError

    try:
        from dflash_backend.evaluation import engine
    except ImportError as error:
        raise EvaluationError(engine_missing(error)) from None
    return engine
