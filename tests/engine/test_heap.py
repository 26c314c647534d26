"""What loading made is out of the garbage collector's sight."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys

import pytest

from dflash_backend.heap import THRESHOLDS, collector_at_rest

FREEZE = """
import gc, json
from dflash_backend.heap import freeze_heap
before = len(gc.get_objects())
freeze_heap()
print(json.dumps([before, gc.get_freeze_count(), len(gc.get_objects()), gc.get_threshold()]))
"""


def test_after_loading_the_collector_has_nothing_old_to_look_at():
    """In a process of its own: what is frozen stays so."""
    done = subprocess.run([sys.executable, "-c", FREEZE], capture_output=True, text=True, check=True)
    before, frozen, left, thresholds = json.loads(done.stdout)
    assert frozen > before / 2
    assert left < before / 10
    assert tuple(thresholds) == THRESHOLDS


GIVE_BACK = """
import json
from dflash_backend.heap import give_back_memory, keep_step_buffers
def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) >> 10
keep_step_buffers()
before = resident()
buffers = [bytearray(4 << 20) for _ in range(30)]
kept = bytearray(b"x" * (1 << 20))  # above them, so that the heap does not end there
del buffers
left = resident()
give_back_memory()
print(json.dumps([left - before, resident() - before]))
"""


def test_what_loading_took_is_given_back():
    done = subprocess.run([sys.executable, "-c", GIVE_BACK], capture_output=True, text=True, check=True)
    left, given_back = json.loads(done.stdout)
    assert left > 100
    assert given_back < 10


IMPORTS = """
import gc, json
from dflash_backend.heap import collector_at_rest
looks = []
gc.callbacks.append(lambda phase, info: looks.append(phase))
with collector_at_rest():
    import dflash_backend.checkpoints, dflash_backend.text.request
    during = [gc.isenabled(), len(looks)]
print(json.dumps([*during, gc.isenabled(), gc.get_freeze_count() > 10_000]))
"""


def test_imports_are_not_looked_through_for_garbage_meanwhile_or_later():
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [False, 0, True, True]


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with collector_at_rest():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_tests_themselves_run_beside_a_frozen_heap():
    assert gc.isenabled()
    assert gc.get_freeze_count() > 100_000


# A thread's buffers of a step, as large as the KV that attention gathers at once, again and again.
STEPS = """
import resource, sys, threading
from dflash_backend.heap import keep_step_buffers
if sys.argv[1:]:
    keep_step_buffers()
def faults():
    for step in range(60):
        if step == 20:
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        buffers = [bytes(1 << 20) and bytearray(b"x" * (1 << 20)) for _ in range(3)]
        del buffers
    print(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
thread = threading.Thread(target=faults)
thread.start()
thread.join()
"""


@pytest.mark.parametrize(
    ("argv", "environ", "kept"),
    [((), {}, False), (("keep",), {}, True), (("keep",), {"MALLOC_TRIM_THRESHOLD_": "131072"}, False)],
)
def test_a_thread_keeps_the_memory_of_its_steps_unless_the_operator_wants_otherwise(
    argv: tuple[str, ...], environ: dict[str, str], kept: bool
) -> None:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", STEPS, *argv], env=inherited | environ, capture_output=True, text=True, check=True
    )
    assert (int(done.stdout) < 40) == kept, done.stdout
