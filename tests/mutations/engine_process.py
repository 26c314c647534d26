"""Defects of how the engine's process is started, asked to end and started again."""

from __future__ import annotations

from tests.mutations.mutant import mutants_of

CLIENT = "dflash_backend/engine_client"
SUPERVISOR = "tests/engine_client/test_supervisor.py"

ENGINE_PROCESS_MUTANTS = (
    *mutants_of(
        f"{CLIENT}/supervisor.py",
        (
            f"{SUPERVISOR}::test_delays_double_up_to_a_minute_until_an_engine_served_and_are_the_longest_for_an_error_of_the_setup",
        ),
        ("delays double for ever", "min(2.0 * self._next_s, LONGEST_DELAY_S)", "2.0 * self._next_s"),
    ),
    *mutants_of(
        f"{CLIENT}/client.py",
        (f"{SUPERVISOR}::test_an_engine_that_cannot_be_prepared_is_tried_again",),
        (
            "a system without place ends all engines",
            "except (OSError, zmq.ZMQError) as error:",
            "except EOFError as error:",
        ),
        (
            "an unprepared engine leaves its folder",
            "made.callback(shutil.rmtree, self._dir, ignore_errors=True)",
            "pass",
        ),
    ),
    *mutants_of(
        "dflash_backend/engine/process.py",
        ("tests/engine/test_process.py",),
        (
            "a stop of all processes of a server ends requests at once",
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
            "signal.signal(signal.SIGTERM, lambda number, frame: loop.end())",
        ),
        (
            "an engine that takes no message is killed",
            "signal.signal(END_SIGNAL, lambda number, frame: loop.end())",
            "signal.signal(END_SIGNAL, signal.SIG_IGN)",
        ),
    ),
)
