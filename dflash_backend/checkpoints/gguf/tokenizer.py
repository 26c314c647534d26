"""`tokenizer.json` and `tokenizer_config.json` of a GGUF's metadata.

Three kinds are read: byte-level BPE (`gpt2`), whose way to split a text has only a name in the file, SentencePiece's
BPE (`llama`), whose merges follow from the scores, and that with its merges in the file (`gemma4`). Special tokens are
those that the file calls control tokens; those that users defined are matched whole as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from dflash_backend.checkpoints.gguf.reader import GgufModel
from dflash_backend.checkpoints.json_reader import JsonReader
from dflash_backend.checkpoints.spec import CheckpointError
from dflash_backend.error_text import first_line, shown

# `tokenizer.ggml.token_type`.
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
ENDS = ("eos", "eot", "eom")
# Control tokens that end an answer, whatever the file says, as in llama.cpp.
END_TEXTS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<turn|>",
    "<|return|>",
    "<|call|>",
)
TEMPLATE = "tokenizer.chat_template"
# No vocabulary has a longer one, and to find a token's merges takes the square of its length.
MAX_TOKEN_CHARS = 512

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDING = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_ENDING}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_ENDING}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_ENDING}"
)
_GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_ENDING}"
)
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_ENDING}"
)


@dataclass(frozen=True)
class Split:
    """How a text is split before merges. pattern: None for GPT-2's own. digits: each digit apart before that. whole: a
    part that is a token is not merged piece by piece. bos: a prompt begins with the token for it where the file does
    not say. nfc: the text is normalised."""

    pattern: str | None = None
    digits: bool = False
    whole: bool = False
    bos: bool = False
    nfc: bool = False


_OF_LLAMA3, _OF_QWEN2, _OF_GPT2 = Split(_LLAMA3, whole=True, bos=True), Split(_QWEN2, nfc=True), Split()
# By `tokenizer.ggml.pre`.
SPLITS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _OF_LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _OF_QWEN2),
    "qwen35": Split(_QWEN35, nfc=True),
    "gpt-4o": Split(_GPT_4O, whole=True),
    "tekken": Split(_TEKKEN, whole=True, bos=True),
    "smollm": Split(digits=True),
    "gpt-2": _OF_GPT2,
}
MISSING_SPLIT = "gpt-2"


@dataclass(frozen=True)
class GgufTokenizer:
    """tokenizer: as `tokenizer.json` holds it. config: `tokenizer_config.json`. ends: the ids that end an answer.
    notes: what the file leaves open, and how it was read."""

    tokenizer: Tokenizer
    config: dict[str, Any]
    ends: tuple[int, ...]
    notes: tuple[str, ...]


def read_tokenizer(model: GgufModel, vocab_size: int) -> GgufTokenizer:
    """The tokenizer of a file whose embedding has `vocab_size` rows. Raises `CheckpointError`."""
    fields = JsonReader(
        {name.removeprefix("tokenizer.ggml."): value for name, value in model.metadata.items()},
        f"{model.path}: tokenizer.ggml",
    )
    tokens = fields.strings("tokens")
    types = fields.integers("token_type") or (NORMAL,) * len(tokens)
    if not 0 < len(tokens) <= vocab_size or len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise CheckpointError(
            f"{fields.where}: there are {len(tokens)} tokens, {len(set(tokens))} of them different, and {len(types)} "
            f"types; expected as many of each, and at most the {vocab_size} rows of the embedding"
        )
    longest = max(map(len, tokens))
    if longest > MAX_TOKEN_CHARS:
        raise CheckpointError(f"{fields.where}: a token has {longest} characters; expected {MAX_TOKEN_CHARS} at most")
    ids = {token: i for i, token in enumerate(tokens) if types[i] != UNUSED}
    kind = fields.string("model")
    if kind not in ("gpt2", "llama", "gemma4"):
        expected = "gpt2 (byte-level BPE), llama (SentencePiece) or gemma4; other tokenizers are not read"
        raise fields.fail("model", expected)
    special = {name: _token(fields, field, tokens) for name, field in SPECIAL.items()}
    notes: tuple[str, ...] = ()
    try:
        if kind == "gpt2":
            tokenizer, bos, notes = _byte_level(fields, ids)
        else:
            merges = _merges(fields) if kind == "gemma4" else _merges_by_score(fields, types, ids)
            tokenizer, bos = _sentencepiece(fields, ids, merges, special["unk_token"], kind == "llama"), True
        _add_tokens(tokenizer, tokens, types)
        _add_ends(tokenizer, fields, ids, special, bos)
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001 - the library raises `Exception` itself
        raise CheckpointError(f"{fields.where}: no tokenizer can be made of it ({first_line(error)})") from None
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{name: token for name, token in special.items() if token is not None},
        **_chat_template(model),
    }
    return GgufTokenizer(tokenizer, config, _ends(fields, tokens, types), notes)


def _token(fields: JsonReader, field: str, tokens: tuple[str, ...]) -> str | None:
    name = f"{field}_token_id"
    if not fields.given(name):
        return None
    return tokens[fields.integer(name, low=0, high=len(tokens) - 1)]


def _byte_level(fields: JsonReader, ids: dict[str, int]) -> tuple[Tokenizer, bool, tuple[str, ...]]:
    """The tokenizer, whether a prompt begins with a token for it where the file does not say, and notes."""
    name = fields.string("pre", default=MISSING_SPLIT)
    split = SPLITS.get(name)
    if split is None:
        raise fields.fail("pre", f"one of {', '.join(SPLITS)}: how other vocabularies split a text is not known here")
    notes = () if fields.given("pre") else (f"no field says how texts are split for tokens: as by {MISSING_SPLIT}",)
    tokenizer = Tokenizer(models.BPE(ids, _merges(fields), ignore_merges=split.whole))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.digits else []
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.normalizer = normalizers.NFC() if split.nfc else None
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.bos, notes


def _merges(fields: JsonReader) -> list[tuple[str, str]]:
    lines = fields.strings("merges")
    merges = [(one, other) for one, _, other in (line.partition(" ") for line in lines) if one and other]
    if len(merges) != len(lines):
        raise fields.fail("merges", "two parts with a space between them in each")
    return merges


def _merges_by_score(fields: JsonReader, types: tuple[int, ...], ids: dict[str, int]) -> list[tuple[str, str]]:
    scores = fields.data.get("scores")
    if not isinstance(scores, list) or len(scores) != len(types) or not all(_is_number(score) for score in scores):
        raise CheckpointError(f"{fields.where}: field 'scores' has not one finite number for each of the tokens")
    merges = []
    for token, i in ids.items():
        # No text is to become a token of control, or of a byte.
        mergeable = types[i] in (NORMAL, USER_DEFINED)
        halves = [(token[:at], token[at:]) for at in range(1, len(token))] if mergeable else []
        known = sorted((ids[one], ids[other], one, other) for one, other in halves if one in ids and other in ids)
        merges += [(-scores[i], -len(one), -len(other), one, other) for _, _, one, other in known]
    merges.sort(key=lambda merge: merge[:3])
    return [merge[3:] for merge in merges]


def _sentencepiece(
    fields: JsonReader, ids: dict[str, int], merges: list[tuple[str, str]], unknown: str | None, prefix: bool
) -> Tokenizer:
    """prefix: whether a text begins with a space where the file does not say."""
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = fields.boolean("add_space_prefix", default=prefix)
    space = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if prefix else space
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _add_tokens(tokenizer: Tokenizer, tokens: tuple[str, ...], types: tuple[int, ...]) -> None:
    """The tokens that are matched whole before the text is split, those of control among them special."""
    whole = [
        (token, kind == CONTROL) for token, kind in zip(tokens, types, strict=True) if kind in (CONTROL, USER_DEFINED)
    ]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=special) for token, special in whole if token])


def _add_ends(
    tokenizer: Tokenizer, fields: JsonReader, ids: dict[str, int], special: dict[str, str | None], bos: bool
) -> None:
    """The tokens before and after a prompt."""
    ends = [
        special[name] if fields.boolean(field, default=default) else None
        for name, field, default in (("bos_token", "add_bos_token", bos), ("eos_token", "add_eos_token", False))
    ]
    first, last = ([] if end is None or end not in ids else [end] for end in ends)
    if first or last:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A", *last, *(f"{token}:1" for token in first), "$B:1", *(f"{token}:1" for token in last)],
            special_tokens=[(token, ids[token]) for token in dict.fromkeys([*first, *last])],
        )


def _ends(fields: JsonReader, tokens: tuple[str, ...], types: tuple[int, ...]) -> tuple[int, ...]:
    named = [
        fields.integer(f"{end}_token_id", low=0, high=len(tokens) - 1)
        for end in ENDS
        if fields.given(f"{end}_token_id")
    ]
    texts = {token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL}
    # gpt-oss ends its channels with <|end|>, and goes on.
    ends = [text for text in END_TEXTS if text != "<|end|>" or not {"<|return|>", "<|call|>"} <= texts]
    known = [i for i, token in enumerate(tokens) if types[i] == CONTROL and token in ends]
    return tuple(dict.fromkeys([*named, *known]))


def _chat_template(model: GgufModel) -> dict[str, Any]:
    """The chat template, or several by name."""
    named = [
        {"name": name[len(TEMPLATE) + 1 :] or "default", "template": value}
        for name, value in model.metadata.items()
        if name == TEMPLATE or name.startswith(f"{TEMPLATE}.")
    ]
    for entry in named:
        if not isinstance(entry["template"], str):
            raise CheckpointError(f"{model.path}: {TEMPLATE} is {shown(entry['template'])}; expected a string")
    if not named:
        return {}
    return {"chat_template": named[0]["template"] if len(named) == 1 else named}
