"""Defects of Ctrl-C in the offline API."""

from __future__ import annotations

from tests.mutations.mutant import mutants_of

TESTS = ("tests/engine/test_interrupts.py",)

INTERRUPT_MUTANTS = (
    *mutants_of(
        "dflash_backend/engine/llm.py",
        TESTS,
        ("Ctrl-C ends a step within it", "        self.came = True\n", "        raise KeyboardInterrupt\n"),
        ("Ctrl-C is forgotten", "if self.came and error is None:", "if False:"),
        ("a second Ctrl-C waits as well", "        if self.came:\n", "        if False:\n"),
        ("Ctrl-C waits for the whole answer", "(finished or failed or whole.came)", "(finished or failed)"),
        ("Ctrl-C hides a step's own error", "if self.came and error is None:", "if self.came:"),
        ("a program's own handling of Ctrl-C is set aside", "is signal.default_int_handler\n", "is not None\n"),
        ("other threads take signals as well", "threading.current_thread() is threading.main_thread()", "True"),
    ),
    *mutants_of(
        "dflash_backend/engine/llm.py",
        TESTS,
        (
            "what runs goes on after Ctrl-C",
            "                core.abort(list(running))\n",
            "",
        ),
    ),
)
