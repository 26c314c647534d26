"""`checks.grammar_bounds` with a few grammars, and that it tells what misses its bound."""

from __future__ import annotations

from tokenizers import Tokenizer

from checks import grammar_bounds
from checks.grammar_bounds import COMPILE_S, KEPT_MB, MASKS_S, Taken, larger_tokenizer, made, main, run

FEW = ("pattern a? x 499", "pattern a? x 30000", "Lark a? x 240", "doubling of 50 terminals")


def test_the_worst_shapes_keep_their_bounds() -> None:
    shapes = grammar_bounds._shapes()
    found = run({name: shapes[name] for name in FEW} | made(1, 5))
    assert [miss for taken in found for miss in taken.misses()] == []
    outcomes = {taken.name: taken.outcome for taken in found}
    assert "too much within its answers" in outcomes["pattern a? x 499"]
    assert "of 60004 characters" in outcomes["pattern a? x 30000"]
    assert "in the terminal T" in outcomes["doubling of 50 terminals"]
    assert sum(outcome == "followed" for outcome in outcomes.values()) >= 2


def test_a_generator_makes_the_same_grammars_by_its_seed() -> None:
    assert made(3, 16) == made(3, 16)
    assert len({str(grammar) for grammar in (made(3, 16) | made(4, 16)).values()}) > 28


def test_a_larger_vocabulary_has_the_demos_tokens_and_others() -> None:
    own, larger = (Tokenizer.from_str(larger_tokenizer(size)).get_vocab() for size in (0, 3000))
    assert len(larger) == 3000
    assert own.items() < larger.items()
    assert sorted(larger.values()) == list(range(3000))


def test_each_bound_that_is_missed_is_told(monkeypatch, capsys) -> None:
    late = Taken("late", {}, compile_s=COMPILE_S + 1, wall_s=99, masks_s=MASKS_S + 1, megabytes=KEPT_MB + 1)
    assert [miss.split(":")[1].split()[0] for miss in late.misses()] == ["compilation", "compilation", "masks", "129"]
    monkeypatch.setattr(grammar_bounds, "run", lambda grammars, vocab_size: [Taken("fine", {}), late])
    assert main(["--count", "2"]) == 1
    assert "MISS late: masks of a step" in capsys.readouterr().out
    monkeypatch.setattr(grammar_bounds, "run", lambda grammars, vocab_size: [Taken("fine", {})])
    assert main(["--count", "2"]) == 0
