"""Defects of steps in which many tenants have long prompts."""

from __future__ import annotations

from tests.mutations.mutant import mutants_of

CORE = "dflash_backend/core"
TESTS = ("tests/core/test_many_tenants.py", "tests/core/test_step_time.py", "tests/core/test_tenants.py")

MANY_TENANTS_MUTANTS = (
    *mutants_of(
        f"{CORE}/scheduler.py",
        TESTS,
        ("rows of prompts have any few tokens", "elif chunk < min(remaining, MIN_CHUNK):", "elif chunk < 1:"),
        ("any number of prompts are begun", "made_way or self._num_unfinished < MAX_PARTIAL_PREFILLS", "True"),
        (
            "a prompt that a request was preempted for waits",
            "made_way or self._num_unfinished < MAX_PARTIAL_PREFILLS or",
            "self._num_unfinished < MAX_PARTIAL_PREFILLS or",
        ),
        ("a shorter prompt waits for longer ones", " or remaining < self._least_remaining", ""),
        (
            "nothing is kept for a tenant that waits and has the turn",
            "                budget -= budget // 2\n",
            "                pass\n",
        ),
    ),
    *mutants_of(
        f"{CORE}/scheduler.py",
        ("tests/core/test_core_random.py",),
        ("the prompt that arrived first skips steps", " or request is in_prefill[0]:", ":"),
    ),
    *mutants_of(
        f"{CORE}/scheduler.py",
        ("tests/core/test_tenants.py",),
        ("nothing is kept for the prompt that arrived first", "kept = 1  # for the", "kept = 0  # for the"),
    ),
    *mutants_of(
        "dflash_backend/triton/submission.py",
        ("tests/triton/test_submission.py",),
        ("tenants that fill the queue leave no place", "min(limit, left) if load.of_tenant else limit", "limit"),
        (
            "a tenant that has nothing waiting is refused beside others",
            "(min(limit, left) if load.of_tenant else limit)",
            "0",
        ),
    ),
    *mutants_of(
        f"{CORE}/step_time.py",
        TESTS,
        (
            "a step is as short however many tenants have prompts",
            "LIGHT_STEPS_PER_TENANT * max(num_prompting - 2, 0)",
            "0",
        ),
    ),
    *mutants_of(
        f"{CORE}/scheduler.py",
        TESTS,
        (
            "short requests wait for the long ones of many tenants",
            "shorter = iter(queue.shorter(passed_over[0], builder.prefill_budget))",
            "shorter = iter(())",
        ),
    ),
    *mutants_of(
        f"{CORE}/tenants.py",
        TESTS,
        (
            "short requests go ahead however much their tenant had",
            "num_first <= num_tokens and served < most",
            "num_first <= num_tokens",
        ),
        (
            "requests that do not end go ahead of others",
            "num_first <= num_tokens and served < most",
            "served < most",
        ),
        (
            "requests are looked at before what their tenant holds",
            "if left < then or (victim := other.latest(but=oldest)) is None:",
            "if (victim := other.latest(but=oldest)) is None or left < then:",
        ),
        ("tenants that wait have no prompts", "tenant.num_waiting > 0 and name not in names", "False"),
    ),
)
