"""Train the demo pair: tokenizer, target, drafter.

    python -m demo.train --out demo/pair [--target-steps 4000] [--drafter-steps 3000] [--drafter dflash] [--seed 0]

The pair is built in a folder beside `--out`, which keeps what a stopped run has saved, and moved into place at the end,
so that readers of `--out` always find a whole pair. The same steps, seed and number of workers give the same weights on
the same machine.
"""

import argparse
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from demo.checkpoint import read_draft_config
from demo.data import write_held_out
from demo.kinds import KINDS
from demo.model import PAIR_SHAPE, PairConfig
from demo.parallel import run_workers
from demo.tokenizer import extend_tokenizer, train_tokenizer, write_tokenizer_config
from demo.train_drafter import train_drafter
from demo.train_target import train_target
from dflash_backend.training.network import DFLASH

SMOKE_CONFIG = PairConfig(
    shape=replace(
        PAIR_SHAPE,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    ),
    target_layers=8,
    draft_layers=1,
)
SMOKE: dict[str, Any] = {"config": SMOKE_CONFIG, "target_steps": 2, "drafter_steps": 2}
"""The fields of a run that only shows that all of it works."""


def install(built: Path, out: Path) -> None:
    """Move every built file into `out`, one atomic replacement each."""
    for source in sorted(path for path in built.rglob("*") if path.is_file()):
        destination = out / source.relative_to(built)
        destination.parent.mkdir(parents=True, exist_ok=True)
        source.replace(destination)


@dataclass(frozen=True)
class Run:
    """What a training run is asked to do.

    `resume` continues from the pair in that folder with its tokenizer; a model without steps is kept.
    """

    out: Path
    target_steps: int = 4000
    drafter_steps: int = 3000
    seed: int = 0
    workers: int = 1
    config: PairConfig = field(default_factory=PairConfig)
    resume: Path | None = None


def train_pair(run: Run) -> None:
    """Train a pair and install it under `run.out` as `target/` and `draft/`."""
    built = run.out.parent / f".{run.out.name}.partial"
    shutil.rmtree(built, ignore_errors=True)
    built.mkdir(parents=True)
    _build(run, built)
    install(built, run.out)
    shutil.rmtree(built)
    print(f"the pair is in {run.out}", flush=True)


def _build(run: Run, built: Path) -> None:
    """Tokenizer, target and drafter, each from what came before it."""
    old_target = run.resume / "target" if run.resume else None
    old_draft = run.resume / "draft" if run.resume else None
    if old_target is None:
        print("tokenizer: training", flush=True)
        train_tokenizer(built / "target", run.seed, documents=500 if run.config == SMOKE_CONFIG else 12_000)
    else:
        shutil.copytree(old_target, built / "target")
        extend_tokenizer(built / "target", run.seed)
        write_tokenizer_config(built / "target")
    if run.target_steps:
        run_workers(run.workers, train_target, run.config, built / "target", run.target_steps, run.seed, old_target)
    if old_draft is not None and not (
        old_draft.exists() and read_draft_config(old_draft).drafter == run.config.drafter
    ):
        old_draft = None
    if old_draft is not None and not run.drafter_steps:
        shutil.copytree(old_draft, built / "draft")
        return
    run_workers(
        run.workers,
        train_drafter,
        run.config,
        built / "target",
        built / "draft",
        run.drafter_steps,
        run.seed,
        old_draft,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the training."""
    parser = argparse.ArgumentParser(description="Train the demo target and its DFlash drafter.")
    parser.add_argument("--out", type=Path, required=True, help="folder that receives target/ and draft/")
    parser.add_argument(
        "--target-steps", type=int, default=Run.target_steps, help="%(default)s; 0 with --resume: keep it"
    )
    parser.add_argument("--drafter-steps", type=int, default=Run.drafter_steps, help="likewise (%(default)s)")
    parser.add_argument(
        "--drafter",
        choices=KINDS,
        default=DFLASH,
        help="its kind (%(default)s); one of another kind is not resumed",
    )
    parser.add_argument(
        "--hybrid", action="store_true", help="a target with gated delta nets (Qwen3.5), begun from that of --resume"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda with --workers 1 (%(default)s)")
    parser.add_argument("--smoke", action="store_true", help="two steps of a tiny pair, to see that all of it runs")
    parser.add_argument("--resume", type=Path, help="continue from the pair in this folder")
    parser.add_argument("--held-out", type=Path, help="also write the held-out sets into this folder")
    options = parser.parse_args(arguments)
    if options.target_steps == 0 and options.resume is None:
        parser.error("--target-steps 0 needs --resume: the folder of the pair whose target is kept")
    if options.device != "cpu" and options.workers != 1:
        parser.error(f"--device {options.device} has one worker; add --workers 1")
    torch.set_num_threads(1)
    if options.device != "cpu":
        torch.set_default_device(options.device)
    if options.held_out is not None:
        write_held_out(options.held_out)
    run = Run(
        options.out, options.target_steps, options.drafter_steps, options.seed, options.workers, resume=options.resume
    )
    run = replace(run, **SMOKE) if options.smoke else run
    train_pair(replace(run, config=replace(run.config, drafter=options.drafter, is_hybrid=options.hybrid)))


if __name__ == "__main__":
    main()
