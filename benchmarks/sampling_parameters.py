"""What each sampling parameter costs: tokens a second with it, over those of greedy requests, in turn.

`python -m benchmarks.sampling_parameters` serves `--target`, without drafts or with those of `--draft`, to some numbers
of streams, first greedily and then with each of `--only`, round after round, and prints the ratio of each to the
greedy one of its round. All answers have the same length. Exits with 1 where a ratio is below `--at-least`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.coarse_head import MAX_MODEL_LEN, answer
from benchmarks.peers.pairs import SHORT, find_pair, prompts
from dflash_backend.config import EngineConfig
from dflash_backend.engine.build import BuiltEngine, build_engine
from dflash_backend.messages import StructuredOutputs
from load_tests.markdown import markdown_table

GREEDY = "greedy"
AT = {"temperature": 0.8}
PARAMETERS: dict[str, dict[str, Any]] = {
    GREEDY: {},
    "temperature": AT,
    "top_p": {**AT, "top_p": 0.95},
    "top_k": {**AT, "top_k": 40},
    "min_p": {**AT, "min_p": 0.05},
    "all filters": {**AT, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "frequency_penalty": {"frequency_penalty": 0.2, "presence_penalty": 0.1},
    "logit_bias": {"logit_bias": {17: 1.0, 23: -1.0}},
    "allowed_token_ids": {"allowed_token_ids": tuple(range(100, 1100))},
    "min_tokens": {"min_tokens": 1024, "stop_token_ids": (0,)},
    "logprobs": {"logprobs": 0},
    "top_logprobs": {"logprobs": 5},
    "structured_outputs": {"structured_outputs": StructuredOutputs("regex", "[a-zA-Z ,.]{900}")},
}
"""Sampling parameters, each with what is usual for it; all greedy but for those with a temperature."""


def tokens_per_second(
    built: BuiltEngine, asked: Sequence[list[int]], max_tokens: int, parameters: dict[str, Any]
) -> float:
    """Of these prompts together."""
    return answer(built, asked, max_tokens, {"temperature": 0.0} | parameters)[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2", help="smollm2, a directory, hub id or GGUF file (%(default)s)")
    parser.add_argument("--draft", default="", help="a drafter, or ngram; without it no drafts")
    parser.add_argument("--dtype", default="bfloat16", help="(%(default)s)")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8], help="1 8")
    parser.add_argument("--rounds", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=48, help="of each answer (%(default)s)")
    parser.add_argument("--only", nargs="+", choices=list(PARAMETERS)[1:], help="some of them", metavar="PARAMETER")
    parser.add_argument("--at-least", type=float, default=0.0, help="the least ratio that passes (%(default)s)")
    args = parser.parse_args(arguments)
    pair = find_pair("smollm2" if args.target == "smollm2" else "demo")
    values = {
        "target_model": str(pair.target) if args.target == "smollm2" else args.target,
        "draft_model": args.draft,
        "dtype": args.dtype,
        "max_num_seqs": max(args.streams),
        "max_model_len": MAX_MODEL_LEN,
        "enable_prefix_caching": False,
    }
    built = build_engine(EngineConfig.from_values(values))
    names = args.only or list(PARAMETERS)[1:]
    ratios: dict[str, list[float]] = {name: [] for name in names}
    for streams in args.streams:
        asked = prompts(pair, SHORT, streams)
        for name in (GREEDY, *names):
            tokens_per_second(built, asked, 8, PARAMETERS[name])
        found: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(args.rounds):
            greedy = tokens_per_second(built, asked, args.max_tokens, PARAMETERS[GREEDY])
            for name in names:
                found[name].append(tokens_per_second(built, asked, args.max_tokens, PARAMETERS[name]) / greedy)
        for name in names:
            ratios[name].append(statistics.median(found[name]))
    header = ("over greedy", *(f"{streams} streams" for streams in args.streams))
    rows = [[name, *(f"{ratio:.2f}" for ratio in of_name)] for name, of_name in ratios.items()]
    print(markdown_table(header, rows, "l" + "r" * len(args.streams)))
    return int(any(ratio < args.at_least for of_name in ratios.values() for ratio in of_name))


if __name__ == "__main__":
    sys.exit(main())
