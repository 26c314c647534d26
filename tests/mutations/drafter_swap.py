"""Defects of a drafter that takes the place of another one."""

from __future__ import annotations

from tests.mutations.mutant import Mutant, mutants_of

DRAFTER_SWAP_MUTANTS = (
    *mutants_of(
        "dflash_backend/engine_client/supervisor.py",
        ("tests/triton/test_drafter_swaps.py",),
        (
            "a front end is told of the drafter that drafted first",
            "description=text, drafting=drafting)",
            "drafting=drafting)",
        ),
        (
            "a new engine has the drafter that was put back",
            "self._use_drafter(self._drafter_before or self.drafter, said.drafting)",
            "pass",
        ),
        (
            "an engine that died of a drafter starts with it",
            "            self._dead = True\n            self._drop_swaps()\n",
            "            self._dead = True\n",
        ),
        (
            "an engine that dies takes a drafter back that was not compared",
            "self.drafter if asked.window else None",
            "self.drafter",
        ),
    ),
    *mutants_of(
        "dflash_backend/engine/process.py",
        ("tests/engine/test_process.py",),
        (
            "a drafter that hangs keeps others out",
            'the disk may hang")\n            self._loader = None\n',
            'the disk may hang")\n',
        ),
    ),
    *mutants_of(
        "dflash_backend/engine/drafter_loader.py",
        ("tests/engine/test_drafter_loader.py",),
        ("the first drafter is never told of again", "self.drafting = drafting\n            return", "return"),
    ),
    Mutant(
        "a drafter is made by the thread that loads it where ranks share the head",
        "dflash_backend/engine/drafter_loader.py",
        "if self.config.tensor_parallel_size > 1:\n            # It may take rows",
        "if False:\n            # It may take rows",
        (
            "tests/parallel/test_vocabulary_ranks.py::"
            "test_a_drafter_that_is_swapped_in_asks_the_ranks_from_the_thread_that_steps_alone",
        ),
    ),
    *mutants_of(
        "dflash_backend/core/engine.py",
        ("tests/core/test_drafter_swap.py",),
        (
            "drafters are exchanged with a step in flight",
            "outputs)\n        self.collect_drafts()\n        if self._failed_step is not None:\n            return",
            "outputs)\n        if self._failed_step is not None:\n            return",
        ),
        (
            "blocks of requests that ran on count for the new drafter",
            "if request.drafter_epoch == self.scheduler.kv.drafter_epoch:",
            "if True:",
        ),
        (
            "a drafter whose step fails stays",
            "if self._swap is not None and self._swap.exchange is not None:",
            "if False:",
        ),
        (
            "a drafter is taken out of a worker that has not drafted",
            "        self._worker.reset()\n        if self._swap",
            "        if self._swap",
        ),
        (
            "a drafter that was compared is kept in memory",
            "            swap.exchange = None\n\n    def _submit",
            "\n    def _submit",
        ),
        (
            "an engine goes on after an exchange that no step can follow",
            "        except SwapEndsEngine:\n            raise\n",
            "",
        ),
    ),
    *mutants_of(
        "dflash_backend/core/kv/manager.py",
        ("tests/core/test_drafter_swap.py",),
        ("requests publish blocks of two drafters", " and request.drafter_epoch == self.drafter_epoch:", ":"),
        (
            "blocks of the drafter before are found",
            "        self.drafter_epoch += 1\n        self.reset_prefix_cache()\n",
            "        self.drafter_epoch += 1\n",
        ),
    ),
    *mutants_of(
        "dflash_backend/core/drafter_swap.py",
        ("tests/core/test_drafter_swap.py",),
        (
            "a drafter that no longer pays is waited for",
            " or (\n            not drafting_pays and num_blocks >= min(MIN_BLOCKS, self.wanted.window)\n        )",
            "",
        ),
        (
            "few blocks are enough to compare",
            "        if self.before.total < MIN_BLOCKS:\n            return False\n        accepted",
            "        accepted",
        ),
    ),
    *mutants_of(
        "dflash_backend/drafters/exchange.py",
        ("tests/engine/test_drafter_loader.py",),
        ("objects with slots are not looked into", 'getattr(kind, "__slots__", ())', "()"),
        (
            "memory that two tensors share is exchanged twice",
            "pairs.setdefault(mine.data_ptr(), (mine, theirs))",
            "pairs[len(pairs)] = (mine, theirs)",
        ),
        ("drafters that differ are exchanged", "        elif value != another:", "        elif False:"),
        ("what reaches other ranks is taken for a drafter's", ', "described", "_vocabulary"}', ', "described"}'),
    ),
    *mutants_of(
        "dflash_backend/triton/drafter_swaps.py",
        ("tests/triton/test_drafter_swaps.py",),
        (
            "anybody may swap drafters",
            "if not hmac.compare_digest(key.encode(), wanted.admin_key.encode()):",
            "if False:",
        ),
        (
            "a drafter whose client has left is loaded all the same",
            "self._engines.send(index, AbortRequests([swap_id]))",
            "pass",
        ),
        ("one instance of several swaps", "if self._num_instances > 1:", "if False:"),
        (
            "the first engine's word is enough",
            "        if not waiting.engines:\n            self._answer(waiting)",
            "        self._answer(waiting)",
        ),
    ),
)
