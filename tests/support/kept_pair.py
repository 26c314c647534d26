"""The demo pair in FP8 and in INT4, its weights kept quantised, through interpreted kernels: a GPU's path, on a CPU.

`python -m tests.support.kept_pair` runs a few prompts greedily and sampled, with drafts and without, and prints how
many texts are those of the same checkpoint dequantised, and both acceptance lengths. Exits with 1 when a text
differs or when acceptance is less than 0.9 of the dequantised pair's.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are imported

from dflash_backend import LLM
from dflash_backend.config import asset_path
from dflash_backend.spec_stats import SpecDecodingStats
from load_tests.prompts import load_prompts
from tests.support import fast_interpreter
from tests.support.quantised import AWQ, FP8_BLOCK, awq, fp8_block, write

TARGET, DRAFT = (asset_path("demo", "pair", name) for name in ("target", "draft"))
SCHEMES = {"fp8": (fp8_block(), FP8_BLOCK), "int4": (awq(32), AWQ | {"group_size": 32})}
SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "sampled": {"temperature": 0.8, "seed": 5}}
LEAST_ACCEPTANCE = 0.9
Texts = tuple[list[list[int]], float | None]
"""Tokens of each prompt, and the acceptance length; None without drafts."""


def generate(target: Path, draft: Path | str, kept: bool, prompts: list[str], sampling: dict[str, Any]) -> Texts:
    """What a pair answers. kept: with a GPU's kernels, by codes, else with torch by numbers."""
    settings: dict[str, Any] = {"max_model_len": 512, "kv_cache_gb": 0.25, "dtype": "float32"}
    if kept:
        settings["attention_backend"] = "triton"
    llm = LLM(target=str(target), draft=str(draft), adaptive_speculation=False, **settings)
    outputs = llm.generate(prompts, **sampling)
    counts = SpecDecodingStats.total(out.stats.spec_decoding for out in outputs if out.stats is not None)
    return [out.token_ids for out in outputs], counts.acceptance_length if draft else None


def compare(target: Path, scheme: str, prompts: list[str], max_tokens: int) -> list[str]:
    """Print how the ways to run a checkpoint compare; which of them miss a bound, in words."""
    missed = []
    for name, sampling in SAMPLINGS.items():
        own = {"max_tokens": max_tokens, **sampling}
        expected, usual = generate(target, DRAFT, False, prompts, own)
        for draft in (DRAFT, ""):
            texts, found = generate(target, draft, True, prompts, own)
            equal = sum(mine == theirs for mine, theirs in zip(texts, expected, strict=True))
            way = f"{scheme}, {name}, {'with drafts' if draft else 'without drafts'}"
            accepted = "" if found is None else f"; acceptance length {found:.2f}, dequantised {usual:.2f}"
            print(f"{way}: {equal} of {len(prompts)} texts are those of the dequantised pair{accepted}", flush=True)
            if equal < len(prompts):
                missed.append(f"{way}: {len(prompts) - equal} texts differ")
            if found is not None and usual is not None and found < LEAST_ACCEPTANCE * usual:
                missed.append(f"{way}: acceptance length {found:.2f}, not {LEAST_ACCEPTANCE} of {usual:.2f}")
    return missed


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scheme", choices=SCHEMES, action="append", help="default: all")
    parser.add_argument("--prompts", type=int, default=4, help="(%(default)s)")
    parser.add_argument("--tokens", type=int, default=24, help="of each answer (%(default)s)")
    arguments = parser.parse_args()
    fast_interpreter.install()
    prompts, missed = [row.prompt for row in load_prompts(arguments.prompts)], []
    with tempfile.TemporaryDirectory() as folder:
        for scheme in arguments.scheme or SCHEMES:
            target = write(TARGET, Path(folder, scheme), *SCHEMES[scheme]).quantised
            missed += compare(target, scheme, prompts, arguments.tokens)
    print("\n".join(missed) or "every bound holds")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
