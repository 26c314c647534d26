"""Defects of the copies of recurrent states: a hit then goes on from the state of another text, which shows in no
error."""

from __future__ import annotations

from tests.mutations.mutant import Mutant, mutants_of

SLOTS = "dflash_backend/core/kv/record_slots.py"
MANAGER = "dflash_backend/core/kv/manager.py"
GROUPS = "dflash_backend/core/kv/groups.py"
STATE = "dflash_backend/models/recurrent_state.py"
RUNNER = "dflash_backend/worker/runner.py"
OF_CORE = ("tests/core/test_state_snapshots.py", "tests/core/test_core_random.py")
OF_HITS = ("tests/worker/test_recurrent_hits.py",)

SNAPSHOT_MUTANTS = (
    *mutants_of(
        MANAGER,
        OF_CORE,
        (
            "a copy is taken for one that is a block behind",
            "hashes, len(chain))]\n",
            "hashes, len(chain)) and max(1, self._longest(hashes, len(chain)) - 1)]\n",
        ),
    ),
    *mutants_of(
        GROUPS,
        OF_CORE,
        (
            "a hit goes on behind its copy, to the last cached block",
            "return next(copies, 0)",
            "return num_blocks if next(copies, 0) else 0",
        ),
        (
            "a copy is found before its step has run",
            "request.pending_snapshots[0][0] <= request.num_computed",
            "request.pending_snapshots[0][0] <= request.num_tokens",
        ),
        (
            "a copy that was to be written by a step that did not run is never written",
            "return self.snapshots.reserved(block_hash)",
            "return None",
        ),
        (
            "copies that are not written yet are kept by requests that are gone",
            "in request.pending_snapshots:\n            self.snapshots.settle(block_hash, is_there=False)\n",
            "in request.pending_snapshots:\n            self.snapshots.settle(block_hash, is_there=True)\n",
        ),
        (
            "a prompt is not cut where it leaves earlier ones",
            "ends = {request.num_cached_blocks * size, ",
            "ends = {",
        ),
        (
            "a prompt is not cut before its end",
            ", (request.prefill_end - 1) // size * size}",
            "}",
        ),
    ),
    *mutants_of(
        SLOTS,
        OF_CORE,
        (
            "copies that were used are given away first",
            "for records in (self._unused, self._used) for each",
            "for records in (self._used, self._unused) for each",
        ),
        (
            "a slot that is given away is still found for its old block",
            "return self._unused.pop(block_hash) if block_hash in self._unused",
            "return self._unused[block_hash] if block_hash in self._unused",
        ),
    ),
    *mutants_of(
        STATE,
        OF_HITS,
        (
            "a copy has the convolution's tail of its slot's last owner",
            "            self.tails.index_copy_(1, target, self.tails.index_select(1, source))\n",
            "",
        ),
        (
            "a copy has the length of its slot's last owner",
            "            self.lengths.index_copy_(0, target, self.lengths.index_select(0, source))\n",
            "",
        ),
    ),
    Mutant(
        "a hit starts from the state that its slot has",
        RUNNER,
        "[(first + slot, self.requests.records[name].index) for slot, name in starts if slot is not None]",
        "[]",
        OF_HITS,
    ),
    Mutant(
        "the state is copied before the step's tokens are in it",
        "dflash_backend/worker/step.py",
        "            states.commit(num_kept)\n            states.pool.copy(copies)\n",
        "            states.pool.copy(copies)\n            states.commit(num_kept)\n",
        OF_HITS,
    ),
)
