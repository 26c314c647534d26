"""The target's tokenizer: text and chat messages to token ids, and back."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer as FastTokenizer

from dflash_backend.checkpoints import CheckpointError
from dflash_backend.checkpoints.decoder_fields import read_eos
from dflash_backend.checkpoints.files import check_files
from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.error_text import first_line
from dflash_backend.heap import give_back_memory
from dflash_backend.text.chat import (
    ChatText,
    PromptError,
    SpecialTokens,
    TemplateRefusal,
    check_continued,
    check_role,
    join_parts,
    refuse_media,
    with_reasoning_names,
)
from dflash_backend.text.time_limit import OutOfTime, time_limit
from dflash_backend.text.tools import ToolError, has_unread_arguments, with_parsed_arguments

VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
NEEDED = "tokenizer.json and tokenizer_config.json, and code of a checkpoint is not run"


# A template is a program that runs on a client's values: they may cause these errors besides its own.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    OutOfTime,
    RecursionError,
    TypeError,
    ValueError,
)
# Of the processor, for one rendering of the chat template. The longest conversations take a tenth of a second.
TEMPLATE_LIMIT_S = 10.0
# The largest power of a chat template. No time limit ends a single power, and that of a power may take any time.
MAX_POWER = 64
# Tags of transformers' own, around what an assistant has said.
_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
# Ends the program, and is no failure of a tokenizer.
_ENDINGS = (KeyboardInterrupt, SystemExit)
# A token that is a single byte, as SentencePiece writes it.
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# A text may have this many tokens fewer than its pieces, tokenised by themselves, for each border between them.
TOKENS_LOST_AT_A_BORDER = 256
# The argument that has the text of those that are no JSON object, for a template that takes objects alone.
UNREAD_ARGUMENTS = "arguments"
# A text that no template contains.
PROBE = "f3a9c1"
# Characters that a piece has for each token that is allowed. Most text has fewer than this for each of its tokens.
PIECE_CHARS_PER_TOKEN = 4

# Texts are tokenised one at a time; a pool of threads would only disturb the fork that starts the engine.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def parse_template(text: str) -> jinja2.nodes.Template:
    """A chat template as Jinja reads it. Raises `jinja2.TemplateSyntaxError`."""
    return jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", text))


def has_any_power(text: str) -> bool:
    """Whether a chat template computes a power of what is no number in its text, or a large one. False where it cannot
    be read: then its own error follows."""
    if "**" not in text:
        return False
    try:
        powers = list(parse_template(text).find_all(jinja2.nodes.Pow))
    except (jinja2.TemplateError, RecursionError):
        return False
    return not all(_is_number(power.left) and _is_number(power.right, MAX_POWER) for power in powers)


def _is_number(node: jinja2.nodes.Expr, most: float = math.inf) -> bool:
    return isinstance(node, jinja2.nodes.Const) and isinstance(node.value, int | float) and abs(node.value) <= most


class InputError(ValueError):
    """An input is malformed. The message is for the client."""


def tokenizer_json(directory: Path) -> str:
    """The tokenizer of a model directory in the form of a tokenizer.json: the file where there is one, since reading it
    costs a fraction of loading what transformers makes of the others. Raises `CheckpointError`."""
    path = directory / "tokenizer.json"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    return str(Tokenizer.load(directory)._fast.to_str())


def _bare_config(directory: Path) -> Any:
    """What `AutoTokenizer` reads of a model's config where the tokenizer's own names its class, else None. Left to
    itself it makes the config of the model's architecture, and so imports what transformers' models need: seconds, and
    120 MB where there is torch."""
    from transformers import PretrainedConfig

    path = directory / "config.json"
    if not (path.is_file() and (directory / "tokenizer_config.json").is_file()):
        return None
    tokenizer = JsonReader.load(directory / "tokenizer_config.json").data
    if "auto_map" in tokenizer or not isinstance(tokenizer.get("tokenizer_class"), str):
        return None
    config, fields = PretrainedConfig(), JsonReader.load(path).data
    config.name_or_path = str(directory)
    for name in ("model_type", "model_name", "tokenizer_class"):
        if isinstance(value := fields.get(name), str):
            setattr(config, name, value)
    return config


class Tokenizer:
    """A Hugging Face tokenizer with its chat template.

    Text goes to the Rust tokenizer directly: any thread may call it, since its methods take no lock and keep no state,
    and it costs a fraction of the Python layer. Truncation and padding are switched off at load.
    """

    def __init__(self, template: Any, eos_token_ids: tuple[int, ...], trust_messages: bool = False) -> None:
        """`template` is a `PreTrainedTokenizerFast`; `Tokenizer.load` is the usual way. With `trust_messages`, special
        tokens that a chat message spells out are special tokens; without, they are text."""
        self._template = template
        self._fast: FastTokenizer = template.backend_tokenizer
        self._fast.no_truncation()
        self._fast.no_padding()
        self.eos_token_ids = eos_token_ids
        # The most characters that one token stands for.
        self.max_token_chars = max(map(len, self._fast.get_vocab(with_added_tokens=True)), default=1)
        added = self._fast.get_added_tokens_decoder()
        special = [token.content for token in added.values() if token.special and not trust_messages]
        self._special = SpecialTokens(special)
        self._added_token_ids = frozenset(added)
        self._token_bytes: dict[int, bytes | None] = {}

    @classmethod
    def load(cls, directory: Path, trust_messages: bool = False) -> Tokenizer:
        """Read the tokenizer of a model directory; code that lies in it is not run. Raises `CheckpointError` when there
        is none that can be used."""
        from transformers import AutoTokenizer

        check_files(directory)
        if not any((directory / name).is_file() for name in VOCABULARY_FILES):
            # transformers would make an empty tokenizer of the config's model type.
            raise CheckpointError(f"{directory}: there is no tokenizer in it; it needs {NEEDED}")
        try:
            template = AutoTokenizer.from_pretrained(
                str(directory), config=_bare_config(directory), local_files_only=True, trust_remote_code=False
            )
        except _ENDINGS:
            raise
        except BaseException as error:
            raise CheckpointError(
                f"{directory}: no tokenizer can be read from it ({first_line(error)}); it needs {NEEDED}"
            ) from error
        give_back_memory()
        if not getattr(template, "is_fast", False):
            raise CheckpointError(f"{directory}: the tokenizer has no fast version; it needs a tokenizer.json")
        own = () if template.eos_token_id is None else (template.eos_token_id,)
        return cls(template, tuple(dict.fromkeys((*read_eos(directory), *own))), trust_messages)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt, with the special tokens that the tokenizer puts around one unless they are left
        out."""
        return self._encode([text], add_special_tokens)

    def encode_part(self, text: str) -> list[int]:
        """Token ids of a text within a text: without special tokens around it."""
        return self._encode([text], add_special_tokens=False)

    @cached_property
    def leading_ids(self) -> tuple[int, ...]:
        """The special tokens that the tokenizer puts before a prompt, such as one that begins a text."""
        part, whole = self.encode_part(PROBE), self.encode(PROBE)
        starts = (at for at in range(len(whole) - len(part) + 1) if whole[at : at + len(part)] == part)
        return tuple(whole[: next(starts, 0)])

    def has_more_tokens(self, text: str, limit: int) -> bool:
        """Whether a text surely has more than `limit` tokens; False means that it may fit.

        The cost is about that of a prompt of `limit` tokens, however long the text is.
        """
        size = PIECE_CHARS_PER_TOKEN * limit + TOKENS_LOST_AT_A_BORDER
        if len(text) <= size:
            return False
        num_tokens = 0
        for start in range(0, len(text), size):
            num_tokens += len(self._encode([text[start : start + size]], add_special_tokens=False))
            num_tokens -= TOKENS_LOST_AT_A_BORDER
            if num_tokens > limit:
                return True
        return False

    def _encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[int]:
        """Token ids of several texts, concatenated. Only the batch method lets other threads run meanwhile. Raises
        `InputError` where the tokenizer fails: what a panic of Rust raises is no `Exception`."""
        try:
            encodings = self._fast.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except _ENDINGS:
            raise
        except BaseException as error:  # noqa: BLE001 - PanicException
            raise _failed("turn this text into tokens", error) from None
        return [token_id for encoding in encodings for token_id in encoding.ids]

    @property
    def chat_template(self) -> str:
        """The source of the chat template, of the one for tools where there are several; empty where there is none."""
        template = self._template.chat_template
        if isinstance(template, Mapping):
            template = template.get("tool_use") or template.get("default")
        return template or ""

    def use_chat_template(self, chat_template: str) -> None:
        """Take a template in place of the tokenizer's own. Before the first chat."""
        self._template.chat_template = chat_template

    @property
    def special_token_ids(self) -> dict[str, int]:
        """The ids of the tokens that `decode` leaves out, by their texts."""
        added = self._fast.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special}

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        **options: Any,
    ) -> ChatText:
        """The text of `messages` through the chat template, up to the beginning of the assistant's answer; with
        `continue_final_message` up to the end of the last message's text, which then is that beginning; without
        `add_generation_prompt` up to the end of the last message.

        `chat_template` takes the place of the tokenizer's own; parts of content are text for it.
        `tools` are functions as OpenAI's API describes them. `options` are variables of the template, such as
        `enable_thinking`; one that it does not use has no effect. Raises `PromptError` when there is no template or it
        refuses the messages, for tools where it takes none, and for a last message that cannot be continued.
        """
        template = self.chat_template if chat_template is None else chat_template
        if not template:
            raise PromptError(
                "the target's tokenizer has no chat template; send text_input instead of messages, to the OpenAI API a "
                "prompt; or give the OpenAI front end a template (--chat-template)"
            )
        for index, message in enumerate(messages):
            check_role(message.get("role"), f"message {index}")
        if continue_final_message:
            check_continued(messages)
        takes_parts = chat_template is None and self._takes_parts
        if any(isinstance(message.get("content"), list) for message in messages):
            if takes_parts:
                refuse_media(messages)
            else:
                messages = [join_parts(message) for message in messages]
        if tools and "tools" not in template:
            raise PromptError("the chat template of this model takes no tools; leave them out")
        end = {"add_generation_prompt": add_generation_prompt}
        if continue_final_message:
            end = {"continue_final_message": True}
        variables = {**options, "tools": list(tools) if tools else None}
        try:
            parsed = with_parsed_arguments(messages)
            try:
                return self._rendered(parsed, variables, chat_template, end)
            except _TEMPLATE_ERRORS as error:
                if isinstance(error, OutOfTime) or not has_unread_arguments(parsed):
                    raise
            # Such as a template that writes each argument by itself.
            parsed = with_parsed_arguments(messages, UNREAD_ARGUMENTS)
            return self._rendered(parsed, variables, chat_template, end)
        except ToolError as error:
            raise PromptError(str(error)) from None
        except PromptError:
            raise
        except _TEMPLATE_ERRORS as error:
            kind = PromptError if isinstance(error, OutOfTime) else TemplateRefusal
            raise kind(f"the chat template refuses these messages: {first_line(error)}") from error

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        chat_template: str | None,
        end: Mapping[str, bool],
    ) -> ChatText:
        """The text that a chat template makes of messages. Raises what the template raises, and `PromptError`."""
        given = ([with_reasoning_names(message) for message in messages], variables)
        (marked, values), mark = self._special.marked(given)
        text = self._apply(marked, chat_template=chat_template, **end, **values)
        return ChatText((text,) if mark is None else tuple(text.split(mark)))

    def _apply(self, messages: Any, **options: Any) -> str:
        """What transformers makes of messages, as long as the time suffices. Raises what the template raises."""
        given = options.get("chat_template") or self._template.chat_template
        with time_limit(TEMPLATE_LIMIT_S):
            if any(map(has_any_power, given.values() if isinstance(given, Mapping) else [given])):
                raise jinja2.TemplateError(
                    "it computes a power, which may take any time; allowed: that of two numbers in its text, with an "
                    f"exponent up to {MAX_POWER}"
                )
            return str(self._template.apply_chat_template(messages, tokenize=False, **options))

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the chat template reads content that is a list of parts, as of OpenAI's API; others print the list or
        fail."""
        parts = [{"type": "text", "text": PROBE}]
        try:
            text = self._apply([{"role": "user", "content": parts}])
        except _TEMPLATE_ERRORS:
            return False
        return PROBE in text and f"'{PROBE}'" not in text and f'"{PROBE}"' not in text

    def encode_chat(self, chat: ChatText) -> list[int]:
        """Token ids of a rendered chat, which has its special tokens already."""
        return self._encode(chat.pieces, add_special_tokens=False)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of `messages` through the chat template, with `options` as in `render_chat`, tools among them.
        Raises `PromptError`."""
        return self.encode_chat(self.render_chat(messages, **options))

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """What the vocabulary calls each token; empty for an id without one."""
        return [self._fast.id_to_token(token_id) or "" for token_id in token_ids]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; bytes that are no UTF-8 become U+FFFD, ids without a token nothing.

        White space is kept as it is: the clean-up that some old tokenizers ask for would make the text of a part
        depend on what follows it, and could not be streamed. Raises `InputError` where the tokenizer fails.
        """
        try:
            return str(self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens))
        except _ENDINGS:
            raise
        except BaseException as error:  # noqa: BLE001 - PanicException, as of `_encode`
            raise _failed("turn these tokens into text", error) from None

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes that a token stands for within a text, which need not be whole characters; None for special and
        other added tokens, and for an id without a token."""
        if token_id not in self._token_bytes:
            self._token_bytes[token_id] = self._read_bytes(token_id)
        return self._token_bytes[token_id]

    def _read_bytes(self, token_id: int) -> bytes | None:
        piece = self._fast.id_to_token(token_id)
        if piece is None or token_id in self._added_token_ids:
            return None
        kinds = self._decoder_kinds
        if "ByteLevel" in kinds:
            bytes_ = [_BYTE_OF_LETTER.get(letter) for letter in piece]
            return piece.encode() if None in bytes_ else bytes(byte for byte in bytes_ if byte is not None)
        if "ByteFallback" in kinds and (found := _BYTE_TOKEN.fullmatch(piece)):
            return bytes([int(found[1], 16)])
        # After itself: a decoder may take the first space of a text away.
        return self.decode([token_id, token_id], False)[len(self.decode([token_id], False)) :].encode()

    @cached_property
    def _decoder_kinds(self) -> frozenset[str]:
        """The parts of the tokenizer's decoder, by their types."""
        decoder = self._fast.decoder
        given = {} if decoder is None else json.loads(decoder.__getstate__())
        return frozenset(part.get("type", "") for part in (given, *given.get("decoders", ())))


def _failed(what: str, error: BaseException) -> InputError:
    """What a client is told of a failure of the tokenizer: no more than that, since its words name files."""
    return InputError(f"the tokenizer cannot {what}: it failed with {type(error).__name__}; send another text")


def _byte_of_letter() -> dict[str, int]:
    """The byte that each letter of byte-level BPE stands for: its own where it is printable, else from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return {chr(byte) if byte in printable else chr(next(others)): byte for byte in range(256)}


_BYTE_OF_LETTER = _byte_of_letter()
