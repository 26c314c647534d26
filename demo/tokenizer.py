"""Train the demo tokenizer: byte-level BPE, 1,024 ids, digits one by one, no normaliser.

Every UTF-8 text survives an encode and decode unchanged.
"""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from demo.chat_template import CHAT_TEMPLATE
from demo.data import END_OF_TEXT, IM_END, IM_START, MASK, SPECIAL_TOKEN_IDS, training_documents
from demo.prose import long_system_prompt

VOCAB_SIZE = 1024
MAX_LENGTH = 4096
WORDS = r" ?\p{L}+| ?[^\s\p{L}\p{N}]+|\p{N}|\s+(?!\S)|\s+"
"""Pieces that merges stay inside: a word, a run of punctuation, one digit, white space."""


def _corpus(seed: int, documents: int) -> Iterator[str]:
    rng = Random(f"tokenizer/{seed}")
    for segments in islice(training_documents(seed), documents):
        for segment in segments:
            yield segment.text
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
