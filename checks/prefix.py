"""Time to first token and acceptance with a long shared prefix: the first request with it against later ones.

`python -m checks.prefix` prints them, and exits with 1 when a bound below is missed.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.prefix import PrefixMeasurement, measure_prefix
from benchmarks.progress import progress
from dflash_cli.commands.arguments import positive_int
from load_tests.prompts import load_prompts

# What the project promises of a hit: its time to first token over a miss's, and how far acceptance may differ.
MAX_FIRST_TOKEN_RATIO = 0.2
MAX_ACCEPTANCE_DIFFERENCE = 0.02
# Of the prefix, that a hit must begin behind: all but the last block, which the question may share.
MIN_HIT_SHARE = 0.95


def misses(measured: PrefixMeasurement) -> list[str]:
    """What does not keep its bound, in words."""
    found = [] if measured.outputs_equal else ["a hit gives another output than a miss"]
    if measured.fewest_cached_tokens < MIN_HIT_SHARE * measured.prefix_tokens:
        found.append(
            f"a hit began behind {measured.fewest_cached_tokens} of the prefix's {measured.prefix_tokens} tokens"
        )
    if measured.first_token_ratio > MAX_FIRST_TOKEN_RATIO:
        found.append(
            f"first token after {measured.first_token_ratio:.3f} of a miss's time; at most {MAX_FIRST_TOKEN_RATIO}"
        )
    difference = abs(measured.hit_acceptance_length / measured.miss_acceptance_length - 1)
    if difference > MAX_ACCEPTANCE_DIFFERENCE:
        found.append(f"acceptance differs by {difference:.1%}; at most {MAX_ACCEPTANCE_DIFFERENCE:.0%}")
    return found


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefixes", type=positive_int, default=12, help="how many (%(default)s)")
    parser.add_argument("--prefix-tokens", type=positive_int, default=1500, help="tokens of each (%(default)s)")
    given = parser.parse_args()
    result = measure_prefix(load_prompts(60), given.prefixes, given.prefix_tokens, progress("prefixes").step)
    acceptance = result.hit_acceptance_length / result.miss_acceptance_length
    print(
        f"prefix of {result.prefix_tokens} tokens, {result.repeats} times: first token after "
        f"{result.miss_first_token_s * 1e3:.1f} ms on a miss, {result.hit_first_token_s * 1e3:.1f} ms on a hit, ratio "
        f"{result.first_token_ratio:.3f}; acceptance length {result.miss_acceptance_length:.2f} on a miss, "
        f"{result.hit_acceptance_length:.2f} on a hit, ratio {acceptance:.3f}; outputs equal: {result.outputs_equal}"
    )
    found = misses(result)
    print("\n".join(found) or "every bound holds")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
