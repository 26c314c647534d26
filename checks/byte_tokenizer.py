"""A byte-level tokenizer in Hugging Face format, made on the spot: ids 0 to 255 are bytes, then a few special ones."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

EOS, START = 256, 257
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}{% endfor %}{% if add_generation_prompt %}<s>a:{% endif %}"
)


def write_byte_tokenizer(directory: Path, chat: bool = True) -> None:
    """Write tokenizer files whose id i below 256 is the byte i."""
    alphabet = _byte_letters()
    fast = FastTokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(alphabet)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="</s>", additional_special_tokens=["<s>"])
    if chat:
        wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(str(directory))


def _byte_letters() -> list[str]:
    """The letter that byte-level BPE writes for each byte: itself where it is printable, else one from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
