"""What structured output costs: tokens/s with and without a grammar on equal texts, and the host's time for masks.

`python -m benchmarks.structured` asks the demo pair for JSON in 16 streams, greedily, without a grammar and with the
schema that the prompt gives, on prompts whose answers are the same both ways. Then it fills masks over a made-up
vocabulary of 151,000 tokens, as of Qwen3, for a block of drafts in each of 16 answers: no model runs, so this is the
host's time alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from statistics import median, quantiles
from typing import Any

import numpy as np
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from dflash_backend import LLM
from dflash_backend.messages import StructuredOutputs
from dflash_backend.structured_output.compiler import GrammarCompiler
from dflash_backend.structured_output.matcher import BitmaskFiller, MatcherRules
from load_tests.prompts import held_out_dir

STREAMS = 16
# With this the schemas in the held-out prompts begin.
SCHEMA_BEGINS = '{"type": "object"'
VOCAB_SIZE = 151_936
EOS = 151_643
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {"type": "object", "properties": {"street": {"type": "string"}, "number": {"type": "number"}}},
    },
    "required": ["name", "age", "tags", "address"],
}
ANSWER = json.dumps(
    {
        "name": "Ada Lovelace",
        "age": 36,
        "tags": ["first", "of many"],
        "address": {"street": "St James's", "number": 12.5},
    }
)


def json_questions() -> list[tuple[str, Any]]:
    """Held-out prompts of the demo pair that ask for JSON, each with the schema that it gives."""
    rows = map(json.loads, (held_out_dir() / "tools.jsonl").read_text(encoding="utf-8").splitlines())
    found = []
    for row in rows:
        _, begins, rest = row["messages"][-1]["content"].partition(SCHEMA_BEGINS)
        if begins:
            schema, _ = json.JSONDecoder().raw_decode(begins + rest)
            found.append((row["prompt"], schema))
    return found


def tokens_per_second(num_rounds: int, max_tokens: int) -> tuple[int, list[float], list[float]]:
    """How many prompts give the same text without a grammar and with their schema, and tokens/s of each round over
    these, without and with, in turn: what slows the machine for a while slows both."""
    llm = LLM(max_num_seqs=STREAMS, kv_cache_gb=0.5, enable_prefix_caching=False)
    questions = json_questions()
    free: dict[str, Any] = {"temperature": 0.0, "max_tokens": max_tokens}

    def sampling(schema: Any) -> dict[str, Any]:
        return free | {"structured_outputs": {"json": schema}}

    texts = [output.text for output in llm.generate([prompt for prompt, _ in questions], [free] * len(questions))]
    held = llm.generate([prompt for prompt, _ in questions], [sampling(schema) for _, schema in questions])
    pairs = zip(questions, texts, held, strict=True)
    equal = [question for question, text, output in pairs if output.text == text]
    prompts = [prompt for prompt, _ in equal]
    ways = [free] * len(equal), [sampling(schema) for _, schema in equal]
    found: tuple[list[float], list[float]] = ([], [])
    both = list(zip(ways, found, strict=True))
    for number in range(num_rounds):
        for way, speeds in both if number % 2 else reversed(both):
            started = time.monotonic()
            outputs = llm.generate(prompts, way)
            speeds.append(sum(len(output.token_ids) for output in outputs) / (time.monotonic() - started))
    return len(equal), *found


def made_up_tokenizer() -> str:
    """A byte-level tokenizer with as many tokens as Qwen3's: words, and marks as JSON has them."""
    rng = random.Random(0)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    vocab = {letter: number for number, letter in enumerate(sorted(alphabet))}
    letters, marks = "etaonisrhldcumfpgwybvk", '",:{}[]().0123456789Ċ'
    while len(vocab) < EOS:
        # Most tokens of a real vocabulary are words or parts of words; few mix letters and marks.
        of = letters if rng.random() < 0.95 else marks
        word = "".join(rng.choices(of, k=rng.randint(2, 9 if of is letters else 4)))
        vocab.setdefault("Ġ" * (rng.random() < 0.4) + word, len(vocab))
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<|end|>"])
    return str(fast.to_str())


def mask_times(num_drafts: int, num_threads: int) -> tuple[float, float, list[float], list[float]]:
    """Seconds of reading the tokenizer, of compiling the schema, and of the masks of each step, as time that passed and
    of all processors: a block of drafts in each of `STREAMS` answers, which are at different positions."""
    text = made_up_tokenizer()
    compiler = GrammarCompiler(lambda: text, VOCAB_SIZE)
    grammar = StructuredOutputs("json", json.dumps(SCHEMA))
    started = time.perf_counter()
    compiler.compile(StructuredOutputs("regex", "a"), (EOS,))
    read = time.perf_counter() - started
    started = time.perf_counter()
    compiled = compiler.compile(grammar, (EOS,))
    compile_s = time.perf_counter() - started
    known = FastTokenizer.from_str(text)
    ids = [
        known.token_to_id(letter) or 0
        for letter, _ in known.pre_tokenizer.pre_tokenize_str(ANSWER)
        for letter in letter
    ]
    filler = BitmaskFiller(VOCAB_SIZE, num_threads)
    matchers = [compiled.matcher(MatcherRules()) for _ in range(STREAMS)]
    for number, matcher in enumerate(matchers):
        matcher.advance(ids[: 3 * number])
    times, processor = [], []
    for step in range(len(ids) // (num_drafts + 1)):
        answers = []
        for number, matcher in enumerate(matchers):
            at = 3 * number + step * (num_drafts + 1)
            answers.append((matcher, ids[at : at + num_drafts]))
        started, used = time.perf_counter(), time.process_time()
        filler.fill(answers)
        times.append(time.perf_counter() - started)
        processor.append(time.process_time() - used)
        for number, matcher in enumerate(matchers):
            at = 3 * number + step * (num_drafts + 1)
            matcher.advance(ids[at : at + num_drafts + 1])
        assert all(matcher.error is None for matcher in matchers)
    return read, compile_s, times, processor


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="of each kind, at least 2 (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, help="of each answer (%(default)s)")
    parser.add_argument("--drafts", type=int, default=7, help="in a block, for the masks (%(default)s)")
    args = parser.parse_args()
    num_threads = max(1, min(8, len(os.sched_getaffinity(0))))
    read, compile_s, times, processor = mask_times(args.drafts, num_threads)
    print(
        f"masks of {STREAMS} answers with {args.drafts} drafts each, {VOCAB_SIZE} tokens, {num_threads} threads: "
        f"median {1e3 * median(times):.1f} ms, p90 {1e3 * float(np.quantile(times, 0.9)):.1f} ms a step, "
        f"{1e3 * median(processor):.1f} ms of processors; tokenizer read in {read:.2f} s, schema compiled in "
        f"{1e3 * compile_s:.1f} ms",
        flush=True,
    )
    num_equal, free, bound = tokens_per_second(args.rounds, args.max_tokens)
    ratios = quantiles([held / without for without, held in zip(free, bound, strict=True)], n=4, method="inclusive")
    print(
        f"{STREAMS} streams, {num_equal} prompts with equal texts: {median(free):.0f} tokens/s without a grammar, "
        f"{median(bound):.0f} with their schema: {ratios[1]:.2f} of it, quartiles {ratios[0]:.2f} and {ratios[2]:.2f} "
        f"(medians of {args.rounds} rounds, the ratio of those of each round)"
    )


if __name__ == "__main__":
    main()
