"""Sampled answers follow their grammars, every time, and are the target's own: the same text without a drafter.

`python -m checks.structured` samples 500 answers at temperature 1 over 10 JSON schemas and 5 regular expressions,
through speculation, prefix hits and preemptions, parses each, and compares them with those of the target alone.
`--fits` tests the distribution of a choice against the target's own, restricted to what the grammar allows.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from scipy import stats

from checks.core_state import check_core
from checks.lossless import TINY_POOL_BLOCKS, pool_of
from dflash_backend import LLM
from dflash_backend.config import asset_path
from load_tests.prompts import load_prompts

SHORT = {"type": "string", "maxLength": 10}
SMALL = {"type": "integer", "minimum": -99, "maximum": 9999}
MAX_TOKENS = 900
LEAST_P = 0.001
# A bin of the test of the distribution holds at least this many expected samples.
MIN_EXPECTED = 8.0


def closed(properties: dict[str, Any], required: Sequence[str] | None = None) -> dict[str, Any]:
    """An object with these properties and no others."""
    names = list(properties) if required is None else list(required)
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


SCHEMAS: tuple[dict[str, Any], ...] = (
    closed({"name": SHORT, "age": SMALL}),
    closed({"name": SHORT, "nick": SHORT, "ok": {"type": "boolean"}}, required=["name"]),
    closed({"kind": {"enum": ["circle", "square", 7, None]}, "size": {"type": "number", "minimum": 0, "maximum": 9}}),
    {"type": "array", "items": SMALL, "minItems": 1, "maxItems": 4},
    closed({"at": closed({"x": SMALL, "y": SMALL}), "tags": {"type": "array", "items": SHORT, "maxItems": 2}}),
    {"anyOf": [closed({"error": SHORT}), closed({"value": SMALL})]},
    closed({"id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}, "next": {"anyOf": [SMALL, {"type": "null"}]}}),
    closed({"day": {"type": "string", "format": "date"}, "note": SHORT}),
    {"$ref": "#/$defs/tree", "$defs": {"tree": closed({"n": SMALL, "l": {"anyOf": [{"type": "null"}, SMALL]}})}},
    closed({"items": {"type": "array", "items": closed({"a": SHORT, "b": {"const": "é\n"}}), "maxItems": 2}}),
)
REGEXES = (
    r"[a-z]{3,9}(-[0-9]{2}){1,2}",
    r"(yes|no|it depends( on [a-z]{1,8})?)",
    r"\([0-9]{3}\) [0-9]{3}-[0-9]{4}",
    r"[A-Z][a-z]{1,10}( [A-Z][a-z]{1,10}){0,2}",
    r"#[0-9a-f]{6}(, #[0-9a-f]{6}){0,3}",
)
GRAMMARS: tuple[dict[str, Any], ...] = (*({"json": schema} for schema in SCHEMAS), *({"regex": one} for one in REGEXES))


@dataclass(frozen=True)
class Way:
    """One way to run: settings, and how often the same requests are run, of which the last time counts."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    times: int = 1


TARGET_ALONE = Way("target alone", {"draft": "", "enable_prefix_caching": False})
WAYS = (
    Way("drafts", {"adaptive_speculation": False}),
    Way("with prefix hits, k = 3", {"num_speculative_tokens": 3, "adaptive_speculation": False}, times=2),
    Way("after preemptions", {"kv_cache_gb": pool_of(TINY_POOL_BLOCKS), "enable_prefix_caching": False}),
)


def requests(count: int) -> tuple[list[str], list[dict[str, Any]]]:
    """`count` prompts and how they are sampled, the grammars in turn."""
    prompts = [row.prompt for row in load_prompts(min(count, 40))]
    sampling = [
        {
            "temperature": 1.0,
            "seed": i,
            "max_tokens": MAX_TOKENS,
            "structured_outputs": GRAMMARS[i % len(GRAMMARS)],
        }
        for i in range(count)
    ]
    return [prompts[i % len(prompts)] for i in range(count)], sampling


def misfit(grammar: dict[str, Any], text: str) -> str | None:
    """Why a text does not follow its grammar; None when it does. A schema is checked by what the table has."""
    if "regex" in grammar:
        return None if re.fullmatch(grammar["regex"], text) else "the expression does not match"
    try:
        value = json.loads(text)
    except ValueError as error:
        return str(error)
    return _misfit(grammar["json"], value, grammar["json"])


def _misfit(schema: dict[str, Any], value: Any, root: dict[str, Any]) -> str | None:
    if "$ref" in schema:
        return _misfit(root["$defs"][schema["$ref"].rpartition("/")[2]], value, root)
    if "anyOf" in schema:
        return (
            None if any(_misfit(one, value, root) is None for one in schema["anyOf"]) else f"{value!r} is none of anyOf"
        )
    if "enum" in schema or "const" in schema:
        allowed = schema.get("enum", [schema.get("const")])
        return (
            None if any(value == one and type(value) is type(one) for one in allowed) else f"{value!r} not in {allowed}"
        )
    if schema["type"] == "object":
        if not isinstance(value, dict) or not set(schema["required"]) <= set(value) <= set(schema["properties"]):
            return f"{value!r} has other properties than {list(schema['properties'])}"
        return next(
            (bad for name, one in value.items() if (bad := _misfit(schema["properties"][name], one, root))), None
        )
    if schema["type"] == "array":
        if not isinstance(value, list) or not schema.get("minItems", 0) <= len(value) <= schema["maxItems"]:
            return f"{value!r} is no list of that length"
        return next((bad for one in value if (bad := _misfit(schema["items"], one, root))), None)
    return None if _is_simple(schema, value) else f"{value!r} is no {schema}"


def _is_simple(schema: dict[str, Any], value: Any) -> bool:
    if schema["type"] == "null":
        return value is None
    if schema["type"] == "boolean":
        return isinstance(value, bool)
    if schema["type"] == "string":
        pattern = r"\d{4}-\d{2}-\d{2}" if schema.get("format") == "date" else schema.get("pattern", r"(?s).*")
        return isinstance(value, str) and len(value) <= schema.get("maxLength", 99) and bool(re.search(pattern, value))
    kinds = (int,) if schema["type"] == "integer" else (int, float)
    return isinstance(value, kinds) and not isinstance(value, bool) and schema["minimum"] <= value <= schema["maximum"]


def answers(way: Way, prompts: list[str], sampling: list[dict[str, Any]]) -> tuple[list[str], list[list[int]], LLM]:
    """The texts and tokens of all requests, and the engine that gave them."""
    llm = LLM(**{"max_num_seqs": 16, "kv_cache_gb": 0.5, "kv_write_guard": True} | way.settings)
    outputs = []
    for _ in range(way.times):
        outputs = llm.generate(prompts, sampling)
    check_core(llm.engine.core)
    return [one.text for one in outputs], [one.token_ids for one in outputs], llm


def fit(num_samples: int, seed: int = 0) -> float:
    """The p-value of a chi-square test of sampled answers of two letters, in tokens, against the target's distribution
    among what the grammar allows."""
    from transformers import AutoModelForCausalLM

    llm = LLM(max_num_seqs=128, kv_cache_gb=0.5, adaptive_speculation=False)
    letters = "ABCDEFGH"
    ids = llm.tokenizer.encode("<|im_start|>user\nTell me something<|im_end|>\n<|im_start|>assistant\n")
    grammar = {"regex": f"[{letters}][{letters}]"}
    params = [
        {"temperature": 1.0, "seed": seed * 1_000_003 + i, "max_tokens": 3, "structured_outputs": grammar}
        for i in range(num_samples)
    ]
    outputs = llm.generate([ids] * num_samples, params)
    counts = Counter(tuple(output.token_ids) for output in outputs)
    model = AutoModelForCausalLM.from_pretrained(asset_path("demo", "pair", "target"), dtype=torch.float32).eval()
    expected = _expected(model, ids, llm, letters)
    bins = [(counts[key], weight * num_samples) for key, weight in expected.items()]
    large = [pair for pair in bins if pair[1] >= MIN_EXPECTED]
    large.append((num_samples - sum(seen for seen, _ in large), num_samples - sum(size for _, size in large)))
    if large[-1][1] < MIN_EXPECTED:
        last = large.pop()
        large[-1] = (large[-1][0] + last[0], large[-1][1] + last[1])
    return float(stats.chisquare([seen for seen, _ in large], [size for _, size in large]).pvalue)


def _expected(model: Any, prompt: list[int], llm: LLM, letters: str) -> dict[tuple[int, ...], float]:
    """The probability of each answer in tokens: the target's own, restricted to the tokens that are allowed."""
    vocabulary = {llm.tokenizer.decode([i], skip_special_tokens=False): i for i in range(llm.engine.ready.vocab_size)}
    one = {text: i for text, i in vocabulary.items() if len(text) == 1 and text in letters}
    two = {text: i for text, i in vocabulary.items() if len(text) == 2 and set(text) <= set(letters)}
    (eos,) = llm.tokenizer.eos_token_ids
    found: dict[tuple[int, ...], float] = {}
    with torch.inference_mode():

        def distribution(prefix: list[int], allowed: list[int]) -> list[float]:
            logits = model(torch.tensor([prompt + prefix]), logits_to_keep=1).logits[0, -1].double()
            weights: list[float] = logits[allowed].softmax(dim=0).tolist()
            return weights

        first = [*one.values(), *two.values()]
        for token, weight in zip(first, distribution([], first), strict=True):
            if token in two.values():
                found[(token, eos)] = weight
                continue
            second = list(one.values())
            for other, share in zip(second, distribution([token], second), strict=True):
                found[(token, other, eos)] = weight * share
    return found


def main() -> int:
    """Entry point; the exit status is 1 when an answer does not follow its grammar, or is not the target's own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=500, help="%(default)s")
    parser.add_argument(
        "--fits", type=int, default=0, help="samples of the test of the distribution (%(default)s: none)"
    )
    args = parser.parse_args()
    prompts, sampling = requests(args.answers)
    expected = answers(TARGET_ALONE, prompts, sampling)[1]
    failed = False
    for way in WAYS:
        texts, tokens, llm = answers(way, prompts, sampling)
        bad = [(i, why) for i, text in enumerate(texts) if (why := misfit(sampling[i]["structured_outputs"], text))]
        parted = sum(one != other for one, other in zip(tokens, expected, strict=True))
        counts = llm.stats()
        print(
            f"{way.name:25} {len(texts) - len(bad)} of {len(texts)} follow their grammar, {len(texts) - parted} are "
            f"the target's own; acceptance length {counts.spec_decoding.acceptance_length:.2f}, "
            f"{counts.num_preemptions} preemptions, {counts.prefix_cache_hits} cached tokens",
            flush=True,
        )
        for i, why in bad:
            print(f"    {sampling[i]['structured_outputs']}: {texts[i]!r}: {why}")
        failed = failed or bool(bad) or parted > 0
    if args.fits:
        p_value = fit(args.fits)
        print(f"distribution: p = {p_value:.3f} over {args.fits} samples")
        failed = failed or p_value <= LEAST_P
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
