"""A drafter in vLLM's CPU build and here: the same texts, and as many blocks: `python -m checks.vllm_drafts --python
PATH --draft DIR`, where PATH is the interpreter that has vLLM (`benchmarks/peers/install.sh vllm`).

vLLM 0.32's CPU build norms the keys of a drafter's context by the weights of its first layer in all layers, and so
accepts fewer drafts; `--own-norms` has it take each layer's own. Exits with 1 where a text differs, or the numbers of
blocks by more than 2 %.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from demo.data import held_out_rows
from dflash_backend import LLM
from dflash_backend.config import asset_path
from dflash_backend.spec_stats import SpecDecodingStats

CATEGORIES, QUESTIONS, MAX_TOKENS = ("math", "code", "chat"), 8, 96
MOST_APART = 0.02
ENVIRON = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def by_vllm(python: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """What `vllm_side` says. Raises `RuntimeError` with the end of its errors."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "settings.json"
        file.write_text(json.dumps(settings), encoding="utf-8")
        command = [str(python), str(Path(__file__).with_name("vllm_side.py")), str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | ENVIRON)
    if done.returncode:
        raise RuntimeError(f"vLLM ended with {done.returncode}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of the check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--python", type=Path, required=True, help="the interpreter that has vLLM")
    parser.add_argument("--target", type=Path, default=asset_path("demo", "pair") / "target")
    parser.add_argument("--draft", type=Path, default=asset_path("demo", "pair") / "draft")
    parser.add_argument("--own-norms", action="store_true", help="in vLLM each layer norms its keys by its own weights")
    options = parser.parse_args(arguments)
    if not options.python.is_file():
        parser.error(f"there is no interpreter {options.python}: `benchmarks/peers/install.sh vllm` makes one")
    target, draft = options.target.resolve(), options.draft.resolve()
    llm = LLM(str(target), str(draft), adaptive_speculation=False, kv_cache_gb=0.3, max_model_len=1024)
    rows = [row["prompt"] for category in CATEGORIES for row in held_out_rows(category, QUESTIONS)]
    prompts = [llm.tokenizer.encode(row) for row in rows]
    outputs = llm.generate(prompts, max_tokens=MAX_TOKENS, temperature=0)
    counts = SpecDecodingStats.total(output.stats.spec_decoding for output in outputs if output.stats is not None)
    settings = {
        "target": str(target),
        "draft": str(draft),
        "drafts": llm.engine.ready.num_speculative_tokens,
        "prompts": prompts,
        "max_tokens": MAX_TOKENS,
        "own_norms": options.own_norms,
    }
    theirs = by_vllm(options.python, settings)
    same = sum(output.token_ids == answer for output, answer in zip(outputs, theirs["answers"], strict=True))
    apart = abs(theirs["drafts"] - counts.num_drafts) / counts.num_drafts
    print(
        f"{same} of {len(prompts)} texts are the same; {counts.num_drafts} blocks here, {theirs['drafts']} in vLLM "
        f"{theirs['version']}, {100 * apart:.1f} % apart; at most {100 * MOST_APART:g} %"
    )
    return int(same != len(prompts) or apart > MOST_APART)


if __name__ == "__main__":
    sys.exit(main())
