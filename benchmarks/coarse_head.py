"""What coarse codes of the LM head gain on a CPU (`enable_coarse_head`): an engine with and without them, in turn.

`python -m benchmarks.coarse_head` serves `--target`, without drafts or with those of `--draft`, to some numbers of
streams, and prints tokens a second with codes and without, and the ratio of each round. Exits with 1 when a
text with codes is another than without, or the target has none.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.pairs import SHORT, find_pair, prompts
from dflash_backend.config import EngineConfig
from dflash_backend.engine.build import BuiltEngine, build_engine
from dflash_backend.messages import GenerationRequest, SamplingParams
from dflash_backend.models.decoder import LayeredTarget
from load_tests.markdown import markdown_table

MAX_MODEL_LEN = 2048
HEADER = ("streams", "tokens/s with codes", "without", "with over without")


def answer(
    built: BuiltEngine, asked: Sequence[list[int]], max_tokens: int, parameters: dict[str, Any]
) -> tuple[float, list[list[int]]]:
    """Tokens a second, and the answers, of these prompts together."""
    sampling = SamplingParams(max_tokens=max_tokens, seed=7, ignore_eos=True, **parameters)
    answers: dict[str, list[int]] = {str(i): [] for i in range(len(asked))}
    started = time.perf_counter()
    for name, prompt in zip(answers, asked, strict=True):
        built.core.add_request(GenerationRequest(name, prompt, sampling, ()))
    while built.core.has_unfinished():
        for delta in built.core.step().deltas:
            answers[delta.request_id] += delta.token_ids
    return len(asked) * max_tokens / (time.perf_counter() - started), list(answers.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2", help="directory, hub id or GGUF file (%(default)s)")
    parser.add_argument("--numbers", action="store_true", help="of smollm2 the numbers of its file, as a checkpoint")
    parser.add_argument("--draft", default="", help="a drafter, or ngram; without it no drafts")
    parser.add_argument("--dtype", default="bfloat16", help="(%(default)s)")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32], help="1 8 32")
    parser.add_argument("--rounds", type=int, default=5, help="(%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="of each answer (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="of all requests (%(default)s)")
    parser.add_argument("--top-k", type=int, default=0, help="with a temperature (%(default)s: all)")
    parser.add_argument("--top-p", type=float, default=1.0, help="(%(default)s)")
    parser.add_argument("--min-p", type=float, default=0.0, help="(%(default)s)")
    args = parser.parse_args(arguments)
    pair = find_pair("smollm2" if args.target == "smollm2" else "demo")
    values = {
        "target_model": str(pair.target) if args.numbers else args.target,
        "draft_model": args.draft,
        "dtype": args.dtype,
        "device": "cpu",
        "max_num_seqs": max(args.streams),
        "max_model_len": MAX_MODEL_LEN,
        "enable_prefix_caching": False,
    }
    parameters = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    built = build_engine(EngineConfig.from_values(values))
    target = built.runner.model.target
    if not isinstance(target, LayeredTarget) or (head := target.coarse_head) is None:
        print("this target has no codes here: its head is too small, or multiplied in another way")
        return 1
    rows, same = [], True
    for streams in args.streams:
        asked = prompts(pair, SHORT, streams)
        answer(built, asked, args.max_tokens, parameters)
        rates: dict[bool, list[float]] = {True: [], False: []}
        for number in range(args.rounds):
            texts = {}
            for codes in (True, False)[:: -1 if number % 2 else 1]:
                target.coarse_head = head if codes else None
                rate, texts[codes] = answer(built, asked, args.max_tokens, parameters)
                rates[codes].append(rate)
            same &= texts[True] == texts[False]
        ratios = [one / other for one, other in zip(rates[True], rates[False], strict=True)]
        middle = [statistics.median(rates[codes]) for codes in (True, False)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        rows.append([str(streams), *(f"{rate:.0f}" for rate in middle), spread])
    print(markdown_table(HEADER, rows, "rrrr"))
    print(f"the codes take {head.num_bytes / 1e6:.1f} MB; texts are {'the same' if same else 'NOT the same'}")
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
