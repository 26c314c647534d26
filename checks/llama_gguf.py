"""The demo pair as llama.cpp's own converter writes it, beside its server and beside the same pair in safetensors.

`python -m checks.llama_gguf` compares, in float32 and greedily, texts and counts of drafts of this engine with both
kinds of files, and the texts of llama.cpp's server without drafts and with the same drafter. llama.cpp bars the end of
a text, so texts count up to it. The exit status is 1 when any differs, and 77 without llama.cpp
(benchmarks/README.md).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.llama_files import drafter_file, target_file
from benchmarks.peers.pairs import DFLASH, NONE, SHORT, Pair, find_pair, prompts
from benchmarks.peers.sides.http_side import HOST, Server, request_body
from benchmarks.peers.systems import LOAD_TIMEOUT_S, SYSTEMS, Context
from checks.exit_status import SKIPPED
from checks.smollm2 import Outcome
from dflash_backend import LLM

LLAMA = SYSTEMS["llama"]
ANSWER_S = 600.0
Texts = Sequence[Sequence[int]]


def our_answers(target: Path, drafter: Path, asked: Texts, max_tokens: int) -> tuple[list[list[int]], Any, set[int]]:
    """The tokens of this engine's answers, its counts of drafts, and the tokens that end a text."""
    llm = LLM(target=str(target), draft=str(drafter), dtype="float32", kv_cache_gb=0.2, adaptive_speculation=False)
    outputs = llm.generate([*asked], max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return [list(each.token_ids) for each in outputs], llm.stats().spec_decoding, set(llm.tokenizer.eos_token_ids)


def llama_answers(context: Context, pair: Pair, drafts: str, asked: Texts, max_tokens: int) -> list[list[int]]:
    """Those of llama.cpp's server, each in one piece: a stream leaves out tokens that end within a character."""
    settings = LLAMA.settings(context, pair, drafts)
    url, server = f"http://{HOST}:{settings['port']}", Server(settings)
    try:
        server.wait(url + settings["health"], LOAD_TIMEOUT_S)
        answers = []
        for prompt in asked:
            body = request_body(settings, list(prompt), max_tokens, stream=False)
            request = urllib.request.Request(url + settings["path"], body, {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                answers.append(list(json.load(answer)["tokens"]))
        return answers
    finally:
        server.stop()


def to_end(tokens: Sequence[int], ends: set[int]) -> list[int]:
    """The tokens before the first that ends a text."""
    at = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return list(tokens[:at])


def compare(context: Context, pair: Pair, count: int, max_tokens: int, outcome: Outcome) -> None:
    """All ways to answer the same prompts."""
    asked, installed = prompts(pair, SHORT, count), context.peers / "llama.cpp"
    assert pair.drafter is not None
    texts, counts, ends = our_answers(pair.target, pair.drafter, asked, max_tokens)
    files = target_file(installed, pair), drafter_file(installed, pair, context.folder)
    of_files, of_gguf, _ = our_answers(*files, asked, max_tokens)
    same = sum(one == other for one, other in zip(texts, of_files, strict=True))
    outcome.compare(f"answers of {max_tokens} tokens of the pair in GGUF as in safetensors", same, count)
    outcome.compare("counts of drafts as in safetensors", int(counts == of_gguf), 1)
    print(f"acceptance length {of_gguf.acceptance_length:.2f}", flush=True)
    for drafts, words in ((NONE, "without drafts"), (DFLASH, "with the same drafter")):
        theirs = llama_answers(context, pair, drafts, asked, max_tokens)
        ours = [to_end(text, ends) for text in texts]
        same = sum(one == other[: len(one)] for one, other in zip(ours, theirs, strict=True))
        outcome.compare(f"answers of llama.cpp {words} as ours, {sum(map(len, ours))} tokens", same, count)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path, default=Path(os.environ.get("PEERS_DIR", ".peers")), help="%(default)s")
    parser.add_argument("--prompts", type=int, default=40, help="%(default)s")
    parser.add_argument("--max-tokens", type=int, default=96, help="of each answer (%(default)s)")
    args = parser.parse_args()
    pair, outcome = find_pair("demo"), Outcome([], [])
    with tempfile.TemporaryDirectory() as folder:
        context = Context(args.peers.absolute(), Path(folder), len(os.sched_getaffinity(0)), 1)
        if missing := LLAMA.missing(context, pair, DFLASH):
            installed = context.llama("amx").is_file()
            print(f"{'failed' if installed else 'skipped'}: {missing}")
            return 1 if installed else SKIPPED
        compare(context, pair, args.prompts, args.max_tokens, outcome)
    print("\n".join(outcome.misses) or "nothing is missed")
    return int(bool(outcome.misses))


if __name__ == "__main__":
    sys.exit(main())
