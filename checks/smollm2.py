"""SmolLM2-135M-Instruct, which `make smollm2` installs, beside `transformers`' own loader of the same GGUF, in float32.

`python -m checks.smollm2` compares weights bit by bit, token ids, chat prompts, log-probabilities of texts (of each
token and the 20 most likely), the perplexity that `eval --text LICENSE` shows, greedy answers, which may part where the
two best scores are within 1e-4, and greedy and sampled answers with n-gram drafts and without. `--only` runs some of
it. The exit status is 1 when any differs or the model cannot be read, and 77 without the package.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.progress import progress
from checks.exit_status import SKIPPED
from dflash_backend import LLM
from dflash_backend.checkpoints import CheckpointError, find_model
from dflash_backend.checkpoints.files import read_headers
from dflash_backend.checkpoints.named import NAMED, named_file
from dflash_backend.checkpoints.weights import load_weights
from dflash_backend.config import NGRAM
from dflash_backend.evaluation.engine import TEXT_PIECE, perplexity

QUESTIONS = Path(__file__).with_name("questions.jsonl")
TEXT = Path(__file__).parents[1] / "LICENSE"
TIE = 1e-4
MOST_LIKELY = 20
PARTS = ("tokens", "scores", "greedy", "drafts")
TEXTS = (
    "The lighthouse keeper wrote the date in his book, lit the lamp, and watched the fog roll in from the west.",
    "def area(radius):\n    # of a circle\n    return 3.14159 * radius ** 2\n",
    "Naïve café owners in Zürich paid 1,234.50 francs for 3 machines. They'll arrive on Friday, won't they?",
    "Water freezes at 0 degrees Celsius and boils at 100 degrees at sea level; salt lowers the first.",
)
# What tokenizers read differently: runs of spaces, other scripts, marks, and special tokens within a text.
ODD_TEXTS = (
    "  two  spaces,\ttabs\n\n\nand lines \r\n",
    "1234567890 3.14 1,000,000 x^2",
    "e\u0301 \u00e9 \u4f60\u597d \u041f\u0440\u0438\u0432\u0435\u0442 \U0001f600\u200d\U0001f4bb",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "I'LL we're DON'T it's",
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
    """The same file in `transformers`."""

    def __init__(self, file: Path) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        source: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
        self.tokenizer = AutoTokenizer.from_pretrained(**source)
        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(**source), dtype=torch.float32).eval()
        # What `from_pretrained` calls, which has the package accelerate besides.
        read = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=self.model)
        self.tensors: dict[str, torch.Tensor] = read["tensors"]
        missing, unexpected = self.model.load_state_dict(self.tensors, strict=False)
        self.model.tie_weights()
        if unexpected or set(missing) - {"lm_head.weight"}:
            raise ValueError(f"transformers read other tensors: {missing} are missing, {unexpected} unknown")

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


def compare_tokens(llm: Any, reference: Any, directory: Path, outcome: Outcome) -> None:
    """Weights, token ids, and conversations as the chat template renders them."""
    headers = read_headers(directory)
    ours = load_weights(
        directory,
        lambda source: {name: source.tensor(name, *header.shape) for name, header in headers.items()},
        torch.float32,
        torch.device("cpu"),
    )
    same = sum(name in ours and torch.equal(ours[name], tensor) for name, tensor in reference.tensors.items())
    outcome.compare("tensors of the file with the bits of transformers", same, max(len(ours), len(reference.tensors)))
    texts = [*TEXTS, *ODD_TEXTS, *read_questions()]
    same = sum(llm.tokenizer.encode(text) == reference.tokenizer(text)["input_ids"] for text in texts)
    outcome.compare("texts with the token ids of transformers", same, len(texts))
    chats = [[{"role": "user", "content": text}] for text in texts]
    chats += [[{"role": "system", "content": "Be brief."}, *chat] for chat in chats]
    chats += [[*chat, {"role": "assistant", "content": "Yes."}, *chats[0]] for chat in chats]
    same = 0
    for chat in chats:
        expected = reference.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        same += llm.tokenizer.render_chat(chat).text == expected
    outcome.compare("chat prompts as those of transformers", same, len(chats))


def compare_scores(llm: Any, reference: Any, prompts: list[list[int]], outcome: Outcome) -> None:
    """Log-probabilities of each token of the texts and of those most likely there."""
    largest, count = 0.0, 0
    for ids in [*(llm.tokenizer.encode(text) for text in TEXTS), *prompts]:
        (output,) = llm.generate([ids], max_tokens=1, temperature=0, prompt_logprobs=MOST_LIKELY)
        expected = reference.scores(ids)
        for at, entry in enumerate(output.prompt_logprobs[1:]):
            ours, theirs = torch.tensor(entry.logprobs), expected[at, entry.token_ids]
            largest = max(largest, float((ours - theirs).abs().max()))
            count += 1
    more = f" (largest distance {largest:.1e})"
    outcome.compare(f"log-probabilities after {count} tokens within {TIE:g}", int(largest <= TIE), 1, more)


def compare_perplexity(llm: Any, reference: Any, text: str, outcome: Outcome) -> None:
    """The perplexity of a text, read in pieces as `eval` does."""
    ours, _ = perplexity(llm, text)
    ids, leading, scores = llm.tokenizer.encode_part(text), list(llm.tokenizer.leading_ids), []
    size = TEXT_PIECE - len(leading)
    for first in range(0, len(ids), size):
        piece = [*leading, *ids[first : first + size]]
        found = reference.scores(piece)[torch.arange(len(piece) - 1), piece[1:]].tolist()
        scores += found[max(0, len(leading) - 1) :]
    theirs = math.exp(-math.fsum(scores) / len(scores))
    more = f" ({ours:.5f} and {theirs:.5f})"
    outcome.compare(
        f"perplexity of {len(ids)} tokens within {TIE:g} of its size", abs(ours / theirs - 1) <= TIE, 1, more
    )


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
    parser.add_argument("--first", type=int, default=0, help="the first of them, to go on from there (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, help="of each answer (%(default)s)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="some parts (all)")
    args = parser.parse_args()
    try:
        directory, file = find_model("smollm2", "target_model"), named_file("smollm2")
    except CheckpointError as error:
        installed = find_spec(NAMED["smollm2"].package) is not None
        print(f"{'failed' if installed else 'skipped'}: {error}")
        return 1 if installed else SKIPPED
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_cache_gb": 1}
    plain = LLM(target="smollm2", draft="", **settings)
    outcome, prompts = Outcome([], []), chat_prompts(plain, args.prompts)[args.first :]
    reference = None if set(args.only) == {"drafts"} else Reference(file)
    if "tokens" in args.only:
        compare_tokens(plain, reference, directory, outcome)
    if "scores" in args.only:
        compare_scores(plain, reference, prompts, outcome)
        compare_perplexity(plain, reference, TEXT.read_text(encoding="utf-8"), outcome)
    if "greedy" in args.only:
        compare_greedy(plain, reference, prompts, args.max_tokens, outcome)
    if "drafts" in args.only:
        compare_drafts(plain, LLM(target="smollm2", draft=NGRAM, **settings), prompts, args.max_tokens, outcome)
    print("\n".join(outcome.misses) or "nothing is missed")
    return int(bool(outcome.misses))


if __name__ == "__main__":
    sys.exit(main())
