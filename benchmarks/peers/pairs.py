"""The models that are compared, and what they are asked: the same token ids for every system.

Prefix caches are off in all, so no system has a part of a prompt already. Answers have a fixed length: the end of a
text is ignored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random

from safetensors.torch import load_file, save_file

from dflash_backend.config import asset_path
from dflash_backend.text.tokenizer import Tokenizer
from load_tests.prompts import load_prompts, passage

SHORT, LONG = "short", "long"
LONG_TOKENS = 1500
# Speculation is none, or by one of these.
NONE, NGRAM, DFLASH = "none", "ngram", "dflash"
PAIRS = ("demo", "smollm2")
MAX_MODEL_LEN = 2048

TOPICS = (
    "why the sky is blue",
    "how bread is baked",
    "what a compiler does",
    "how vaccines work",
    "why leaves change colour",
    "how to plan a garden",
    "what inflation is",
    "how a bicycle stays upright",
    "why we sleep",
    "how rivers shape valleys",
    "what makes a good story",
    "how to learn a language",
    "why metals conduct heat",
    "how bees make honey",
    "what a database index is",
    "how tides come about",
)
STYLES = ("Explain to a child", "Describe in detail", "Write a short essay on", "List ten facts about")
TOWNS = ("Lisbon", "Oslo", "Kyoto", "Lima", "Accra", "Perth", "Quebec", "Tallinn")
PEOPLE = ("Anna", "Bruno", "Carla", "David", "Elena", "Farid", "Greta", "Hugo")
EVENTS = (
    "opened a small shop near the harbour and sold {n} baskets of fruit in the first week",
    "wrote a letter of {n} pages about the old bridge and the people who had built it",
    "counted {n} birds on the way to the library, and noted the colour of each",
    "repaired {n} clocks for the neighbours, who paid with bread, cheese and stories",
    "walked {n} kilometres along the river to see whether the ice had melted",
)


@dataclass(frozen=True)
class Pair:
    """A target, and its drafter where it has one. original: the GGUF that the target was converted from."""

    name: str
    target: Path
    drafter: Path | None
    dtype: str
    num_speculative_tokens: int
    original: Path | None = None


def whole_vocabulary(drafter: Path, folder: Path) -> Path:
    """A drafter for engines that take the target's whole LM head: its copy in `folder` without the map of a draft
    vocabulary that has no head of its own; itself where there is none."""
    file = drafter / "model.safetensors"
    tensors = load_file(file) if file.is_file() else {}
    if "d2t" not in tensors or "lm_head.weight" in tensors:
        return drafter
    config = json.loads((drafter / "config.json").read_text(encoding="utf-8"))
    copy = folder / f"{drafter.name}-whole-vocabulary"
    copy.mkdir(parents=True, exist_ok=True)
    fields = {name: value for name, value in config.items() if name != "draft_vocab_size"}
    (copy / "config.json").write_text(json.dumps(fields, indent=2), encoding="utf-8")
    kept = {name: tensor for name, tensor in tensors.items() if name != "d2t"}
    save_file(kept, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def find_pair(name: str, drafter: str = "") -> Pair:
    """The pair of this name, with another drafter where one is given. Raises `CheckpointError` for a package that is
    not installed."""
    if name == "demo":
        folder = asset_path("demo", "pair")
        return Pair(name, folder / "target", Path(drafter or folder / "draft").absolute(), "float32", 15)
    from dflash_backend.checkpoints.gguf.convert import converted
    from dflash_backend.checkpoints.named import named_file
    from dflash_backend.drafters.resolve import find_drafter

    file, own = named_file(name), Path(drafter).absolute() if drafter else find_drafter(name, "--drafter")
    config = json.loads((own / "config.json").read_text(encoding="utf-8"))
    return Pair(name, converted(file, plain=True), own, "bfloat16", config.get("block_size", 16) - 1, file)


def prompts(pair: Pair, kind: str, count: int) -> list[list[int]]:
    """`count` different prompts of this kind. Those that are long have `LONG_TOKENS` tokens each."""
    tokenizer = Tokenizer.load(pair.target)
    texts = _demo_texts(kind, count) if pair.name == "demo" else _english_texts(kind, count, tokenizer)
    ids = [tokenizer.encode(text) for text in texts]
    if kind == SHORT:
        return ids
    # Cut in the middle: the beginning differs, the end asks.
    half = LONG_TOKENS // 2
    return [one[:half] + one[len(one) - (LONG_TOKENS - half) :] for one in ids]


def _demo_texts(kind: str, count: int) -> list[str]:
    rows = load_prompts(count)
    if kind == SHORT:
        return [row.prompt for row in rows]
    return [passage(LONG_TOKENS + 100, Random(i)) + row.prompt for i, row in enumerate(rows)]


def _english_texts(kind: str, count: int, tokenizer: Tokenizer) -> list[str]:
    texts = []
    for i in range(count):
        topic, style = TOPICS[i % len(TOPICS)], STYLES[i // len(TOPICS) % len(STYLES)]
        question = f"{style} {topic}."
        if kind == LONG:
            question = f"{_report(Random(i))}\n\nSum up the text above, sentence by sentence."
        texts.append(tokenizer.render_chat([{"role": "user", "content": question}]).text)
    return texts


def _report(rng: Random) -> str:
    """Some 1,700 tokens of plain sentences."""
    lines = [f"Report number {rng.randrange(10**6)}."]
    lines += [
        f"In {rng.choice(TOWNS)}, {rng.choice(PEOPLE)} {rng.choice(EVENTS).format(n=rng.randrange(3, 99))}."
        for _ in range(90)
    ]
    return " ".join(lines)
