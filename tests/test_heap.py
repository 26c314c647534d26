"""What loading made is out of the garbage collector's sight."""

from __future__ import annotations

import json
import subprocess
import sys

from dflash_backend.heap import THRESHOLDS

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
