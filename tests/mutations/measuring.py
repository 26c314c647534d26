"""Defects of what measures: the load tests, the evaluation, the nightly run."""

from __future__ import annotations

from tests.mutations.mutant import Mutant, mutants_of

MEASURING_MUTANTS = (
    Mutant(
        "what a server cancels counts as planned",
        "load_tests/request_runner.py",
        "if stream not in self._cancelled:",
        "if False:",
        ("tests/load_tests/test_request_runner.py",),
    ),
    Mutant(
        "answers after the measured time count for the capacity",
        "load_tests/scenarios/overload.py",
        "begin < s.ended_s <= end",
        "begin < s.ended_s",
        ("tests/load_tests/test_workloads.py",),
    ),
    *mutants_of(
        "load_tests/result.py",
        ("tests/load_tests/test_verdicts.py", "tests/load_tests/test_reports.py"),
        (
            "a gap is of the phase in which its request was sent",
            "if span.start_s <= at_s < span.end_s",
            "if sample.phase == phase",
        ),
        (
            "answers after the load count for its throughput",
            "and sample.ended_s < self.duration_s for",
            "for",
        ),
    ),
    Mutant(
        "a run that is incomplete hides one that failed",
        "load_tests/cli.py",
        "return min(codes, key=SEVEREST_FIRST.index)",
        "return next(filter(None, codes), 0)",
        ("tests/load_tests/test_cli.py",),
    ),
    Mutant(
        "shares of engines add up",
        "load_tests/server_state.py",
        "if name.endswith(SHARE) else 1",
        "if False else 1",
        ("tests/load_tests/test_server_state.py",),
    ),
    Mutant(
        "right answers are computed without the server's quantisation",
        "load_tests/expected_answers.py",
        '"quantization",',
        "",
        ("tests/load_tests/test_smoke.py::test_answers_are_computed_with_the_servers_numbers",),
    ),
    Mutant(
        "the last number in a box is its answer",
        "dflash_backend/evaluation/scoring.py",
        "if _last_boxed(text) is not None:",
        "if False:",
        ("tests/evaluation/test_scoring.py",),
    ),
    Mutant(
        "only the first piece of a text has special tokens before it",
        "dflash_backend/evaluation/engine.py",
        "[*leading, *ids[first : first + size]]",
        "[*leading[first:], *ids[first : first + size]]",
        ("tests/evaluation/test_compare.py",),
    ),
    Mutant(
        "perplexities of other pieces are compared",
        "dflash_backend/evaluation/compare.py",
        "for name in (TEXT_TOKENS, TEXT_PIECE)",
        "for name in (TEXT_TOKENS,)",
        ("tests/evaluation/test_compare.py",),
    ),
    *mutants_of(
        "checks/nightly.py",
        ("tests/checks/test_nightly.py",),
        ("tests that are all skipped are kept", "if status == 0 and num_skipped and", "if False and"),
        (
            "outcomes of other commands stand",
            'outcome.get("command") == command_of(outcome["name"])',
            'outcome.get("command")',
        ),
    ),
)
