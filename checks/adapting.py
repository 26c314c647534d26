"""What a fine-tune costs the drafter of its original, and what five minutes of `dflash-triton train --from` give back:
`python -m checks.adapting --minutes 5 --work DIR`.

The demo's target is trained some hundred steps more on answers in another style, and the demo's drafter further on
prompts of the generator. Exits with 1 when less than half of the acceptance length that was lost comes back. What lies
in `--work` already is taken as it is, so that a run can be cut into pieces.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from checks.training import CATEGORIES, acceptance, make_drafter, write_prompts
from demo.checkpoint import load_target, save_target
from demo.data import Segment, training_documents
from demo.model import PairConfig
from demo.optim import Progress, bf16_parameters
from demo.packing import PROMPT_WEIGHT, PackedRows
from demo.tokenizer import load_tokenizer
from demo.train_target import RESUMED_LEARNING_RATE, SHORT, target_loss
from dflash_backend.config import asset_path
from dflash_backend.training.data import DataOptions
from dflash_backend.training.optim import Optimizer
from dflash_backend.training.run import TrainOptions

LEAST = 0.5
STEPS = 150
CODE = re.compile(r"(```.*?```)", re.DOTALL)
STYLE = (("\n", "\n* "), (". ", ", of course. "), (" and ", " plus "), (" is ", " would be "), (" the ", " this "))


def styled(answer: str) -> str:
    """An answer in the other style; code stays."""
    parts = CODE.split(answer)
    for index in range(0, len(parts), 2):
        for old, new in STYLE:
            parts[index] = parts[index].replace(old, new)
    return "".join(parts)


def styled_documents(seed: int) -> Iterator[list[Segment]]:
    """The documents that the target was trained on, with answers in the other style."""
    for document in training_documents(f"adapting/{seed}"):
        yield [Segment(styled(one.text), True) if one.is_answer else one for one in document]


def make_target(original: Path, folder: Path, seed: int) -> None:
    """Fine-tune the target in `original` to the other style, unless that was done."""
    if (folder / "config.json").exists():
        return
    torch.manual_seed(seed)
    model, tokenizer, progress = load_target(original, PairConfig()), load_tokenizer(original), Progress(STEPS)
    optimizer, loss = Optimizer(model, RESUMED_LEARNING_RATE), target_loss(model)
    rows = PackedRows(tokenizer, styled_documents(seed))
    while progress.share < 1:
        tokens, is_answer = rows.batch(*SHORT)
        weights = torch.where(is_answer[:, 1:], 1.0, PROMPT_WEIGHT).flatten()
        value = loss(bf16_parameters(model), tokens, weights)
        torch.autograd.backward(value)
        optimizer.step(progress.share)
        progress.tick(tokens.numel(), value.item())
        if progress.steps % 25 == 0:
            progress.report("target")
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(original, partial)
    save_target(model, partial)
    partial.rename(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of the check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=5.0, help="of the drafter's training")
    parser.add_argument("--work", type=Path, required=True, help="folder of what is made")
    options = parser.parse_args(arguments)
    work: Path = options.work / f"seed-{options.seed}"
    work.mkdir(parents=True, exist_ok=True)
    pair = asset_path("demo", "pair")
    original, old, target = pair / "target", pair / "draft", work / "target"
    make_target(original, target, options.seed)
    data = DataOptions(num_tokens=150_000, seed=options.seed, files=(write_prompts(work, options.seed),))
    asked = TrainOptions("", work, data, minutes=options.minutes, begin_from=old)
    summary = make_drafter(target, work / "adapted", asked)
    lengths = {
        "the original with its drafter": acceptance(original, old),
        "the fine-tune with the original's drafter": acceptance(target, old),
        "the fine-tune with the adapted drafter": acceptance(target, work / "adapted"),
    }
    for name, found in lengths.items():
        print(f"{name}: {found['all']:.2f}; " + ", ".join(f"{each} {found[each]:.2f}" for each in CATEGORIES))
    before, lost, now = (found["all"] for found in lengths.values())
    share = (now - lost) / (before - lost)
    print(
        f"{summary['samples']} samples, {summary['answer_tokens']} tokens of answers, {summary['steps']} steps, "
        f"{summary['data_seconds']:.0f} s of data, {summary['training_seconds']:.0f} s of training"
    )
    print(f"seed {options.seed}: {share:.2f} of the acceptance length that was lost is back; at least {LEAST}")
    return 0 if share >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
