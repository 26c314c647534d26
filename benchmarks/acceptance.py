"""Accuracy and acceptance length of the demo pair on its held-out sets, through the engine.

`python -m benchmarks.acceptance` prints them by category and by position, and what is left of the acceptance length
when every feature layer of the drafter is shifted by one: a wrong layer index still runs, and shows nowhere else.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from benchmarks.workload import CATEGORIES, HeldOutPrompt, load_prompts
from dflash_backend import LLM
from dflash_backend.config import asset_path
from dflash_backend.llm import RequestOutput

ANSWER = re.compile(r"Answer:\s*(-?\d+)\s*$")


@dataclass(frozen=True)
class Acceptance:
    """Counts over some requests. `per_position[i]` counts drafts whose token i (0-based) stood."""

    num_drafts: int
    num_accepted: int
    per_position: list[int]

    @property
    def length(self) -> float:
        """1 + accepted / drafts."""
        return 1 + self.num_accepted / self.num_drafts

    @property
    def position_rates(self) -> list[float]:
        """For each position, the share of drafts whose token there stood."""
        return [count / self.num_drafts for count in self.per_position]


def acceptance_of(outputs: list[RequestOutput]) -> Acceptance:
    """Sum over finished requests."""
    stats = [output.stats for output in outputs if output.stats is not None]
    columns = zip(*(one.num_accepted_tokens_per_pos for one in stats), strict=True)
    return Acceptance(
        sum(one.num_drafts for one in stats),
        sum(one.num_accepted_tokens for one in stats),
        [sum(column) for column in columns],
    )


def is_correct(output: RequestOutput, prompt: HeldOutPrompt) -> bool:
    """Whether the text ends with the right answer."""
    found = ANSWER.search(output.text)
    return found is not None and found.group(1) == prompt.answer


def answer_all(llm: LLM, prompts: list[HeldOutPrompt], max_tokens: int = 256) -> dict[str, list[RequestOutput]]:
    """Greedy answers by category."""
    outputs = llm.generate([prompt.prompt for prompt in prompts], max_tokens=max_tokens, temperature=0)
    by_category: dict[str, list[RequestOutput]] = defaultdict(list)
    for prompt, output in zip(prompts, outputs, strict=True):
        by_category[prompt.category].append(output)
    return by_category


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


def overall(by_category: dict[str, list[RequestOutput]]) -> Acceptance:
    """Acceptance over all categories."""
    return acceptance_of([output for outputs in by_category.values() for output in outputs])


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=300, help="held-out prompts, over all categories")
    args = parser.parse_args()
    prompts = load_prompts(args.prompts)
    by_category = answer_all(LLM(), prompts)
    math = [prompt for prompt in prompts if prompt.category == "math"]
    correct = sum(is_correct(output, prompt) for output, prompt in zip(by_category["math"], math, strict=True))
    print(f"accuracy on word problems: {correct} of {len(math)} ({correct / len(math):.1%})")
    for category in CATEGORIES:
        print(f"acceptance length, {category}: {acceptance_of(by_category[category]).length:.2f}")
    total = overall(by_category)
    print(f"acceptance length, overall: {total.length:.2f}")
    print("acceptance rate by position: " + " ".join(f"{rate:.2f}" for rate in total.position_rates))
    with tempfile.TemporaryDirectory() as folder:
        for offset in (-1, 1):
            shifted = overall(answer_all(LLM(draft=str(shifted_drafter(offset, Path(folder)))), prompts))
            change = shifted.length / total.length - 1
            print(f"acceptance length, layer ids {offset:+d}: {shifted.length:.2f} ({change:+.1%})")


if __name__ == "__main__":
    main()
