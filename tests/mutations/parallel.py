"""Defects of layers that several ranks share. Most stay silent: the model runs, and its text is worse."""

from __future__ import annotations

from tests.mutations.mutant import Mutant, mutants_of

LAYERS = ("tests/models/test_parallel.py::test_shared_layers_compute_what_the_whole_target_does",)

PARALLEL_MUTANTS = (
    *mutants_of(
        "dflash_backend/models/parallel.py",
        LAYERS,
        ("each rank adds the bias of a sum", "if projection in BY_COLUMNS and self._shard.rank > 0:", "if False:"),
        (
            "ranks that share a K/V head take it in turn",
            "return self.rank * num_parts // self.size",
            "return self.rank % num_parts",
        ),
        ("the outputs of attention are not summed", "output=SummedLinear(layer.output, reduce)", "output=layer.output"),
    ),
    Mutant(
        "an engine goes on without a rank",
        "dflash_backend/worker/runner.py",
        "KVWriteError, RankLostError):",
        "KVWriteError):",
        ("tests/engine/test_ranks.py::test_a_rank_that_is_lost_ends_the_engine",),
    ),
)
