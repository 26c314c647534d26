"""What a vocabulary that two ranks split costs and saves on a CPU, by its size and by how tokens are chosen.

`python -m benchmarks.vocabulary_split` makes small random targets whose text means nothing. For each, two ranks answer
the same prompts in turn with embedding and head on rank 0 and with both split. It prints the bytes of both on rank 0,
the bytes of sums that a step sends, and the medians of the ratios, split to not, of the time and of the processor time
of both processes. Exits with 1 when texts differ.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.small_target import write_small_target
from dflash_backend.config import EngineConfig
from dflash_backend.engine.build import BuiltEngine, build_engine
from dflash_backend.messages import GenerationRequest, SamplingParams
from dflash_backend.parallel.group import RankGroup, vocabulary_bytes
from dflash_backend.parallel.local import LocalRanks
from dflash_backend.parallel.target import TensorParallelTarget
from load_tests.markdown import markdown_table

MIB = 1024**2
SMALL: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "seed": 7},
    "top-k, top-p": {"temperature": 0.6, "seed": 7, "top_k": 20, "top_p": 0.95},
    "top-p": {"temperature": 1.0, "seed": 7, "top_p": 0.9},
}


@dataclass(frozen=True)
class Run:
    """What an engine did with one set of requests."""

    texts: dict[str, list[int]]
    seconds: float
    processor_s: float
    step_bytes: float


def group_of(built: BuiltEngine) -> RankGroup:
    """The other ranks of an engine."""
    target = built.runner.model.target
    assert isinstance(target, TensorParallelTarget)
    assert isinstance(target.ranks, RankGroup)
    return target.ranks


def processor_s(ranks: RankGroup) -> float:
    """Of this process and of the ranks, so far."""
    assert isinstance(ranks.links, LocalRanks)
    ticks = 0
    for process in ranks.links.processes:
        fields = Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def run(built: BuiltEngine, num_streams: int, num_tokens: int, sampling: dict[str, Any]) -> Run:
    """Answer the same prompts as the other engine."""
    rng, ranks = random.Random(1), group_of(built)
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, **sampling)
    for number in range(num_streams):
        prompt = [rng.randrange(1, built.pair.target.vocab_size) for _ in range(16)]
        built.core.add_request(GenerationRequest(str(number), prompt, params, ()))
    texts: dict[str, list[int]] = {str(number): [] for number in range(num_streams)}
    passes, sent = ranks.num_passes, ranks.reduce.num_bytes
    used, started = processor_s(ranks), time.perf_counter()
    while built.core.has_unfinished():
        for delta in built.core.step().deltas:
            texts[delta.request_id] += delta.token_ids
    seconds = time.perf_counter() - started
    steps = ranks.num_passes - passes
    return Run(texts, seconds, processor_s(ranks) - used, (ranks.reduce.num_bytes - sent) / steps)


def engine(target: Path, split: bool) -> BuiltEngine:
    """Two ranks, with the vocabulary split or not."""
    values = {"target_model": str(target), "draft_model": "", "device": "cpu", "max_num_seqs": 16, "kv_cache_gb": 0.1}
    with patch("dflash_backend.parallel.group.MIN_SPLIT_BYTES", 0 if split else sys.maxsize):
        return build_engine(
            EngineConfig.from_values({**values, "tensor_parallel_size": 2, "enable_prefix_caching": False})
        )


def rows_of(target: Path, vocab_size: int, options: argparse.Namespace) -> tuple[list[list[str]], bool]:
    """The table's rows for one target, and whether all texts are equal."""
    engines = [engine(target, split) for split in (False, True)]
    held = []
    for built in engines:
        shared = built.runner.model.target
        assert isinstance(shared, TensorParallelTarget)
        held.append(vocabulary_bytes(shared.local.spec, built.runner.model.dtype) / MIB)
    rows, same = [], True
    for name, sampling in SAMPLING.items():
        pairs = []
        for number in range(options.rounds + 1):
            order = engines if number % 2 else engines[::-1]
            found = [run(built, options.streams, options.tokens, sampling) for built in order]
            pairs.append(found if number % 2 else found[::-1])
        same &= all(one.texts == other.texts for one, other in pairs)
        times = statistics.median(other.seconds / one.seconds for one, other in pairs[1:])
        used = statistics.median(other.processor_s / one.processor_s for one, other in pairs[1:])
        kib = [each.step_bytes / 1024 for each in pairs[-1]]
        cells = [f"{vocab_size:,}", *(f"{each:.0f}" for each in held), name, *(f"{each:,.0f}" for each in kib)]
        rows.append([*cells, f"{times:.2f}", f"{used:.2f}"])
    for built in engines:
        group_of(built).links.end()
    return rows, same


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[8192, 32_001, 151_936], help="sizes")
    parser.add_argument("--rounds", type=int, default=7, help="that count, of each (%(default)s)")
    parser.add_argument("--streams", type=int, default=4, help="requests at once (%(default)s)")
    parser.add_argument("--tokens", type=int, default=24, help="of each answer (%(default)s)")
    options = parser.parse_args(arguments)
    table, same = [], True
    for vocab_size in options.vocabularies:
        with tempfile.TemporaryDirectory(prefix="dflash-vocabulary-") as folder:
            target = write_small_target(Path(folder), SMALL | {"vocab_size": vocab_size})
            rows, equal = rows_of(target, vocab_size, options)
        table += rows
        same &= equal
    header = ["vocabulary", "MiB on rank 0", "split", "tokens", "KiB a step", "split", "time", "processor time"]
    print(markdown_table(header, table, "rrrlrrrr"))
    print(f"texts are {'equal' if same else 'NOT equal'}")
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
