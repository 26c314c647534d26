"""A drafter that `dflash-triton train` makes from nothing beside one that learns from the prompts of the target's own
training: `python -m checks.training --seed 1 --minutes 10 --work DIR`.

The target is the demo's, trained some hundred steps more by a seed of its own, so that no drafter of it exists. Both
drafters have the same sizes and the same number of steps; the first one is given no data. Exits with 1 when its
acceptance length on held-out prompts of the generator is below 0.8 of the other's. What lies in `--work` already is
taken as it is, so that a run can be cut into pieces.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from demo.data import WEIGHTS, held_out_rows, problems
from demo.train import Run, train_pair
from dflash_backend import LLM
from dflash_backend.config import asset_path
from dflash_backend.spec_stats import SpecDecodingStats
from dflash_backend.training.data import DataOptions
from dflash_backend.training.run import TrainOptions, train

LEAST = 0.8
TARGET_STEPS = 150
PROMPTS = 6000
QUESTIONS = 30
CATEGORIES = ("math", "code", "chat", "talk")
SIZES = {"draft_layers": 3, "block_size": 16}


def generator_rows(seed: int) -> Iterator[dict[str, Any]]:
    """Prompts as the target was trained on, none of them held out."""
    chance = Random(f"check/{seed}")
    streams = {name: problems(chance, name, held_out=False) for name in WEIGHTS}
    while True:
        name = chance.choices(list(WEIGHTS), weights=list(WEIGHTS.values()))[0]
        yield {"messages": next(streams[name]).messages}


def write_prompts(work: Path, seed: int) -> Path:
    """A file of `PROMPTS` such rows."""
    file = work / "prompts.jsonl"
    if not file.exists():
        rows = generator_rows(seed)
        lines = (json.dumps(next(rows), ensure_ascii=False) + "\n" for _ in range(PROMPTS))
        file.write_text("".join(lines), encoding="utf-8")
    return file


def make_target(work: Path, seed: int) -> Path:
    """A target of its own, and the folder that it is in."""
    target = work / "pair" / "target"
    if not target.exists():
        demo = asset_path("demo", "pair")
        train_pair(Run(work / "pair", TARGET_STEPS, 0, seed, workers=1, resume=demo))
    return target


def make_drafter(target: Path, out: Path, options: TrainOptions) -> dict[str, Any]:
    """What `train.json` says of a drafter, which is trained unless it is there."""
    if not (out / "train.json").exists():
        train(replace(options, target=str(target), out=out), lambda text: print(text, flush=True), lambda *_: None)
    found: dict[str, Any] = json.loads((out / "train.json").read_text(encoding="utf-8"))
    return found


def acceptance(target: Path, draft: Path) -> dict[str, float]:
    """Acceptance lengths on held-out prompts of the generator, by category and over all."""
    llm = LLM(str(target), str(draft), adaptive_speculation=False, kv_cache_gb=0.5, max_model_len=1024)
    total, found = [], {}
    for category in CATEGORIES:
        prompts = [row["prompt"] for row in held_out_rows(category, QUESTIONS)]
        outputs = llm.generate(prompts, max_tokens=128, temperature=0)
        counts = [output.stats.spec_decoding for output in outputs if output.stats is not None]
        found[category] = SpecDecodingStats.total(counts).acceptance_length
        total += counts
    return {"all": SpecDecodingStats.total(total).acceptance_length, **found}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of the check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=10.0, help="of the drafter that is given no data")
    parser.add_argument("--work", type=Path, required=True, help="folder of what is made")
    options = parser.parse_args(arguments)
    work: Path = options.work / f"seed-{options.seed}"
    target = make_target(work, options.seed)
    data = DataOptions(num_tokens=150_000, seed=options.seed)
    asked = TrainOptions("", work, data, minutes=options.minutes, drafter=SIZES)
    alone = make_drafter(target, work / "alone", asked)
    taught_data = replace(data, num_tokens=alone["answer_tokens"], files=(write_prompts(work, options.seed),))
    taught = make_drafter(target, work / "taught", replace(asked, data=taught_data, steps=alone["steps"]))
    lengths = {name: acceptance(target, work / name) for name in ("alone", "taught")}
    ratio = lengths["alone"]["all"] / lengths["taught"]["all"]
    for name, summary in (("alone", alone), ("taught", taught)):
        figures = ", ".join(f"{key} {value:.2f}" for key, value in lengths[name].items())
        seconds = f"{summary['data_seconds']:.0f} s of data, {summary['training_seconds']:.0f} s of training"
        made = f"{summary['samples']} samples, {summary['answer_tokens']} tokens of answers, {summary['steps']} steps"
        print(f"{name}: {made}, {seconds}; {figures}")
    print(f"seed {options.seed}: without data {ratio:.2f} of what the generator's prompts give; at least {LEAST}")
    return 0 if ratio >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
