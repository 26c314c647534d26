"""Two API keys, one of which floods: how long the other waits for its first token, against its idle time.

`python -m checks.key_fairness`. One key keeps as many streams running as the server takes and more; the other asks now
and then. The exit status is 0 when the median time to first token under the flood is at most 3 times the idle one.
`tests/server/test_front_end_abuse.py` runs it with fewer requests.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import dataclass

from checks.flooded import FloodedTimes
from checks.front_end import RunningFrontEnd, running_front_end

FLOOD, OTHER = "flood-key-0123456789", "other-key-0123456789"
SETTINGS = {"max_num_seqs": "8", "max_model_len": "1024", "kv_cache_gb": "0.1"}
LONG = "A farmer has 12 cows and buys 7 more of them at the market. " * 4
QUESTION = "Sam fills 4 bags with 6 marbles each and gives away 7 marbles. How many marbles does Sam keep?\n"
PAUSE_S = 0.2


@dataclass(frozen=True)
class Fairness(FloodedTimes):
    """Times to the first token, and how many streams flooded."""

    num_streams: int
    num_refused: int

    def __str__(self) -> str:
        return (
            f"time to first token, {super().__str__()}; {self.num_streams} streams of the other key were refused "
            f"{self.num_refused} times"
        )


async def measure(front_end: RunningFrontEnd, num_streams: int, num_questions: int, num_running: int) -> Fairness:
    """Ask `num_questions` times idle, and as often while `num_streams` streams of the other key are
    sent all the time, of which `num_running` can run."""
    await front_end.first_token_s(QUESTION, OTHER)
    idle = [await _ask(front_end, number) for number in range(num_questions)]
    refused = 0

    async def flood(number: int) -> None:
        nonlocal refused
        body = {"max_tokens": 400, "ignore_eos": True, "temperature": 0, "stream": True}
        while True:
            number += num_streams
            async with front_end.post("/v1/completions", {**body, "prompt": f"{number}. {LONG}"}, FLOOD) as reader:
                if b" 429 " in await reader.readline():
                    refused += 1
                    await asyncio.sleep(PAUSE_S)
                await reader.read()

    flooding = [asyncio.create_task(flood(number)) for number in range(num_streams)]
    try:
        while front_end.metrics.value("dflash:num_requests_running") < num_running:
            await asyncio.sleep(PAUSE_S)
        flooded = [await _ask(front_end, num_questions + number) for number in range(num_questions)]
    finally:
        for task in flooding:
            task.cancel()
        await asyncio.gather(*flooding, return_exceptions=True)
    return Fairness(idle, flooded, num_streams, refused)


async def _ask(front_end: RunningFrontEnd, number: int) -> float:
    """A question that no prefix of an earlier one answers."""
    await asyncio.sleep(PAUSE_S)
    seconds, _ = await front_end.first_token_s(f"{number}: {QUESTION}", OTHER)
    return seconds


def main(arguments: list[str] | None = None) -> int:
    """Run it and print a line, without limits and with one on the flooding key."""
    parser = argparse.ArgumentParser(description="Time to first token of a key while another one floods.")
    parser.add_argument("--streams", type=int, default=48, help="of the key that floods (%(default)s)")
    parser.add_argument("--questions", type=int, default=20, help="of the other key, idle and under load (%(default)s)")
    given = parser.parse_args(arguments)
    kept = True
    for limit, num_running in (("", int(SETTINGS["max_num_seqs"])), (" max_concurrency=4", 4)):
        with running_front_end(SETTINGS, ["--no-access-log"], f"flood {FLOOD}{limit}\nother {OTHER}") as front_end:
            found = asyncio.run(measure(front_end, given.streams, given.questions, num_running))
        print(f"{limit.strip() or 'without limits'}: {found}", flush=True)
        kept = kept and not found.misses()
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
