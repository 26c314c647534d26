"""A tokenizer of Llama 2's kind, made on the spot: `▁` is a space, bytes stand in for what has no piece, and the
decoder takes the first space of a text away."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = ("▁Hello", "▁world", ",", "▁", "a", "▁▁", "東", "o")
PIECES = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS)
ID = {piece: token_id for token_id, piece in enumerate(PIECES)}


def byte_ids(text: str) -> list[int]:
    """The tokens of a text's bytes."""
    return [ID[f"<0x{byte:02X}>"] for byte in text.encode()]


def write_sentencepiece_tokenizer(directory: Path) -> None:
    """Write the tokenizer's files."""
    fast = FastTokenizer(models.BPE(vocab=dict(ID), merges=[], byte_fallback=True, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=fast, bos_token="<s>", eos_token="</s>", unk_token="<unk>", clean_up_tokenization_spaces=False
    )
    wrapped.save_pretrained(str(directory))
