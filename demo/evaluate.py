"""Offline reference for the demo pair: a dense, batch-1, float32 DFlash loop around the transformers target.

Prints greedy math accuracy and acceptance length by category and position. It shares no code with the serving
engine, so that the two can be held against each other.

    python -m demo.evaluate [--pair demo/pair] [--limit 50] [--shift-layer-ids -1] [--long-prefix]
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from demo.checkpoint import load_draft, read_draft_config
from demo.data import CATEGORIES, render_chat
from demo.propose import propose
from demo.prose import document
from dflash_backend.training.network import DraftModel, Tables

HERE = Path(__file__).parent


@dataclass
class Acceptance:
    """Counts over draft steps: `survived[i]` is the number of steps that accepted draft token i + 1."""

    steps: int = 0
    accepted: int = 0
    survived: Counter[int] = field(default_factory=Counter)

    def add(self, accepted: int) -> None:
        """Count one step that accepted this many draft tokens."""
        self.steps += 1
        self.accepted += accepted
        self.survived.update(range(accepted))

    def merge(self, other: "Acceptance") -> None:
        """Add the counts of another set of steps."""
        self.steps += other.steps
        self.accepted += other.accepted
        self.survived.update(other.survived)

    @property
    def length(self) -> float:
        """Mean tokens that a step yields: 1 + accepted / drafts."""
        return 1 + self.accepted / max(self.steps, 1)


class ReferencePair:
    """The target under `pair/target` with the drafter under `pair/draft`, in float32 on the CPU."""

    def __init__(self, pair: Path, shift_layer_ids: int = 0) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(str(pair / "target"))
        self.target = AutoModelForCausalLM.from_pretrained(str(pair / "target"), dtype=torch.float32)
        self.config = read_draft_config(pair / "draft")
        self.draft: DraftModel = load_draft(pair / "draft", self.config)
        self.outputs: dict[int, Tensor] = {}
        self.layer_ids = [i + shift_layer_ids for i in self.config.target_layer_ids]
        for layer_id in self.layer_ids:
            self.target.model.layers[layer_id].register_forward_hook(self._keep(layer_id))

    def _keep(self, layer_id: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            self.outputs[layer_id] = output[0] if isinstance(output, tuple) else output

        return hook

    def _run_target(self, tokens: Tensor, cache: DynamicCache) -> tuple[Tensor, Tensor]:
        """Greedy next tokens [length] and features [1, length, layers * hidden] after tokens [1, length]."""
        logits = self.target(tokens, past_key_values=cache, use_cache=True).logits
        return logits[0].argmax(-1), torch.cat([self.outputs[i] for i in self.layer_ids], dim=-1)

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], max_new_tokens: int = 200) -> tuple[list[int], Acceptance]:
        """Greedy tokens up to and including end of sequence, and the draft steps that made them."""
        acceptance = Acceptance()
        cache, embedding = DynamicCache(), self.target.model.embed_tokens.weight
        tables = Tables(embedding, embedding)
        greedy, features = self._run_target(torch.tensor([list(prompt)]), cache)
        out = [int(greedy[-1])]
        end = self.tokenizer.eos_token_id
        while out[-1] != end and len(out) < max_new_tokens:
            drafts = propose(self.draft, tables, features, [*prompt, *out])
            greedy, new_features = self._run_target(torch.tensor([[out[-1], *drafts]]), cache)
            accepted, new_tokens = verify(drafts, greedy.tolist(), end)
            acceptance.add(accepted)
            out += new_tokens
            features = torch.cat((features, new_features[:, : accepted + 1]), dim=1)
            if rejected := len(drafts) - accepted:
                cache.crop(-rejected)
        return out, acceptance


def verify(drafts: Sequence[int], greedy: Sequence[int], end: int) -> tuple[int, list[int]]:
    """How many drafts are accepted and which tokens the step yields; nothing counts after the end token.

    greedy[i] is the target's token after the anchor and drafts[:i], one more than there are drafts.
    """
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == greedy[accepted] != end:
        accepted += 1
    ends_with_draft = accepted < len(drafts) and drafts[accepted] == greedy[accepted] == end
    return accepted + ends_with_draft, list(greedy[: accepted + 1])


def read_rows(category: str, limit: int | None) -> list[dict[str, Any]]:
    """Held-out rows of one category."""
    lines = (HERE / "held_out" / f"{category}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[:limit]]


def stated_answer(text: str) -> str:
    """What follows the last `Answer:` of a worked solution."""
    return text.rpartition("Answer:")[2].strip()


def long_prefix() -> str:
    """A system message with a handbook that no training document holds, as the chat template renders it."""
    return render_chat([{"role": "system", "content": document(Random("evaluate"), 74)}])


def evaluate(pair: ReferencePair, limit: int | None, prefix: str = "") -> dict[str, Any]:
    """Run the held-out prompts; `prefix` is put before each, as a shared system message would be."""
    result: dict[str, Any] = {"categories": {}}
    total = Acceptance()
    for category in CATEGORIES:
        rows, acceptance, right, exact = read_rows(category, limit), Acceptance(), 0, 0
        for row in rows:
            tokens, steps = pair.generate(pair.tokenizer.encode(prefix + row["prompt"]))
            text = str(pair.tokenizer.decode(tokens, skip_special_tokens=True))
            acceptance.merge(steps)
            exact += text == row["reference"]
            right += row["answer"] is not None and stated_answer(text) == row["answer"]
        total.merge(acceptance)
        result["categories"][category] = {
            "rows": len(rows),
            "acceptance_length": acceptance.length,
            "equals_reference": exact / len(rows),
        }
        if category == "math":
            result["math_accuracy"] = right / len(rows)
    result["acceptance_length"] = total.length
    positions = range(pair.config.num_drafts)
    result["accepted_by_position"] = [total.survived[i] / max(total.steps, 1) for i in positions]
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the reference evaluation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pair", type=Path, default=HERE / "pair")
    parser.add_argument("--limit", type=int, default=None, help="rows of each category (default: all)")
    parser.add_argument("--shift-layer-ids", type=int, default=0, help="added to every drafter layer id")
    parser.add_argument("--long-prefix", action="store_true", help="put one handbook of about 1,500 tokens first")
    options = parser.parse_args(arguments)
    pair = ReferencePair(options.pair, options.shift_layer_ids)
    prefix = long_prefix() if options.long_prefix else ""
    if prefix:
        print(f"shared prefix      {len(pair.tokenizer.encode(prefix))} tokens")
    result = evaluate(pair, options.limit, prefix)
    print(f"math accuracy      {result['math_accuracy']:.1%}")
    print(f"acceptance length  {result['acceptance_length']:.2f}")
    for category, figures in result["categories"].items():
        print(
            f"  {category:<5} {figures['acceptance_length']:.2f}  ({figures['rows']} prompts, "
            f"{figures['equals_reference']:.1%} equal to the reference)"
        )
    shares = " ".join(f"{i}:{share:.2f}" for i, share in enumerate(result["accepted_by_position"], 1))
    print(f"accepted by position  {shares}")


if __name__ == "__main__":
    main()
