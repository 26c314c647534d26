"""Retrain the demo pair from nothing: tokenizer, target, drafter, held-out sets.

    python -m demo.train --out demo/pair [--minutes 50] [--seed 0]

The pair is built in a temporary folder beside `--out` and moved into place at the end, so that readers of
`--out` always find a whole pair.
"""

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from demo.data import write_held_out
from demo.model import PairConfig, Shape
from demo.parallel import run_workers
from demo.tokenizer import train_tokenizer
from demo.train_drafter import train_drafter
from demo.train_target import train_target

TARGET_SHARE = 0.6
"""Share of the minutes that the target gets; the drafter gets the rest."""
SMOKE_CONFIG = PairConfig(
    shape=replace(
        Shape(),
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    ),
    target_layers=8,
    draft_layers=1,
)
SMOKE_STEPS = 2


def install(built: Path, out: Path) -> None:
    """Move every built file into `out`, one atomic replacement each."""
    for source in sorted(path for path in built.rglob("*") if path.is_file()):
        destination = out / source.relative_to(built)
        destination.parent.mkdir(parents=True, exist_ok=True)
        source.replace(destination)


@dataclass(frozen=True)
class Run:
    """What a training run is asked to do.

    `resume` continues from the pair in that folder with its tokenizer; `drafter_only` then keeps its target.
    """

    out: Path
    minutes: float = 50.0
    seed: int = 0
    workers: int = 1
    smoke: bool = False
    resume: Path | None = None
    drafter_only: bool = False


def train_pair(run: Run) -> None:
    """Train a pair and install it under `run.out` as `target/` and `draft/`."""
    run.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=run.out.parent, prefix=".pair-") as folder:
        built = Path(folder)
        _build(run, built)
        install(built, run.out)
    print(f"the pair is in {run.out}", flush=True)


def _build(run: Run, built: Path) -> None:
    """Tokenizer, target and drafter, each from what came before it."""
    config = SMOKE_CONFIG if run.smoke else PairConfig()
    steps = SMOKE_STEPS if run.smoke else None
    old_target = run.resume / "target" if run.resume else None
    old_draft = run.resume / "draft" if run.resume else None
    if old_target is None:
        print("tokenizer: training", flush=True)
        train_tokenizer(built / "target", run.seed, documents=500 if run.smoke else 12_000)
    else:
        shutil.copytree(old_target, built / "target")
    share = 0.0 if run.drafter_only else TARGET_SHARE
    if not run.drafter_only:
        minutes = run.minutes * share
        run_workers(run.workers, train_target, config, built / "target", minutes, steps, run.seed, old_target)
    if old_draft is not None and not old_draft.exists():
        old_draft = None
    minutes = run.minutes * (1 - share)
    run_workers(
        run.workers, train_drafter, config, built / "target", built / "draft", minutes, steps, run.seed, old_draft
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the training."""
    parser = argparse.ArgumentParser(description="Train the demo target and its DFlash drafter.")
    parser.add_argument("--out", type=Path, required=True, help="folder that receives target/ and draft/")
    parser.add_argument("--minutes", type=float, default=50.0, help="wall-clock minutes of training in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--smoke", action="store_true", help="two steps of a tiny pair, to see that all of it runs")
    parser.add_argument("--resume", type=Path, help="continue from the pair in this folder")
    parser.add_argument("--drafter-only", action="store_true", help="with --resume: keep that target as it is")
    parser.add_argument("--held-out", type=Path, help="also write the held-out sets into this folder")
    options = parser.parse_args(arguments)
    if options.drafter_only and options.resume is None:
        parser.error("--drafter-only needs --resume: the folder of the pair whose target is kept")
    torch.set_num_threads(1)
    if options.held_out is not None:
        write_held_out(options.held_out)
    train_pair(
        Run(
            options.out,
            options.minutes,
            options.seed,
            options.workers,
            options.smoke,
            options.resume,
            options.drafter_only,
        )
    )


if __name__ == "__main__":
    main()
