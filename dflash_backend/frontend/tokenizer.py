"""The target's tokenizer: text and chat messages to token ids, and back. Used by the frontend and by `LLM`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer as FastTokenizer

from dflash_backend.checkpoints.decoder_fields import read_eos
from dflash_backend.checkpoints.errors import CheckpointError


class PromptError(ValueError):
    """A prompt cannot be turned into token ids. The message is for the client."""


class Tokenizer:
    """A Hugging Face tokenizer with its chat template.

    Text goes through the Rust tokenizer directly: its methods take no lock and keep no state, so any thread may call
    them, and they cost a fraction of the Python layer's. Truncation and padding are switched off once at load.
    """

    def __init__(self, template: Any, eos_token_ids: tuple[int, ...]) -> None:
        """`template` is a `PreTrainedTokenizerFast`; `Tokenizer.load` is the usual way."""
        self._template = template
        self._fast: FastTokenizer = template.backend_tokenizer
        self._fast.no_truncation()
        self._fast.no_padding()
        self.eos_token_ids = eos_token_ids

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Read the tokenizer of a model directory. Raises `CheckpointError` when there is none that can be used."""
        from transformers import AutoTokenizer

        try:
            template = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError, ImportError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise CheckpointError(
                f"{directory}: no tokenizer can be read from it ({reason}); it needs tokenizer.json and "
                "tokenizer_config.json"
            ) from error
        if not getattr(template, "is_fast", False):
            raise CheckpointError(f"{directory}: the tokenizer has no fast version; it needs a tokenizer.json")
        own = () if template.eos_token_id is None else (template.eos_token_id,)
        return cls(template, tuple(dict.fromkeys((*read_eos(directory), *own))))

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the special tokens that the tokenizer puts around one."""
        return list(self._fast.encode(text).ids)

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text that the chat template makes of `messages`, up to where the assistant's answer begins.

        Raises `PromptError` when there is no template or it refuses the messages.
        """
        if not self._template.chat_template:
            raise PromptError("the target's tokenizer has no chat template; send text_input instead of messages")
        try:
            return str(
                self._template.apply_chat_template(
                    [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
                )
            )
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            raise PromptError(f"the chat template refuses these messages: {error}") from error

    def encode_chat(self, text: str) -> list[int]:
        """Token ids of a text that `render_chat` made, which has its special tokens already."""
        return list(self._fast.encode(text, add_special_tokens=False).ids)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of `messages` through the chat template. Raises `PromptError`."""
        return self.encode_chat(self.render_chat(messages))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; bytes that are no UTF-8 become U+FFFD, ids without a token nothing.

        White space is kept as it is: the clean-up that some old tokenizers ask for would make the text of a part
        depend on what follows it, and could not be streamed.
        """
        return str(self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens))
