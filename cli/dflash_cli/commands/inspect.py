"""`dflash-triton inspect`: what a checkpoint is, how it was read and what it needs; no server, no weights loaded."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dflash_cli.commands.console import fail, show

if TYPE_CHECKING:
    from dflash_backend.drafters.published import PublishedDrafter
    from dflash_backend.engine.inspection import CheckpointReport, Inspection, KVReport

NAME_WIDTH = 24


def add_parser(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "inspect",
        help="say what a checkpoint is and what it needs",
        description="Say what a checkpoint is (a target, or a DFlash drafter in the z-lab or speculators format), how "
        "it was read and what it needs. Its config and the headers of its weights are read and checked; no weights are "
        "loaded. With --draft it also says whether the two fit together. With --list it shows the published drafters "
        "that are known, and whether they are supported (docs/checkpoints.md).",
    )
    parser.add_argument(
        "checkpoint",
        metavar="DIR|ID",
        nargs="?",
        help="model directory, hub id, file in GGUF or smollm2, or the config.json of a drafter alone",
    )
    parser.add_argument("--draft", metavar="DIR|ID|ngram", help="a drafter for it")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of one that comes from the hub")
    parser.add_argument("--draft-revision", metavar="REV", help="the same of the drafter that --draft gives")
    parser.add_argument(
        "--list",
        nargs="?",
        const="",
        dest="words",
        metavar="WORDS",
        help="show the published drafters, of those targets or drafters whose hub id has WORDS",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the sub-command and return the exit status."""
    if (arguments.words is None) == (arguments.checkpoint is None):
        return fail("inspect takes one DIR|ID, a model directory or hub id, or --list", status=2)
    if arguments.words is not None:
        return _run_list(arguments)
    if arguments.draft_revision is not None and arguments.draft is None:
        return fail("--draft-revision is that of a drafter given by --draft; of one alone it is --revision", status=2)
    from dflash_backend.checkpoints import CheckpointError
    from dflash_backend.config import ConfigError
    from dflash_backend.engine.inspection import inspect

    try:
        found = inspect(arguments.checkpoint, arguments.draft, arguments.revision or "", arguments.draft_revision or "")
    except (CheckpointError, ConfigError) as error:
        return fail(str(error))
    status = show(json.dumps(as_dict(found), ensure_ascii=False) if arguments.json else as_text(found))
    if found.pair is not None and not found.pair.fits:
        return fail(str(found.pair.reason))
    return status


def _run_list(arguments: argparse.Namespace) -> int:
    """`--list`."""
    for option in ("draft", "revision", "draft_revision"):
        if getattr(arguments, option) is not None:
            return fail(f"inspect --list takes no --{option.replace('_', '-')}", status=2)
    from dflash_backend.drafters.published import published_like

    found = published_like(arguments.words)
    if not found:
        return fail(f"no published drafter is known for '{arguments.words}'; without words --list shows all")
    if arguments.json:
        return show(json.dumps([published_dict(each) for each in found], ensure_ascii=False))
    blocks = []
    for target in dict.fromkeys(each.target for each in found):
        rows = [
            (f"  {each.name}", f"{each.kind} ({each.format})", each.unsupported or "supported")
            for each in found
            if each.target == target
        ]
        blocks.append("\n".join([f"{target.name} ({target.family})", *map(_row, rows)]))
    return show("\n\n".join(blocks))


def published_dict(each: PublishedDrafter) -> dict[str, Any]:
    """A published drafter as JSON data."""
    return {
        "target": each.target.name,
        "family": each.target.family,
        "drafter": each.name,
        "method": each.method,
        "format": each.format,
        "supported": each.unsupported is None,
        "reason": each.unsupported,
        "source": each.source,
    }


def _row(cells: tuple[str, str, str]) -> str:
    return f"{cells[0]:<62}{cells[1]:<24}{cells[2]}"


def as_dict(found: Inspection) -> dict[str, Any]:
    """The inspection as JSON data: `target` and `drafter`, those of them that were read, and `pair` for both."""
    data: dict[str, Any] = {report.kind: _checkpoint_dict(report) for report in found.checkpoints}
    if found.method is not None:
        data["drafter"] = {"method": found.method.method, "facts": dict(found.method.facts)}
    if found.published:
        data["published_drafters"] = list(found.published)
    if found.pair is not None:
        data["pair"] = {**asdict(found.pair), **_kv_sums([report.kv for report in found.checkpoints])}
        data["pair"]["fp8"] = _kv_sums(_in_fp8(found))
    return data


def _checkpoint_dict(report: CheckpointReport) -> dict[str, Any]:
    backends = {name: {"would_do": not lacks, "lacks": lacks} for name, lacks in report.attention.backends.items()}
    return {
        "path": str(report.path),
        "format": report.format,
        "facts": dict(report.facts),
        "weights": None if report.weights is None else asdict(report.weights),
        "kv_cache": _kv_dict(report.kv),
        "kv_cache_fp8": None if report.kv_fp8 is None else _kv_dict(report.kv_fp8),
        "attention": {**asdict(report.attention), "backends": backends},
    }


def _kv_dict(kv: KVReport) -> dict[str, Any]:
    fields = asdict(kv)
    return {"layers_with_a_window": fields.pop("windows"), **fields}


def _kv_sums(kinds: Sequence[KVReport]) -> dict[str, int]:
    names = "bytes_per_token", "bytes_per_block", "request_bytes"
    return {f"kv_{name}": sum(getattr(kv, name) for kv in kinds) for name in names}


def _in_fp8(found: Inspection) -> list[KVReport]:
    """The KV of each model with the target's in FP8."""
    return [report.kv_fp8 or report.kv for report in found.checkpoints]


def as_text(found: Inspection) -> str:
    """The inspection as lines of a name and a value."""
    blocks = [_checkpoint_text(report) for report in found.checkpoints]
    if found.method is not None:
        blocks.append("\n".join([f"drafter {found.method.method}", *_lines(list(found.method.facts))]))
    if found.published:
        blocks.append("\n".join(["published drafters for it", *(f"  {name}" for name in found.published)]))
    pair = found.pair
    if pair is not None:
        rows = [("fit together", "yes" if pair.fits else f"no: {pair.reason}")]
        if pair.fits:
            rows += [
                ("speculative tokens (k)", str(pair.num_speculative_tokens)),
                *([("warning", pair.warning)] if pair.warning else []),
                ("KV of both", _kv_sum([report.kv for report in found.checkpoints])),
                ("KV of both, FP8", f"{_kv_sum(_in_fp8(found))}, with kv_cache_dtype=fp8"),
            ]
        blocks.append("\n".join(["pair", *_lines(rows)]))
    return "\n\n".join(blocks)


def _kv_sum(kinds: list[KVReport]) -> str:
    per_token, per_block, request = map(_size, _kv_sums(kinds).values())
    return f"{per_token} a token, {per_block} a block, {request} a request of {kinds[0].request_tokens:,} tokens"


def _kv_rows(report: CheckpointReport) -> list[tuple[str, str]]:
    """What the KV takes, in the checkpoint's dtype and in FP8, and what windows save of it."""
    kv, windows, in_fp8 = report.kv, report.kv.windows, report.kv_fp8
    cache = f"{_size(kv.bytes_per_token)} a token, {_size(kv.bytes_per_block)} a block of {kv.block_size}"
    rows = [("KV cache", f"{cache}, in {kv.dtype}")]
    request = f"{_size(kv.request_bytes)} for one of {kv.request_tokens:,} tokens"
    if windows is not None:
        layers = f"{windows.num_layers} layer{'s' if windows.num_layers > 1 else ''}"
        saved = f"{_size(windows.bytes_per_token)} of a token is of {layers} with a window of at most {windows.window}"
        rows.append(("KV of windows", f"{saved}, of which a request keeps {windows.blocks_per_request} blocks"))
        request += f" ({_size(kv.request_bytes_in_one_table)} where windows have no blocks of their own)"
    rows.append(("KV of a request", request))
    if in_fp8 is not None:
        sizes = f"{_size(in_fp8.bytes_per_token)} a token, {_size(in_fp8.bytes_per_block)} a block"
        rows.append(("KV cache in FP8", f"{sizes}, {_size(in_fp8.request_bytes)} a request, with kv_cache_dtype=fp8"))
    return rows


def _checkpoint_text(report: CheckpointReport) -> str:
    attention = report.attention
    kinds = [
        *(["causal"] if attention.causal else []),
        *(["non-causal"] if attention.non_causal else []),
        *(f"sliding window {window}" for window in attention.sliding_windows),
        *(["sinks"] if attention.sinks else []),
        f"head size {attention.head_size}",
    ]
    rows = [
        *report.facts[1:],  # the first is the path, in the heading
        ("tensors", _tensors(report)),
        *_kv_rows(report),
        ("attention needed", ", ".join(kinds)),
    ]
    for name, lacks in attention.backends.items():
        verdict = f"lacks {', '.join(lacks)}" if lacks else "would do"
        rows.append((f"backend {name}", f"{verdict} ({attention.device}, {attention.dtype})"))
    return "\n".join([f"{report.kind} {report.path}", *_lines(rows)])


def _tensors(report: CheckpointReport) -> str:
    weights = report.weights
    if weights is None:
        return "not read: of a config alone, names, shapes and size of the weights are not known"
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in weights.dtypes.items())
    return (
        f"{weights.num_tensors} ({dtypes}) in {weights.num_files} file{'s' if weights.num_files > 1 else ''}, "
        f"{weights.num_parameters:,} parameters, {_size(weights.num_bytes)}; names, shapes and types are as "
        "config.json asks"
    )


def _lines(rows: list[tuple[str, str]]) -> list[str]:
    return [f"  {name.ljust(NAME_WIDTH)}{value}" for name, value in rows]


def _size(num_bytes: int) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    size, unit = float(num_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{num_bytes} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
