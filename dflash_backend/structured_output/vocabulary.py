"""The target's tokenizer as grammars need it: no text spells a special token.

llguidance tokenises the text that a grammar forces with the tokenizer itself, which takes a special token's name in it
for that token. So special tokens have other names here, which no client knows. A grammar means one by its id (`<[2]>`),
or in Lark by its name outside of quotes (`<|im_end|>`), for which the id is put.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_backend.structured_output.lark import read_lark, with_replaced

_IDS = re.compile(r"<\[(\^?)([\d,\s-]*|\*)\]>")


@dataclass(frozen=True)
class SpecialTokens:
    """ids: of all special tokens, by their names. visible: of those that are part of an answer's text, such as
    Qwen3's `<tool_call>`."""

    ids: dict[str, int]
    visible: dict[str, int]


def without_special_text(tokenizer_json: str) -> tuple[str, SpecialTokens]:
    """The text of a tokenizer.json whose special tokens have names that no text spells, and these tokens. Special are
    those that llguidance takes for it: so marked, or written `<...>`."""
    tokenizer = json.loads(tokenizer_json)
    added = [token for token in tokenizer.get("added_tokens") or [] if _is_special(token)]
    secret = secrets.token_hex(8)
    new_names = {token["content"]: f"<|{secret}-{token['id']}|>" for token in added}
    ids = {token["content"]: int(token["id"]) for token in added}
    visible = {token["content"]: int(token["id"]) for token in added if not token.get("special")}
    for token in added:
        token["content"] = new_names[token["content"]]
    model = tokenizer["model"]
    _rename(model, new_names)
    # It only adds tokens around a text, and names them.
    tokenizer["post_processor"] = None
    return json.dumps(tokenizer, ensure_ascii=False), SpecialTokens(ids, visible)


def _is_special(token: Mapping[str, Any]) -> bool:
    content = token["content"]
    return bool(token.get("special")) or (content.startswith("<") and content.endswith(">"))


def _rename(model: dict[str, Any], new_names: Mapping[str, str]) -> None:
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {new_names.get(name, name): token_id for name, token_id in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[new_names.get(name, name), score] for name, score in vocab]
    if model.get("unk_token") in new_names:
        model["unk_token"] = new_names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not _makes(merge, new_names)]


def _makes(merge: Any, names: Mapping[str, str]) -> bool:
    """Whether a merge, a pair or its text, takes or makes one of these tokens."""
    left, _, right = merge.partition(" ") if isinstance(merge, str) else (merge[0], "", merge[1])
    return left in names or right in names or left + right in names


def with_ids(lark: str, special: SpecialTokens) -> str:
    """A grammar in Lark's notation with ids in place of the names of special tokens, and of rules' strings that are the
    whole text of a visible one: a model writes that as the one token."""
    parts = read_lark(lark)
    found = [(at, name, special.ids[name]) for at, name in parts.special if name in special.ids]
    found += [
        (at, quoted, special.visible[quoted[1:-1]]) for at, quoted in parts.strings if quoted[1:-1] in special.visible
    ]
    return with_replaced(lark, [(at, text, f"<[{token_id}]>") for at, text, token_id in found])


def named_tokens(lark: str, ids: Mapping[str, int], among: tuple[int, ...]) -> list[str]:
    """The special tokens of a grammar in Lark's notation that are one of `among`, as it writes them."""
    found = []
    for _, name in read_lark(lark).special:
        numbers = _IDS.fullmatch(name)
        if name in ids:
            named = ids[name] in among
        elif numbers is None or numbers[1] or numbers[2] == "*":
            named = False
        else:
            named = any(_within(numbers[2], token_id) for token_id in among)
        if named:
            found.append(name)
    return found


def _within(ranges: str, token_id: int) -> bool:
    bounds = [part.strip().partition("-") for part in ranges.split(",")]
    return any(low.isdigit() and int(low[:10]) <= token_id <= int((high or low)[:10]) for low, _, high in bounds)
