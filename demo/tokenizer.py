"""Train the demo tokenizer: byte-level BPE, 1,536 ids, digits one by one, no normaliser.

Every UTF-8 text survives an encode and decode unchanged.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from demo.chat_template import CHAT_TEMPLATE
from demo.data import END_OF_TEXT, IM_END, IM_START, MASK, SPECIAL_TOKEN_IDS, training_documents
from demo.prose import long_system_prompt

VOCAB_SIZE = 1536
MAX_LENGTH = 4096
WORDS = r" ?\p{L}+| ?[^\s\p{L}\p{N}]+|\p{N}|\s+(?!\S)|\s+"
"""Pieces that merges stay inside: a word, a run of punctuation, one digit, white space."""
SPECIAL = re.compile("|".join(map(re.escape, SPECIAL_TOKEN_IDS)))


def _corpus(seed: int, documents: int) -> Iterator[str]:
    rng = Random(f"tokenizer/{seed}")
    for segments in islice(training_documents(seed), documents):
        for segment in segments:
            yield from SPECIAL.split(segment.text)
        if rng.random() < 0.01:
            yield long_system_prompt(rng)


def train_tokenizer(folder: Path, seed: int = 0, documents: int = 12_000) -> PreTrainedTokenizerFast:
    """Learn the merges from generated documents and save the tokenizer in the Hugging Face format."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKEN_IDS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(seed, documents), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_tokenizer_config(folder)
    return load_tokenizer(folder)


def extend_tokenizer(folder: Path, seed: int = 0, documents: int = 6_000) -> None:
    """Add merges to the tokenizer in `folder` until it has `VOCAB_SIZE` ids; its own ids and merges stay.

    New merges come last, so that text without the new pieces is tokenized as before.
    """
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    if tokenizer.get_vocab_size() >= VOCAB_SIZE:
        return
    counts: Counter[str] = Counter()
    for text in _corpus(seed, documents):
        counts.update(piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text))
    pieces = {piece: [token.value for token in tokenizer.model.tokenize(piece)] for piece in counts}
    fields = json.loads(path.read_text(encoding="utf-8"))
    vocabulary, merges = fields["model"]["vocab"], fields["model"]["merges"]
    while len(vocabulary) < VOCAB_SIZE:
        pairs: Counter[tuple[str, str]] = Counter()
        for piece, tokens in pieces.items():
            for pair in pairwise(tokens):
                pairs[pair] += counts[piece]
        most = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(list(most))
        vocabulary.setdefault("".join(most), len(vocabulary))
        pieces = {piece: _merged(tokens, most) for piece, tokens in pieces.items()}
    path.write_text(json.dumps(fields, indent=2, ensure_ascii=False), encoding="utf-8")


def merged_ids(folder: Path) -> dict[int, tuple[int, int]]:
    """For each id that a merge makes, the two ids that it joins, in the order of the merges."""
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    vocabulary = model["vocab"]
    return {vocabulary[a + b]: (vocabulary[a], vocabulary[b]) for a, b in model["merges"]}


def _merged(tokens: list[str], pair: tuple[str, str]) -> list[str]:
    """`tokens` with every occurrence of the pair as one token."""
    merged: list[str] = []
    for token in tokens:
        if merged and (merged[-1], token) == pair:
            merged[-1] += token
        else:
            merged.append(token)
    return merged


def write_tokenizer_config(folder: Path) -> None:
    """Write `tokenizer_config.json` with the special tokens and the chat template.

    Not by `save_pretrained`, whose classes and fields differ between transformers 4 and 5; this one loads under both.
    """
    fields = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [IM_START, MASK],
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LENGTH,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The saved tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise TypeError(f"{folder} holds a {type(tokenizer).__name__}, not a fast tokenizer")
    return tokenizer
