"""Drafters that are swapped under load: no request fails, no text changes, and a worse drafter goes again.

`python -m checks.drafter_swap` serves the demo pair and keeps `--streams` greedy streams running, each prompt over and
over. Meanwhile it swaps the drafter `--swaps` times for a copy of itself, then for one whose weights have noise, which
accepts fewer drafts. The exit status is 1 where a request fails, a text differs from its first answer, a copy does not
stay, or the noisy drafter does not go again.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from checks.front_end import HOST
from dflash_backend.config import asset_path
from dflash_cli.launcher.server import TritonServer
from dflash_client import AsyncDFlashClient, ClientError
from load_tests.server_state import MetricsPage

KEY = "the key of this check"
NOISE = 0.3  # of a tensor's standard deviation
WINDOW = 300
WAIT_S = 60.0


def noisy_drafter(directory: Path) -> Path:
    """A copy of the demo's drafter whose weights have noise."""
    shutil.copytree(asset_path("demo", "pair", "draft"), directory)
    generator = torch.Generator().manual_seed(0)
    for file in directory.glob("*.safetensors"):
        noisy = {}
        for name, tensor in load_file(file).items():
            noise = NOISE * tensor.float().std() * torch.randn(tensor.shape, generator=generator)
            noisy[name] = (tensor + noise).to(tensor.dtype) if tensor.is_floating_point() else tensor
        save_file(noisy, file, metadata={"format": "pt"})
    return directory


@dataclass
class Seen:
    """What the streams saw: answers, those that differ from the first of their prompt, and errors."""

    num_answers: int = 0
    texts: dict[int, str] = field(default_factory=dict)
    different: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    done: bool = False

    async def stream(self, client: AsyncDFlashClient, number: int) -> None:
        """Ask one prompt over and over."""
        prompt = f"Write a function that adds {number}."
        while not self.done:
            try:
                text = (await client.generate(prompt, max_tokens=200, temperature=0, ignore_eos=True)).text
            except ClientError as error:
                self.errors.append(str(error))
                await asyncio.sleep(0.1)
                continue
            self.num_answers += 1
            if text != self.texts.setdefault(number, text):
                self.different.append(f"prompt {number}: {text!r}")


def outcomes(server: TritonServer) -> dict[str, int]:
    """How many swaps had which outcome."""
    found = MetricsPage.read(server.metrics_url).by("dflash:drafter_swaps_total", "outcome")
    return {outcome: int(count) for outcome, count in found.items()}


async def until(server: TritonServer, outcome: str, count: int) -> bool:
    """Whether an outcome comes within `WAIT_S`."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        if (await asyncio.to_thread(outcomes, server)).get(outcome, 0) >= count:
            return True
        await asyncio.sleep(0.2)
    return False


async def swap_under_load(server: TritonServer, noisy: Path, num_streams: int, num_swaps: int) -> list[str]:
    """What went wrong."""
    seen, wrong = Seen(), list[str]()
    client = AsyncDFlashClient(server.grpc_url)
    streams = [asyncio.create_task(seen.stream(client, number)) for number in range(num_streams)]
    await asyncio.sleep(3)
    for number in range(num_swaps):
        began = time.monotonic()
        await client.swap_drafter(str(asset_path("demo", "pair", "draft")), KEY, window=WINDOW)
        took = time.monotonic() - began
        if not await until(server, "kept", number + 1):
            wrong.append(f"the copy of swap {number} does not stay")
        print(f"swap {number}: drafts after {took:.2f} s, {seen.num_answers} answers so far", flush=True)
    await client.swap_drafter(str(noisy), KEY, window=WINDOW)
    if not await until(server, "reverted", 1):
        wrong.append("the noisy drafter stays")
    await asyncio.sleep(2)
    seen.done = True
    await asyncio.gather(*streams)
    await client.close()
    print(
        f"{seen.num_answers} answers of {num_streams} streams, {len(seen.errors)} errors, {len(seen.different)} texts "
        f"that differ; outcomes {outcomes(server)}"
    )
    return wrong + [f"error: {error}" for error in seen.errors[:3]] + seen.different[:3]


def main(arguments: list[str] | None = None) -> int:
    """Entry point; the exit status is 1 where something went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=32, help="that run at the same time (%(default)s)")
    parser.add_argument("--swaps", type=int, default=3, help="for a copy of the drafter (%(default)s)")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder, "key")
        key.write_text(KEY, encoding="utf-8")
        noisy = noisy_drafter(Path(folder, "noisy"))
        settings = {"max_num_seqs": str(given.streams), "admin_key_file": str(key)}
        with TritonServer(settings, host=HOST, http_port=0, grpc_port=0, metrics_port=0) as server:
            wrong = asyncio.run(swap_under_load(server, noisy, given.streams, given.swaps))
    for each in wrong:
        print(f"WRONG {each}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
