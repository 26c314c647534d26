"""What a wrong layer index costs: acceptance of the demo pair as it is, and with the drafter's features taken one layer
off. Such a mistake still runs and stays lossless, so that nothing but acceptance shows it.

`python -m benchmarks.acceptance` prints what `dflash-triton eval` does, for all three.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

from benchmarks.progress import progress
from dflash_backend import LLM
from dflash_backend.config import asset_path
from dflash_backend.evaluation import Evaluation, Question, Sampling, evaluate
from dflash_backend.evaluation.datasets import EMBEDDED_SETS, Source, load_questions
from dflash_backend.evaluation.engine import EngineAnswerer
from dflash_backend.evaluation.report import tables


def held_out(per_set: int) -> list[Question]:
    """The first `per_set` questions of each embedded set."""
    return load_questions([Source(name) for name in EMBEDDED_SETS], per_set)


def measure(llm: LLM, questions: list[Question]) -> Evaluation:
    """Greedy answers and what they cost."""
    return evaluate(EngineAnswerer(llm), questions, Sampling(), progress("answers").step)


def shifted_drafter(offset: int, folder: Path) -> Path:
    """A copy of the demo drafter in `folder` with `offset` added to every target layer id."""
    directory = folder / f"shifted{offset:+d}"
    shutil.copytree(asset_path("demo", "pair", "draft"), directory)
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    ids = config["dflash_config"]["target_layer_ids"]
    config["dflash_config"]["target_layer_ids"] = [i + offset for i in ids]
    path.write_text(json.dumps(config), encoding="utf-8")
    return directory


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=100, help="held-out prompts of each set (%(default)s)")
    questions = held_out(parser.parse_args().prompts)
    found = measure(LLM(), questions)
    print(tables(found, {"drafter": "as it is"}))
    length = found.overall.counts.acceptance_length
    with tempfile.TemporaryDirectory() as folder:
        for offset in (-1, 1):
            llm = LLM(draft=str(shifted_drafter(offset, Path(folder))))
            shifted = measure(llm, questions).overall.counts.acceptance_length
            print(f"acceptance length, layer ids {offset:+d}: {shifted:.3f} ({shifted / length - 1:+.1%})")


if __name__ == "__main__":
    main()
