"""SmolLM2-135M-Instruct, which `make smollm2` installs, beside `transformers` with the same weights in float32.

`python -m checks.smollm2` compares token ids and log-probabilities of texts (perplexity too), greedy answers, which may
part where the two best scores are within 1e-4, and greedy and sampled answers with n-gram drafts and without. The exit
status is 1 when any differs. Without the package it says so and ends with 0.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.progress import progress
from dflash_backend import LLM
from dflash_backend.checkpoints import CheckpointError, find_model
from dflash_backend.config import NGRAM

QUESTIONS = Path(__file__).with_name("questions.jsonl")
TIE = 1e-4
TEXTS = (
    "The lighthouse keeper wrote the date in his book, lit the lamp, and watched the fog roll in from the west.",
    "def area(radius):\n    # of a circle\n    return 3.14159 * radius ** 2\n",
    "Naïve café owners in Zürich paid 1,234.50 francs for 3 machines. They'll arrive on Friday, won't they?",
    "Water freezes at 0 degrees Celsius and boils at 100 degrees at sea level; salt lowers the first.",
)
INSTRUCTIONS = ("Answer in one sentence.", "Answer with a list.", "Explain it to a child.", "Answer at length.")


@dataclass
class Outcome:
    """What was compared and what differed, a sentence each."""

    lines: list[str]
    misses: list[str]

    def compare(self, what: str, good: int, total: int, more: str = "") -> None:
        """Of `total` things `good` are as they should be."""
        self.lines.append(f"{what}: {good} of {total}{more}")
        print(self.lines[-1], flush=True)
        if good < total:
            self.misses.append(f"{what}: only {good} of {total}")


class Reference:
    """The same weights in `transformers`."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def scores(self, ids: Sequence[int]) -> torch.Tensor:
        """Log-probabilities `[num_tokens, vocab]` of what follows each token, float32."""
        with torch.inference_mode():
            found: torch.Tensor = self.model(torch.tensor([list(ids)])).logits[0].log_softmax(dim=-1)
        return found

    def greedy(self, prompts: Sequence[list[int]], max_tokens: int, batch: int = 20) -> list[list[int]]:
        """Greedy answers of a fixed length."""
        answers: list[list[int]] = []
        so_far = progress("answers of transformers")
        for first in range(0, len(prompts), batch):
            so_far.step(first, len(prompts))
            part = prompts[first : first + batch]
            width = max(map(len, part))
            ids = torch.tensor([[0] * (width - len(one)) + one for one in part])
            mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in part])
            with torch.inference_mode():
                output = self.model.generate(
                    ids,
                    attention_mask=mask,
                    max_new_tokens=max_tokens,
                    do_sample=False,
                    eos_token_id=None,
                    pad_token_id=0,
                )
            answers += output[:, width:].tolist()
        return answers

    def is_tie(self, prompt: list[int], ours: list[int], theirs: list[int]) -> bool:
        """Whether the two answers part where the scores of both tokens are within `TIE`."""
        at = next(i for i, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other)
        scores = self.scores(prompt + ours[:at])[-1]
        return abs(float(scores[ours[at]] - scores[theirs[at]])) <= TIE


def read_questions() -> list[str]:
    """Questions of our own, one a line."""
    return [json.loads(line)["turns"][0] for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]


def chat_prompts(llm: Any, count: int) -> list[list[int]]:
    """Token ids of `count` different questions, in the chat template."""
    questions = [f"{question} {how}" for how in INSTRUCTIONS for question in read_questions()]
    if count > len(questions):
        raise ValueError(f"{count} prompts were asked for; there are {len(questions)}")
    texts = [llm.tokenizer.render_chat([{"role": "user", "content": one}]).text for one in questions[:count]]
    return [llm.tokenizer.encode(text) for text in texts]


def compare_texts(llm: Any, reference: Any, outcome: Outcome) -> None:
    """Token ids, log-probabilities of each token of the texts, and perplexity."""
    same, largest, sums = 0, 0.0, [0.0, 0.0]
    count = 0
    for text in TEXTS:
        ids = llm.tokenizer.encode(text)
        same += ids == reference.tokenizer(text)["input_ids"]
        (output,) = llm.generate([ids], max_tokens=1, temperature=0, prompt_logprobs=0)
        expected = reference.scores(ids)
        for at, entry in enumerate(output.prompt_logprobs[1:]):
            ours, theirs = entry.logprobs[0], float(expected[at, ids[at + 1]])
            largest = max(largest, abs(ours - theirs))
            sums = [sums[0] - ours, sums[1] - theirs]
            count += 1
    outcome.compare("texts with the token ids of transformers", same, len(TEXTS))
    perplexity = [math.exp(each / count) for each in sums]
    more = f" (largest distance {largest:.1e}; perplexity {perplexity[0]:.4f} and {perplexity[1]:.4f})"
    outcome.compare(f"log-probabilities of {count} tokens within {TIE:g}", int(largest <= TIE), 1, more)


def compare_greedy(llm: Any, reference: Any, prompts: list[list[int]], max_tokens: int, outcome: Outcome) -> None:
    """Greedy answers against `transformers`."""
    outputs = llm.generate(prompts, max_tokens=max_tokens, temperature=0, ignore_eos=True)
    ours, theirs = [list(output.token_ids) for output in outputs], reference.greedy(prompts, max_tokens)
    equal = [one == other for one, other in zip(ours, theirs, strict=True)]
    ties = sum(
        not same and reference.is_tie(prompt, one, other)
        for prompt, one, other, same in zip(prompts, ours, theirs, equal, strict=True)
    )
    what = f"greedy answers of {max_tokens} tokens as those of transformers"
    outcome.compare(what, sum(equal) + ties, len(equal), f", {ties} of them up to a tie")


def compare_drafts(plain: Any, drafting: Any, prompts: list[list[int]], max_tokens: int, outcome: Outcome) -> None:
    """Greedy and seeded answers with n-gram drafts and without."""
    for what, sampling in (("greedy", {"temperature": 0}), ("seeded", {"temperature": 0.8, "seed": 46})):
        one, other = (
            [output.token_ids for output in llm.generate(prompts, max_tokens=max_tokens, ignore_eos=True, **sampling)]
            for llm in (plain, drafting)
        )
        same = sum(a == b for a, b in zip(one, other, strict=True))
        outcome.compare(f"{what} answers of {max_tokens} tokens with drafts as without", same, len(prompts))
    counts = drafting.stats().spec_decoding
    print(f"n-gram drafts: acceptance length {counts.acceptance_length:.2f}", flush=True)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=100, help="%(default)s")
    parser.add_argument("--max-tokens", type=int, default=128, help="of each answer (%(default)s)")
    args = parser.parse_args()
    try:
        directory = find_model("smollm2", "target_model")
    except CheckpointError as error:
        print(f"skipped: {error}")
        return 0
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_cache_gb": 1}
    plain = LLM(target="smollm2", draft="", **settings)
    outcome = Outcome([], [])
    reference, prompts = Reference(directory), chat_prompts(plain, args.prompts)
    compare_texts(plain, reference, outcome)
    compare_greedy(plain, reference, prompts, args.max_tokens, outcome)
    compare_drafts(plain, LLM(target="smollm2", draft=NGRAM, **settings), prompts, args.max_tokens, outcome)
    print("\n".join(outcome.misses) or "nothing is missed")
    return int(bool(outcome.misses))


if __name__ == "__main__":
    sys.exit(main())
