"""Defects of the blocks of layers with a window: a query then sees another request's tokens, or a hit nothing's."""

from __future__ import annotations

from tests.mutations.mutant import Mutant, mutants_of

CORE = "dflash_backend/core/kv/groups.py"
GROUP = "dflash_backend/core/scheduler_config.py"
MANAGER = "dflash_backend/core/kv/manager.py"
PLACES = "dflash_backend/worker/batch.py"
OF_CORE = (
    "tests/core/test_window_blocks.py",
    "tests/core/test_core_random.py::test_blocks_of_layers_with_a_window_hold_what_queries_see_in_random_traffic",
)
OF_ENGINE = ("tests/worker/test_window_engines.py",)

WINDOW_MUTANTS: tuple[Mutant, ...] = (
    *mutants_of(
        GROUP,
        OF_CORE,
        (
            "a block of a window is given back a position too early",
            "max(0, position - self.window + 1) // self.block_size",
            "max(0, position - self.window + 2) // self.block_size",
        ),
        (
            "a request holds the blocks of one step in flight at most",
            "-(-2 * self.max_step_tokens // self.block_size)",
            "-(-self.max_step_tokens // (2 * self.block_size))",
        ),
    ),
    *mutants_of(
        CORE,
        OF_CORE,
        (
            "a hit does not look at the first block that its window shows",
            "while end and index >= self._group.first_visible_after(end):",
            "while end and index > self._group.first_visible_after(end):",
        ),
        (
            "blocks of a window are given back while drafts of the row before may be taken back",
            "first = self._group.first_visible(request.num_computed)\n        if",
            "first = self._group.first_visible(request.num_tokens + request.num_pending_drafts)\n        if",
        ),
        (
            "what was given back is given back once more at the end",
            "self._give_back(request.window_block_ids[request.num_window_freed :])",
            "self._give_back(request.window_block_ids)",
        ),
        (
            "blocks of a window stay held",
            "        if first > request.num_window_freed:\n",
            "        if first > request.num_window_freed + 10**9:\n",
        ),
    ),
    *mutants_of(
        MANAGER,
        OF_CORE,
        (
            "a hit is that of the layers without a window",
            "longest = group.longest(hashes, longest)",
            "pass",
        ),
        (
            "what one group shortens a hit to is not asked of the others again",
            "            if longest == num_blocks:\n                return longest\n            num_blocks = longest\n",
            "            return longest\n",
        ),
        (
            "a table grows although the pool of windows is empty",
            "all(group.has_free(missing) for group in self.groups)",
            "self.groups[0].has_free(missing)",
        ),
    ),
    *mutants_of(
        CORE,
        OF_CORE,
        (
            "blocks of windows are not published",
            "            self.pool.publish(request.window_block_ids[index], block_hash, before)\n",
            "            pass\n",
        ),
        (
            "a request takes the first blocks of its window for new ones",
            "row.new_window_block_ids.extend(new)",
            "row.new_window_block_ids.extend(request.window_block_ids[:num_blocks])",
        ),
    ),
    Mutant(
        "a request's row leaves out the blocks of its window that a hit gave it",
        "dflash_backend/core/scheduler.py",
        "        row.new_window_block_ids.extend(request.window_block_ids)\n",
        "",
        OF_CORE,
    ),
    Mutant(
        "a longer chunk leaves out the blocks of windows of the shorter one",
        "dflash_backend/core/scheduler.py",
        "            row.new_window_block_ids[:0] = before.new_window_block_ids\n",
        "",
        OF_CORE,
    ),
    *mutants_of(
        PLACES,
        OF_ENGINE,
        (
            "layers with a window read by the table of the others",
            "replace(layout, block_tables=tables, shared=None, exact=None)",
            "layout",
        ),
        (
            "layers with a window write by the table of the others",
            "torch.where(slots < 0, slots, own)",
            "slots",
        ),
    ),
)
