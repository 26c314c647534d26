"""Grammars of every known bad shape: what each takes of the engine, whether it is refused or followed.

`python -m checks.grammar_bounds` compiles 200 expressions, schemas and grammars as the engine does: known shapes, at
sizes just within their bounds and far beyond, and what a generator makes by `--seed`. Those that are taken are followed
along tokens that their masks allow, with drafts. It prints the worst ones, and whether the time of each compilation
and of each step's masks, and the memory, keep their bounds; the exit status is 1 where one does not. With `--live` it
also serves the demo pair, sends the worst of those that were taken, many at once, and measures the gaps of another
client's stream.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash_backend.config import asset_path
from dflash_backend.messages import StructuredOutputs
from dflash_backend.structured_output.compiler import TIME_LIMIT_S, GrammarCompiler, GrammarError
from dflash_backend.structured_output.matcher import MASKS_LIMIT_S, BitmaskFiller, GrammarMatcher, MatcherRules
from dflash_backend.structured_output.trial import bytes_in_use
from dflash_backend.text.structured_outputs import FormatError, read_structured_outputs
from dflash_backend.text.tokenizer import tokenizer_json

EOS, VOCAB_SIZE = 2, 1536
# Characters that a tokenizer's further tokens are made of, and their number in one; Ġ is a space.
CHARACTERS, LENGTHS = "abcdefghijklmnopqrstuvwxyzĠABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.,:;(){}[]\\/=<>+*'", (2, 9)
# Processor seconds of this process for a compilation, whose trial is another's; and of the masks of one answer's step.
COMPILE_S, MASKS_S = TIME_LIMIT_S, 2 * MASKS_LIMIT_S
# Of a compilation and its trial together: the trial has its own limit, is at most repeated once, and waits its turn.
TRIAL_WALL_S = 60.0
KEPT_MB = 128
ANSWERS, TOKENS, DRAFTS = 2, 48, 4
LIVE_GAP_S, LIVE_REQUESTS = 1.0, 12
LETTERS = "abcdefgh"

Grammar = dict[str, Any]


def pattern(expression: str, **others: Any) -> Grammar:
    """A schema whose property follows an expression."""
    string = {"type": "string", "pattern": expression, **others}
    return {"json": {"type": "object", "properties": {"p": string}, "required": ["p"], "additionalProperties": False}}


def terminal(expression: str) -> Grammar:
    """A grammar of Lark that comes to an expression after its first letter."""
    return {"grammar": f'start: "x" T\nT: /{expression}/'}


def _shapes() -> dict[str, Grammar]:
    """The bad shapes that are known, each by its name."""
    found = _chains()
    for count in (10, 50, 99):
        found |= _sums(count) | _counts(count)
    found["patterns and lengths"] = pattern("^(a|b|c)*(ab|ba)(a|b|c)*$", minLength=400, maxLength=9000, format="uri")
    found["maxItems"] = {"json": {"type": "array", "items": {"type": "string", "maxLength": 10**5}, "maxItems": 10**6}}
    return found


def _chains() -> dict[str, Grammar]:
    """Expressions of optional parts, one after the other."""
    found: dict[str, Grammar] = {}
    for count in (100, 240, 499, 4000, 30_000):
        chain = "a?" * count + "zz"
        found |= {f"a? x {count}": {"regex": chain}, f"pattern a? x {count}": pattern(f"^{chain}$")}
        found[f"Lark a? x {count}"] = terminal(chain)
        found[f"Lark operators x {count}"] = {"grammar": 'start: "x" T\nT: ' + '"a"? ' * count + '"z"'}
        found[f"patternProperties a? x {count}"] = {"json": {"type": "object", "patternProperties": {chain: {}}}}
        found[f"empty alternatives x {count}"] = {"regex": "(a|)" * count}
        found[f"(a|b?)(a?|b) x {count}"] = {"regex": "(a|b?)(a?|b)" * (count // 2)}
    return found


def _sums(count: int) -> dict[str, Grammar]:
    """Many expressions, counted parts, intersections."""
    return {
        f"counted {count} nested": {"regex": f"((a{{1,{count}}}){{1,{count}}}){{1,{count}}}"},
        f"nullable counted {count}": pattern(f"^(((a?b?c?){{{count}}}){{{count}}}){{{count}}}$"),
        f"anyOf of {count} patterns": {"json": {"anyOf": [pattern("b?" * 100 + f"{i}")["json"] for i in range(count)]}},
        f"terminals {count}": {
            "grammar": "start: "
            + "|".join(f"T{i}" for i in range(count))
            + "\n".join(f"T{i}: /{'a?' * 99}z{i}/\n" for i in range(count))
        },
        f"allOf of {count} patterns": {
            "json": {"type": "string", "allOf": [{"pattern": f"{i}.*[a-{LETTERS[i % 8]}]"} for i in range(count)]}
        },
        f"intersection of {count}": {"grammar": "start: A\nA: " + " & ".join(f"/.*{i}.*/" for i in range(count))},
        f"late intersection of {count}": {
            "grammar": 'start: "x" A\nA: ' + " & ".join(f"/(.*{i}.*)+/" for i in range(count))
        },
        f"complement of {count}": {
            "grammar": "start: A\nA: /[a-z]*/ & ~/(.*(" + "|".join("ab" * i for i in range(1, count)) + ").*)/"
        },
        f".*a.{{{count}}}": {"regex": f"[ab]*a[ab]{{{count}}}"},
        f"(.*a){{{count}}}": {"regex": f"(.*a){{{count}}}"},
        f"doubling of {count} terminals": {
            "grammar": f'start: T{count}\nT0: "a"?\n' + "".join(f"T{i + 1}: T{i} T{i}\n" for i in range(count))
        },
    }


def _counts(count: int) -> dict[str, Grammar]:
    """Much of everything else."""
    return {
        f"chain of {count * 90} rules": {
            "grammar": "start: r0\n"
            + "".join(f'r{i}: r{i + 1} "a"\n' for i in range(count * 90))
            + f'r{count * 90}: "b"\n'
        },
        f"$ref chain of {count * 20}": {
            "json": {
                "$ref": "#/$defs/a0",
                "$defs": {
                    **{f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(count * 20)},
                    f"a{count * 20}": {"type": "integer"},
                },
            }
        },
        f"{count * 20} properties": {
            "json": {"type": "object", "properties": {f"{'p' * 20}{i}": {} for i in range(count * 20)}}
        },
        f"enum of {count * 90}": {"json": {"enum": [f"{i}{'x' * (i % 9)}" for i in range(count * 90)]}},
        f"choice of {count * 90}": {"choice": ["ab" * (i % 30) + str(i) for i in range(count * 90)]},
        f"integers of {count * 3} digits": {
            "json": {"type": "integer", "minimum": -(10 ** (count * 3)), "maximum": 10 ** (count * 3) - 7}
        },
        f"multipleOf {count}": {"json": {"type": "number", "multipleOf": count / 7e5}},
    }


def _expression(rng: random.Random, depth: int = 0) -> str:
    """An expression of nested, optional, counted and alternative parts."""
    kind = rng.choice(("letters", "class", "alternatives", "sequence", "sequence", "optional", "counted"))
    if depth > 4 or kind == "letters":
        return "".join(rng.choices(LETTERS, k=rng.randint(1, 4)))
    if kind == "class":
        return rng.choice(("[a-d]", "[^a]", ".", r"\w", r"\d", "[ab]", r"\s"))
    parts = [_expression(rng, depth + 1) for _ in range(rng.randint(2, 4))]
    if kind == "alternatives":
        return f"({'|'.join(parts)}{rng.choice(('', '|'))})"
    if kind == "sequence":
        return "".join(parts)
    if kind == "optional":
        return f"({parts[0]}){rng.choice('?*+')}"
    low = rng.choice((0, 1, 5))
    return f"({parts[0]}){{{low},{low + rng.choice((1, 30, 1000))}}}"


def made(seed: int, count: int) -> dict[str, Grammar]:
    """`count` grammars that a generator makes: expressions in every place that takes one, alone and combined."""
    rng, found = random.Random(seed), {}
    for number in range(count):
        texts = ["".join(_expression(rng) for _ in range(rng.choice((1, 3, 30)))) for _ in range(3)]
        one = rng.choice((1, 8)) * texts[0]
        grammars: tuple[Grammar, ...] = (
            {"regex": one},
            pattern(one, maxLength=rng.choice((10, 3000))),
            terminal(one),
            {"json": {"type": "string", "allOf": [{"pattern": text} for text in texts]}},
            {"json": {"type": "object", "patternProperties": dict.fromkeys(texts, True)}},
            {"json": {"anyOf": [pattern(text)["json"] for text in texts]}},
            {"grammar": "start: A\nA: " + " & ".join(f"/{text}/" for text in texts)},
            {"grammar": f"start: A\nA: /{texts[0]}/ & ~/{texts[1]}/"},
        )
        found[f"made {seed}.{number}"] = grammars[number % len(grammars)]
    return found


@dataclass
class Taken:
    """What a grammar took: processor seconds of its compilation here and wall seconds with its trial, processor seconds
    of the slowest step's masks, and MB of the grammar and an answer. outcome: why it was refused, or ended."""

    name: str
    grammar: Grammar
    compile_s: float = 0.0
    wall_s: float = 0.0
    masks_s: float = 0.0
    megabytes: float = 0.0
    outcome: str = ""

    def misses(self) -> list[str]:
        """What misses its bound, in words."""
        bounds = (
            ("compilation", self.compile_s, COMPILE_S),
            ("compilation and trial", self.wall_s, TRIAL_WALL_S),
            ("masks of a step", self.masks_s, MASKS_S),
        )
        found = [f"{self.name}: {what} {value:.2f} s; at most {most:g}" for what, value, most in bounds if value > most]
        if self.megabytes > KEPT_MB:
            found.append(f"{self.name}: {self.megabytes:.0f} MB; at most {KEPT_MB}")
        return found

    def __str__(self) -> str:
        times = f"compiled {self.compile_s:6.3f} s ({self.wall_s:5.2f} with trial), masks {self.masks_s:6.3f} s"
        return f"{self.name:28} {times}, {self.megabytes:6.1f} MB  {self.outcome[:70]}"


def larger_tokenizer(vocab_size: int) -> str:
    """The text of a tokenizer.json: the demo's tokens, and others up to `vocab_size`."""
    tokenizer, rng = json.loads(tokenizer_json(Path(asset_path("demo", "pair", "target")))), random.Random(0)
    vocab = tokenizer["model"]["vocab"]
    taken = {token["content"] for token in tokenizer["added_tokens"]}
    number = max(*vocab.values(), *(token["id"] for token in tokenizer["added_tokens"])) + 1
    while number < vocab_size:
        token = rng.choice(("", "Ġ")) + "".join(rng.choices(CHARACTERS, k=rng.randint(*LENGTHS)))
        if token not in vocab and token not in taken:
            vocab[token] = number
            number += 1
    return json.dumps(tokenizer, ensure_ascii=False)


class Bench:
    """Compiles and follows grammars as the engine does."""

    def __init__(self, vocab_size: int = VOCAB_SIZE) -> None:
        self._compiler = GrammarCompiler(lambda: larger_tokenizer(vocab_size), vocab_size)
        self._filler = BitmaskFiller(vocab_size, 1)
        self._compiler.compile(StructuredOutputs("regex", "a"), (EOS,))

    def close(self) -> None:
        """End the processes that try grammars."""
        for vocabulary in self._compiler._vocabularies.values():
            for trial in vocabulary.trials.values():
                trial.close()

    def take(self, name: str, grammar: Grammar) -> Taken:
        """Compile a grammar and follow answers in it."""
        taken = Taken(name, grammar)
        before, began, wall = bytes_in_use(), time.process_time(), time.monotonic()
        try:
            read = read_structured_outputs(grammar)
            assert read is not None
            compiled = self._compiler.compile(read, (EOS,))
        except (FormatError, GrammarError) as error:
            taken.outcome = f"refused: {error}"
            return taken
        finally:
            taken.compile_s, taken.wall_s = time.process_time() - began, time.monotonic() - wall
        for seed in range(ANSWERS):
            matcher = compiled.matcher(MatcherRules())
            taken.masks_s = max(taken.masks_s, self._follow(matcher, random.Random(seed)))
            taken.megabytes = max(taken.megabytes, (bytes_in_use() - before) / 1e6)
            taken.outcome = matcher.error or taken.outcome or "followed"
        return taken

    def _follow(self, matcher: GrammarMatcher, rng: random.Random) -> float:
        """Follow one answer, with drafts that its masks allow. Returns the slowest step's processor seconds."""
        slowest, drafts = 0.0, list[int]()
        for _ in range(TOKENS):
            began = time.process_time()
            masks, counts = self._filler.fill([(matcher, drafts)])
            slowest = max(slowest, time.process_time() - began)
            if matcher.error is not None or not counts[0]:
                break
            allowed = [np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist() for mask in masks]
            # Few letters come again and again: so the states of the lexer grow most.
            chosen = [[i for i in ids if i != EOS] or [EOS] for ids in allowed]
            tokens = [*drafts[: counts[0] - 1], rng.choice(chosen[-1][: rng.choice((3, 40, 2000))])]
            began = time.process_time()
            matcher.advance(tokens)
            if tokens[-1] == EOS:
                break
            last = rng.choice(chosen[-1][:20])
            drafts = [last] * matcher.legal_drafts([last] * DRAFTS)[0] if last != EOS else []
            slowest = max(slowest, time.process_time() - began)
        return slowest


def run(grammars: dict[str, Grammar], vocab_size: int = VOCAB_SIZE) -> list[Taken]:
    """What each grammar takes."""
    bench = Bench(vocab_size)
    try:
        return [bench.take(name, grammar) for name, grammar in grammars.items()]
    finally:
        bench.close()


async def live_gap(worst: Sequence[Taken], seconds: float) -> tuple[float, dict[str, int]]:
    """The largest gap between two deltas of a stream while others send the worst grammars, in seconds, and how many of
    these ended with which status."""
    from checks.front_end import running_front_end

    statuses: dict[str, int] = {}
    settings = {"max_num_seqs": "32", "max_model_len": "4096", "kv_cache_gb": "0.3"}
    with running_front_end(
        settings, ["--no-access-log"], "one key-of-one-0123456789\nother key-of-other-012345"
    ) as server:
        end = time.monotonic() + seconds

        async def flood(number: int) -> None:
            while time.monotonic() < end:
                taken = worst[number % len(worst)]
                number += LIVE_REQUESTS
                body = {"prompt": "x", "max_tokens": 200, "temperature": 1, "structured_outputs": taken.grammar}
                async with server.post("/v1/completions", body, "key-of-one-0123456789") as reader:
                    status = (await reader.readline()).decode().split(" ")[1]
                    await reader.read()
                statuses[status] = statuses.get(status, 0) + 1

        async def watch() -> float:
            largest = 0.0
            while time.monotonic() < end:
                body = {"prompt": "Tell", "max_tokens": 3000, "temperature": 0, "ignore_eos": True, "stream": True}
                async with server.post("/v1/completions", body, "key-of-other-012345") as reader:
                    await reader.readline()
                    last = time.monotonic()
                    while await reader.readline():
                        now = time.monotonic()
                        largest, last = max(largest, now - last), now
            return largest

        floods = [asyncio.create_task(flood(number)) for number in range(LIVE_REQUESTS)]
        gap = await watch()
        await asyncio.gather(*floods)
    return gap, statuses


def main(arguments: list[str] | None = None) -> int:
    """Entry point; the exit status is 1 where a bound is not kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="grammars in all (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of those that the generator makes (%(default)s)")
    parser.add_argument("--live", type=float, default=0.0, metavar="S", help="seconds beside a stream of a server")
    parser.add_argument(
        "--vocabulary",
        type=int,
        default=VOCAB_SIZE,
        metavar="TOKENS",
        help="of the tokenizer (%(default)s, the demo's)",
    )
    given = parser.parse_args(arguments)
    shapes = list(_shapes().items())
    random.Random(given.seed).shuffle(shapes)
    shapes = shapes[: max(1, given.count * 2 // 5)] if given.count < len(shapes) + 1 else shapes
    found = run(dict(shapes) | made(given.seed, given.count - len(shapes)), given.vocabulary)
    followed = [taken for taken in found if not taken.outcome.startswith("refused")]
    for title, key in (
        ("slowest masks", lambda taken: taken.masks_s),
        ("slowest compilations", lambda taken: taken.compile_s),
        ("slowest trials", lambda taken: taken.wall_s),
        ("most memory", lambda taken: taken.megabytes),
    ):
        print(f"{title}:")
        for taken in sorted(found, key=key, reverse=True)[:5]:
            print(f"    {taken}")
    misses = [miss for taken in found for miss in taken.misses()]
    print(
        f"{len(found)} grammars, {len(found) - len(followed)} refused, {len(followed)} followed; {len(misses)} misses"
    )
    if given.live:
        worst = sorted(followed, key=lambda taken: taken.masks_s, reverse=True)[:LIVE_REQUESTS]
        gap, statuses = asyncio.run(live_gap(worst, given.live))
        print(f"largest gap of another client's stream {gap:.2f} s beside {statuses} answers of the worst")
        if gap > LIVE_GAP_S:
            misses.append(f"the gap is {gap:.2f} s; at most {LIVE_GAP_S:g}")
    for miss in misses:
        print(f"MISS {miss}")
    return int(bool(misses))


if __name__ == "__main__":
    sys.exit(main())
