"""`dflash-triton train`: a drafter for a target, from prompts or from nothing."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_cli.commands.arguments import (
    COUNT,
    COUNT_OR_0,
    FILE,
    add_settings_option,
    fields_of,
    json_object,
    non_negative_float,
    non_negative_int,
    positive_float,
)
from dflash_cli.commands.console import INTERRUPTED, fail, say, show
from dflash_cli.commands.progress import Progress

if TYPE_CHECKING:
    from dflash_backend.training.run import TrainOptions

KINDS = ("dflash", "dflash2", "dspark", "eagle3")
FORMATS = ("zlab", "speculators")
TOKENS = 500_000


def add_parser(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "train",
        help="train a drafter for a target",
        description="Train a drafter for a target model. The target answers prompts, which it writes itself where none "
        "are given, and the drafter learns to guess its answers. Stopped by Ctrl-C or by anything else, the same "
        "command goes on from the last checkpoint (docs/training.md). Several GPUs: torchrun --no-python "
        "--nproc-per-node N dflash-triton train ...",
    )
    parser.add_argument("target", metavar="TARGET", help="target model: directory, hub id, file in GGUF or smollm2")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the drafter and of the run")
    parser.add_argument("--kind", choices=KINDS, help="kind of drafter (dflash)")
    parser.add_argument(
        "--format", choices=FORMATS, help="of its checkpoint: its authors' (zlab), or that of speculators (zlab)"
    )
    parser.add_argument("--from", dest="begin_from", type=Path, metavar="DIR", help="drafter to train further")
    _add_data_options(parser)
    _add_length_options(parser)
    _add_size_options(parser)
    add_settings_option(parser)
    parser.set_defaults(run=run)


def _add_data_options(parser: argparse.ArgumentParser) -> None:
    data = parser.add_argument_group("data")
    source = data.add_mutually_exclusive_group()
    source.add_argument(
        "--data",
        **FILE,
        nargs="+",
        default=[],
        help="JSONL of 'messages' (or 'conversations') or 'prompt'; answers in it are not used. Without, the target "
        "writes questions itself",
    )
    source.add_argument(
        "--traffic",
        type=Path,
        metavar="DIR",
        help="folder of a server's setting record_traffic: prompts, and the answers of this very target",
    )
    data.add_argument("--tokens", **COUNT, default=TOKENS, help="tokens of answers (%(default)s)")
    data.add_argument(
        "--temperature",
        type=non_negative_float,
        default=-1.0,
        metavar="T",
        help="of answers: the one that will be served (that of generation_config.json, else 0)",
    )
    data.add_argument("--max-answer", **COUNT, default=256, help="tokens (%(default)s)")
    data.add_argument("--max-prompt", **COUNT, default=1024, help="tokens (%(default)s)")
    data.add_argument(
        "--chat-template-kwargs",
        type=json_object,
        default={},
        metavar="JSON",
        help='variables of the chat template, such as {"enable_thinking": false}',
    )
    data.add_argument("--seed", **COUNT_OR_0, default=0, help="(%(default)s)")


def _add_length_options(parser: argparse.ArgumentParser) -> None:
    length = parser.add_argument_group("length of the run")
    add = length.add_argument
    add("--minutes", type=positive_float, default=30.0, metavar="M", help="of this run, data included (%(default)g)")
    add("--steps", **COUNT, help="in place of --minutes")
    add("--evaluate-minutes", type=positive_float, metavar="M", help="between evaluations (an eighth of the training)")
    add("--restart", action="store_true", help="train anew, from the data that is there")


def _add_size_options(parser: argparse.ArgumentParser) -> None:
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument("--layers", **COUNT, help="of the drafter (by the target's size: 3 or 5)")
    sizes.add_argument("--intermediate-size", **COUNT, help="of the drafter's MLPs (the target's)")
    sizes.add_argument("--layer-ids", metavar="A,B,...", help="target layers that it reads, from 0 on (evenly spaced)")
    sizes.add_argument("--block-size", **COUNT, help="an anchor and its drafts (8 or 16)")
    sizes.add_argument("--drafts", **COUNT, help="drafts of an eagle3 drafter (7)")
    sizes.add_argument("--mask-token", type=non_negative_int, metavar="ID", help="a token that no text has")
    sizes.add_argument("--draft-vocab", **COUNT, help="tokens that it can propose (all)")
    sizes.add_argument(
        "--share-head",
        action="store_true",
        help="with --draft-vocab: write no LM head; this engine takes its rows from the target, others do not",
    )
    sizes.add_argument(
        "--learning-rate",
        type=positive_float,
        metavar="R",
        help="(0.012; with --from 0.001; less for targets of more than 576 hidden numbers, in proportion)",
    )
    sizes.add_argument(
        "--decay",
        type=positive_float,
        metavar="D",
        help="draft i counts exp(-(i - 1) / D) in the loss (7 for blocks of 16, 4 for 8); 1 to 2 where few drafts are "
        "accepted",
    )
    sizes.add_argument(
        "--soft-labels",
        type=non_negative_float,
        metavar="S",
        help="the share of the loss, 0 to 1, that is by the target's whole distribution, not by the token that it "
        "chose (1)",
    )
    sizes.add_argument(
        "--hidden-loss",
        type=non_negative_float,
        metavar="W",
        help="how much the distance from the target's final hidden states weighs beside the loss by tokens (2; of "
        "other kinds than dflash 0)",
    )
    sizes.add_argument("--batch-tokens", **COUNT, help="of a batch (2048; on a GPU 16384)")
    sizes.add_argument("--accumulate", **COUNT, default=1, help="batches of a step")
    sizes.add_argument(
        "--float32", action="store_true", help="arithmetic in float32, also where the device has fast bfloat16"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the sub-command and return the exit status."""
    from dflash_backend.engine.build import LOAD_ERRORS
    from dflash_backend.training.errors import TrainingError
    from dflash_backend.training.run import train

    # A shell has what it starts in the background ignore Ctrl-C, by which SIGTERM ends a run as well.
    before = (
        signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT)),
        signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    progress = Progress("tokens of answers", say, resumes=True)
    try:
        summary = train(_options(arguments), say, progress.step)
    except KeyboardInterrupt:
        return fail(
            f"stopped; what was done is in {arguments.out}, and the same command goes on from there", INTERRUPTED
        )
    except (TrainingError, *LOAD_ERRORS) as error:
        return fail(str(error))
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])
    if not summary:  # of one process among several, the first speaks
        return 0
    show(
        f"{arguments.out}: a {summary['kind']} drafter, acceptance length {summary['acceptance_length']:.2f} on "
        f"{summary['held_out']} held-out prompts; dflash-triton serve {arguments.target} --draft {arguments.out}"
    )
    return 0


def _options(arguments: argparse.Namespace) -> TrainOptions:
    from dflash_backend.training.data import DataOptions
    from dflash_backend.training.errors import TrainingError
    from dflash_backend.training.run import TrainOptions

    layer_ids = None
    if arguments.layer_ids is not None:
        try:
            layer_ids = tuple(sorted({int(part) for part in arguments.layer_ids.split(",")}))
        except ValueError:
            raise TrainingError(f"--layer-ids is {arguments.layer_ids!r}; expected numbers, such as 1,5,9") from None
    sizes = {
        "draft_layers": arguments.layers,
        "intermediate_size": arguments.intermediate_size,
        "target_layer_ids": layer_ids,
        "block_size": arguments.block_size,
        "eagle_drafts": arguments.drafts,
        "mask_token_id": arguments.mask_token,
    }
    data = DataOptions(
        **fields_of(DataOptions, arguments),
        num_tokens=arguments.tokens,
        files=tuple(arguments.data),
        template_options=arguments.chat_template_kwargs,
    )
    given = {
        "data": data,
        "form": arguments.format,
        "bf16": False if arguments.float32 else None,
        "drafter": {name: value for name, value in sizes.items() if value is not None},
        "settings": dict(arguments.settings),
    }
    return TrainOptions(**fields_of(TrainOptions, arguments) | given)
