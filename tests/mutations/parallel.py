"""Defects of layers that several ranks share. Most stay silent: the model runs, and its text is worse."""

from __future__ import annotations

from tests.mutations.mutant import Mutant, mutants_of

LAYERS = ("tests/models/test_parallel.py::test_shared_layers_compute_what_the_whole_target_does",)

PARALLEL_MUTANTS = (
    *mutants_of(
        "dflash_backend/models/parallel.py",
        LAYERS,
        ("each rank adds the bias of a sum", "if is_of_sum and self._shard.rank > 0:", "if False:"),
        (
            "ranks that share a K/V head take it in turn",
            "return self.rank * num_parts // self.size",
            "return self.rank % num_parts",
        ),
        (
            "the outputs of experts are not summed",
            "self.reduce(self.part.forward(x, ops))",
            "self.part.forward(x, ops)",
        ),
        ("each rank adds the biases of experts", 'kind == "down_proj_bias" or (', "("),
        (
            "each rank has the sinks of the first heads",
            '_Slice(0, (shard.rank,), shard.size) if kind == "sinks"',
            '_Slice(0, (0,), shard.size) if kind == "sinks"',
        ),
        ("the outputs of attention are not summed", "output=SummedLinear(layer.output, reduce)", "output=layer.output"),
    ),
    Mutant(
        "a rank has gates of experts alone, another ups",
        "dflash_backend/models/parallel.py",
        "(rank, size + rank), 2 * size",
        "(2 * rank, 2 * rank + 1), 2 * size",
        ("tests/models/test_parallel.py::test_experts_in_one_tensor_are_shared",),
    ),
    Mutant(
        "a rank takes the first parts of experts in place of its own",
        "dflash_backend/models/parallel.py",
        "_Slice(GPT_OSS_EXPERTS[kind], (rank,), size)",
        "_Slice(GPT_OSS_EXPERTS[kind], (0,), size)",
        ("tests/models/test_parallel.py::test_experts_in_mxfp4_are_shared",),
    ),
    Mutant(
        "an engine goes on without a rank",
        "dflash_backend/worker/runner.py",
        "KVWriteError, RankLostError):",
        "KVWriteError):",
        ("tests/engine/test_ranks.py::test_a_rank_that_is_lost_ends_the_engine",),
    ),
)
