"""`dflash-triton eval`: acceptance length and accuracy on data sets, in this process or on a running server."""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_cli.commands.arguments import (
    COUNT,
    COUNT_OR_0,
    FILE,
    REPEATED,
    ModelParser,
    add_settings_option,
    assignment,
    json_object,
    non_negative_float,
)
from dflash_cli.commands.client_options import add_connection_options, client_of
from dflash_cli.commands.console import INTERRUPTED, fail, say, show
from dflash_cli.commands.progress import Progress

if TYPE_CHECKING:
    from dflash_backend.evaluation.measure import EvaluationSettings, Model
    from dflash_backend.evaluation.run import Evaluation
    from dflash_client import DFlashClient

SERVER_CONCURRENCY = 16
DESCRIBE_TIMEOUT_S = 10.0
ADAPTIVE = (
    "note: adaptive_speculation is on at this server, which then drafts only what pays on its machine; the acceptance "
    "length is not comparable with that of eval without --url, which leaves it off, nor with published ones. A server "
    "started with --set adaptive_speculation=false drafts as many tokens in each step"
)


def add_parser(commands: Any) -> None:
    """Add the sub-command."""
    parser = ModelParser.added_to(
        commands,
        "eval",
        help="measure acceptance length and accuracy on data sets",
        description="Measure how many tokens a step of speculative decoding yields, and how many answers are right. "
        "The models run in this process; with --url a running server is measured instead. Without MODEL it is the "
        "demo pair, without --dataset the embedded sets math, code and chat (docs/evaluation.md).",
    )
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        metavar="MODEL",
        help="target model: directory, hub id, file in GGUF or smollm2; with --url: whose tokenizer renders "
        "conversations",
    )
    add("--target", metavar="DIR|ID", help="the same, as an option")
    add("--draft", metavar="DIR|ID|ngram", help="DFlash drafter, or prompt lookup; '' for no speculation")
    add_settings_option(parser)
    _add_comparison_options(parser)
    add(
        "--dataset",
        dest="datasets",
        metavar="NAME|FILE",
        **REPEATED,
        help="math, code, chat, talk, copy, tools, gsm8k, math500, humaneval, mbpp, mt-bench, or a JSONL file; "
        "gsm8k=FILE.jsonl reads the published rows from a file; may be repeated",
    )
    add("--limit", **COUNT, help="only the first N rows of each data set")
    add("--shuffle", action="store_true", help="take the rows in the order of the DFlash authors' benchmark (seed 42)")
    _add_request_options(parser)
    add("--concurrency", **COUNT, help=f"requests at a time (max_num_seqs; with --url {SERVER_CONCURRENCY})")
    add("--out", type=Path, metavar="DIR", help="write eval.json, eval.md and eval.png there")
    add("--json", action="store_true", help="print one JSON object in place of the tables")
    add_connection_options(parser, url_needed=False, timeout=600.0)
    parser.set_defaults(run=run)


def _add_comparison_options(parser: argparse.ArgumentParser) -> None:
    """What else is measured."""
    parser.add_argument(
        "--against",
        metavar="MODEL",
        help="measure this target too, after the first, with the same drafter and settings, and show both side by side",
    )
    parser.add_argument(
        "--against-set",
        dest="against_settings",
        metavar="NAME=VALUE",
        type=assignment,
        **REPEATED,
        help="as --set, for the second one alone; without --against it is the same target; may be repeated",
    )
    parser.add_argument("--text", **FILE, help="a text whose perplexity is taken")


def _add_request_options(parser: argparse.ArgumentParser) -> None:
    """What each request asks for."""
    parser.add_argument("--max-tokens", **COUNT, help="most tokens of an answer (256; 2048 for sets of the hub)")
    parser.add_argument(
        "--temperature", type=non_negative_float, default=0.0, metavar="T", help="0 is greedy (%(default)g)"
    )
    parser.add_argument("--seed", **COUNT_OR_0, default=0, help="where T > 0 (%(default)s)")
    parser.add_argument(
        "--chat-template-kwargs",
        type=json_object,
        default={"enable_thinking": False},
        metavar="JSON",
        help='variables of the chat template ({"enable_thinking": false}, as the published figures are measured)',
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
    from dflash_backend.evaluation import Sampling
    from dflash_backend.evaluation.measure import EvaluationSettings, measure

    _check_usage(arguments)
    arguments.target = arguments.target if arguments.model is None else arguments.model
    sampling = Sampling(arguments.max_tokens, arguments.temperature, arguments.seed)
    settings = EvaluationSettings(arguments.datasets, arguments.limit, arguments.shuffle, sampling)
    if arguments.against is not None or arguments.against_settings:
        return _compare(arguments, settings)
    model = _server(arguments) if arguments.url is not None else _engine(arguments)
    evaluation, about = measure(settings, model, Progress("answers", say).step, arguments.out)
    _show(arguments, evaluation, about)
    return _status(evaluation, "this is what was answered until then")


def _show(arguments: argparse.Namespace, evaluation: Evaluation, about: Mapping[str, Any]) -> None:
    """Show the report of one model, whose files are written."""
    from dflash_backend.evaluation import report

    if arguments.out is not None:
        say(f"wrote eval.json, eval.md and eval.png to {arguments.out}")
    if arguments.json:
        show(json.dumps(report.as_dict(evaluation, about), ensure_ascii=False))
    else:
        show(report.tables(evaluation, about).rstrip("\n"))


def _status(evaluation: Evaluation, shown: str) -> int:
    """The exit status; where questions were left out it is said why, and what is `shown`."""
    if evaluation.failure:
        return fail(f"{evaluation.failure}; {shown}")
    return fail(f"cancelled; {shown}", INTERRUPTED) if evaluation.num_left_out else 0


def _compare(arguments: argparse.Namespace, settings: EvaluationSettings) -> int:
    """Measure two models and show both. Raises `ConfigError` or `EvaluationError`."""
    from dflash_backend.evaluation import engine, report
    from dflash_backend.evaluation.compare import Comparison, Measured
    from dflash_backend.evaluation.measure import measure

    # What is wrong is said before the first model, which may take hours.
    pair, other = engine.resolved(_given(arguments)), dict(arguments.against_settings)
    if arguments.against is not None:
        engine.encoder(arguments.against)
        other = {"target_model": arguments.against, "draft_model": engine.drafter_of(pair)} | other
    engine.resolved(_given(arguments, other))
    if arguments.out is not None:
        report.prepare(arguments.out)

    def show_first() -> None:
        if arguments.out is not None:
            report.write(arguments.out, first.evaluation, first.about)
        _show(arguments, first.evaluation, first.about)

    first = Measured.of(*measure(settings, _engine(arguments), Progress("answers", say).step, None))
    if first.evaluation.num_left_out:
        show_first()
        return _status(first.evaluation, "this is what the first model had answered; the second one was not measured")
    gc.collect()  # the first model's memory
    try:
        against = Measured.of(*measure(settings, _engine(arguments, other), Progress("answers", say).step, None))
    except BaseException:
        say("the second model was not measured; this is the first one alone")
        show_first()
        raise
    comparison = Comparison.of(first, against)
    if arguments.out is not None:
        comparison.write(arguments.out)
        say(f"wrote eval.json, eval.md and eval.png to {arguments.out}")
    text = json.dumps(comparison.as_dict(), ensure_ascii=False) if arguments.json else comparison.text().rstrip("\n")
    show(text)
    return _status(against.evaluation, "this is what both had answered until then")


def _check_usage(arguments: argparse.Namespace) -> None:
    from dflash_backend.config import EngineConfig
    from dflash_backend.evaluation import InvalidSetting

    EngineConfig.from_values(dict(arguments.against_settings), "command line")
    if arguments.model is not None and arguments.target is not None:
        raise InvalidSetting(f"the model is given twice: {arguments.model} and --target {arguments.target}")
    if arguments.url is not None and (arguments.draft is not None or arguments.settings):
        option = "--set" if arguments.settings else "--draft"
        raise InvalidSetting(f"{option} is for an engine in this process, --url names one that runs; give one of them")
    comparing = [name for name in ("against", "against_settings", "text") if getattr(arguments, name)]
    if arguments.url is not None and comparing:
        option = {"against_settings": "--against-set"}.get(comparing[0], f"--{comparing[0]}")
        raise InvalidSetting(f"{option} needs the models in this process, --url names a server; give one of them")
    if arguments.concurrency is not None and any(name == "max_num_seqs" for name, _ in arguments.settings):
        raise InvalidSetting("--concurrency sets max_num_seqs; give one of them")


def _given(arguments: argparse.Namespace, other: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The settings of the command line, and over them those of the `other` model."""
    options = {"target_model": arguments.target, "draft_model": arguments.draft, "max_num_seqs": arguments.concurrency}
    given = dict(arguments.settings) | {name: value for name, value in options.items() if value is not None}
    return given | dict(other or {})


@contextmanager
def _engine(arguments: argparse.Namespace, other: Mapping[str, str] | None = None) -> Iterator[Model]:
    """The engine in this process. Settings come from the environment as a server's do, the command line over it, and
    over that those of the `other` model."""
    from dflash_backend.evaluation import engine

    text = None if arguments.text is None else _read_text(arguments.text)
    with engine.engine_model(_given(arguments, other), say, arguments.chat_template_kwargs, text) as model:
        yield model


def _read_text(path: Path) -> str:
    from dflash_backend.evaluation import EvaluationError

    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise EvaluationError(f"{path} cannot be read: {error.strerror}; --text takes a file of plain text") from None
    except ValueError:
        raise EvaluationError(f"{path} is not UTF-8; --text takes a file of plain text") from None


@contextmanager
def _server(arguments: argparse.Namespace) -> Iterator[Model]:
    """A server that runs. `--target` names whose tokenizer renders conversations here."""
    from dflash_backend.evaluation import InvalidSetting
    from dflash_cli.server_backend import ServerAnswerer

    options, encode = arguments.chat_template_kwargs, None
    if arguments.target is not None:
        from dflash_backend.evaluation import engine

        encode = engine.encoder(arguments.target, options)
    try:
        client = client_of(arguments)
    except ValueError as error:
        raise InvalidSetting(str(error)) from None
    with client:
        about: dict[str, Any] = {"server": client.address, "protocol": client.protocol, "model": client.model}
        if (adaptive := _is_adaptive(client, arguments.timeout)) is not None:
            about["adaptive_speculation"] = adaptive
        if adaptive:
            say(ADAPTIVE)
        yield ServerAnswerer(client, arguments.concurrency or SERVER_CONCURRENCY, encode, options), about


def _is_adaptive(client: DFlashClient, timeout_s: float) -> bool | None:
    """Whether the server drafts as many tokens as pay at the moment; None where it does not tell."""
    from dflash_client.errors import ClientError

    try:
        found = client.describe(min(timeout_s, DESCRIBE_TIMEOUT_S)).get("adaptive_speculation")
    except ClientError:
        return None
    return found if isinstance(found, bool) else None
