"""Defects of layers that several ranks share. Most stay silent: the model runs, and its text is worse."""

from __future__ import annotations

from tests.mutations.mutant import Mutant, mutants_of

LAYERS = ("tests/parallel/test_shards.py::test_shared_layers_compute_what_the_whole_target_does",)

SUMS = "dflash_backend/parallel/target.py"
SHARD = "dflash_backend/parallel/shard.py"
QUANTISED = ("tests/parallel/test_shards.py::test_ranks_read_their_part_of_quantised_weights",)
KEPT = ("tests/models/test_kept_slices.py",)
HYBRID = ("tests/parallel/test_ranks.py::test_ranks_of_a_hybrid_preempt_copy_states_and_adapt_as_one_does",)

PARALLEL_MUTANTS = (
    *mutants_of(
        "dflash_backend/parallel/links.py",
        ("tests/parallel/test_ranks.py::test_a_pause_of_all_is_no_silence_of_a_rank",),
        ("ranks of a container that was paused are lost", "min(now - since, 2 * BEAT_S)", "now - since"),
    ),
    *mutants_of(
        SHARD,
        LAYERS,
        ("each rank adds the bias of a sum", "if is_of_sum and self._shard.rank > 0:", "if False:"),
        (
            "ranks that share a K/V head take it in turn",
            "return self.rank * num_parts // self.size",
            "return self.rank % num_parts",
        ),
        ("each rank adds the biases of experts", 'kind == "down_proj_bias" or (', "("),
        ("each rank has the sinks of the first heads", ' or kind == "sinks"', ""),
        ("a rank has keys of a delta net for its values", "2 * size * keys + rank * values", "rank * values"),
        (
            "a rank's keys of a delta net are those of its queries",
            "((size + rank) * keys, keys)",
            "(rank * keys, keys)",
        ),
        (
            "layers of Gemma 4 that see everything have the heads of the others",
            'return self._spec.of_layer(int(words[words.index("layers") + 1])).num_kv_heads',
            "return self._spec.num_kv_heads",
        ),
    ),
    *mutants_of(
        SUMS,
        LAYERS,
        (
            "the outputs of experts are not summed",
            "self.reduce(self.part.forward(x, ops))",
            "self.part.forward(x, ops)",
        ),
        (
            "the outputs of attention are not summed",
            "output = SummedLinear(layer.output, reduce)",
            "output = layer.output",
        ),
        (
            "the outputs of delta nets are not summed",
            "output=SummedLinear(layer.net.output, reduce)",
            "output=layer.net.output",
        ),
        (
            "embeddings do not reach the other ranks",
            "_summed_layer(layer, reduce) for layer in weights.layers], share=reduce",
            "_summed_layer(layer, reduce) for layer in weights.layers]",
        ),
        (
            "Gemma 4's experts are not summed",
            "self.reduce(super().forward(hidden, ops, eps))",
            "super().forward(hidden, ops, eps)",
        ),
    ),
    *mutants_of(
        SUMS,
        HYBRID,
        ("other ranks copy no states", "self._pool.copy(step.pairs)", "pass"),
        ("other ranks keep states of rejected drafts", "self._rows.commit(step.num_kept)", "pass"),
    ),
    *mutants_of(
        "dflash_backend/checkpoints/quantization/slices.py",
        QUANTISED,
        (
            "scales of the whole weight begin a rank's columns",
            "return None if block is None else (axis, block)",
            "return None",
        ),
        ("blocks that ranks share are cut", "if start % step or (stop % step and stop != shape[dim]):", "if False:"),
        ("columns of a rank are in the groups of rank 0", "order - start // size", "order"),
    ),
    *mutants_of(
        "dflash_backend/checkpoints/quantization/slices.py",
        KEPT,
        ("a part that ends with a cut block is dequantised", "(stop % step and stop != shape[dim])", "stop % step"),
        ("zero points of rows in blocks are cut within a word", "per_word * (block or 1)", "per_word"),
        (
            "zero points of all rows are cut in words",
            "if Role.ZERO in stored.tensors and scheme.layout is Layout.PACKED and scheme.block[0] is None:",
            "if False:",
        ),
    ),
    *mutants_of(
        "dflash_backend/checkpoints/quantization/kept.py",
        KEPT,
        (
            "a weight whose block a border cuts is kept",
            "return not any(splits_block(",
            "return True or not any(splits_block(",
        ),
        (
            "columns of a rank are in the groups of rank 0 in codes",
            "return groups[start:stop] - start // (stored",
            "return groups[:stop - start] - 0 // (stored",
        ),
        (
            "parts of one weight have the scales of whole blocks",
            "scales.append(part.scales.repeat_interleave(part.rows, dim=0)[:rows])",
            "scales.append(part.scales)",
        ),
        (
            "runs of a rank's rows are read from the first",
            "parts = read_parts(stored, read, whole, taken.dim, start, stop)",
            "parts = read_parts(stored, read, whole, taken.dim, 0, stop - start)",
        ),
    ),
    *mutants_of(
        "dflash_backend/checkpoints/quantization/at_load.py",
        KEPT,
        (
            "kept FP8 at load has the first rank's columns",
            "made.codes.new_empty(shape), taken)",
            "made.codes.new_empty(shape), replace(taken, parts=(0,)))",
        ),
    ),
    *mutants_of(
        SHARD,
        KEPT,
        (
            "ranks dequantise what they share",
            "whole.dtype, whole.device, whole.keep_quantised",
            "whole.dtype, whole.device",
        ),
        (
            "a rank keeps the whole of a weight",
            "return self._whole.read_kept(name, out_features, in_features, self._slice(name))",
            "return self._whole.read_kept(name, out_features, in_features)",
        ),
    ),
    *mutants_of(
        SUMS,
        KEPT,
        (
            "a sum of ranks dequantises its weight",
            "return self._reduce(self._part(x))",
            "return self._reduce(self.product(x, self._part.weight, self.bias))",
        ),
    ),
    *mutants_of(
        "dflash_backend/parallel/sums.py",
        ("tests/parallel/test_sums.py",),
        ("a sum overwrites what a slow rank has not read", "views[self._count % 2]", "views[0]"),
        ("a rank does not wait for the last one", "in range(self._shard.size):", "in range(self._shard.size - 1):"),
        ("terms of 16 bits are rounded after each", "total = terms[0].float()", "total = terms[0].clone()"),
        ("the third rank is left out", "for term in terms[2:]", "for term in terms[3:]"),
        (
            "a lost rank is waited for",
            "if reason := self._lost():\n                raise RuntimeError(reason)",
            "if False:\n                raise RuntimeError(reason)",
        ),
    ),
    Mutant(
        "a rank that was killed while it started is taken for a fault of the settings",
        "dflash_backend/parallel/group.py",
        "raise RuntimeError(words) if failure.is_lost else ConfigError(words)",
        "raise ConfigError(words)",
        ("tests/parallel/test_ranks.py::test_a_rank_that_ends_while_it_starts_is_lost_and_no_fault_of_the_settings",),
    ),
    Mutant(
        "what a remote rank said is lost where its end shows first",
        "dflash_backend/parallel/remote.py",
        "words = self._last_words(rank)",
        'words = ""',
        ("tests/parallel/test_remote_ranks.py::test_a_rank_that_cannot_load_says_why_and_where",),
    ),
    Mutant(
        "a rank that says nothing while it starts is taken for ready",
        "dflash_backend/parallel/local.py",
        'return StartFailure(rank, f"it has said nothing for {silence_s:g} s", is_lost=True)',
        "return None",
        ("tests/parallel/test_ranks.py::test_a_rank_that_says_nothing_while_it_starts_is_an_error_and_ended",),
    ),
    Mutant(
        "a view is sent with all of its table",
        "dflash_backend/parallel/links.py",
        "if isinstance(value, torch.Tensor):",
        "if False:",
        ("tests/parallel/test_sums.py",),
    ),
    Mutant(
        "FP8 at load has a scale for a rank's part of a row",
        "dflash_backend/checkpoints/quantization/at_load.py",
        "whole = out if taken is None else out.new_empty(taken.whole(out.shape))\n        read(name, whole)\n",
        "whole, taken = out, read(name, out, taken)\n",
        ("tests/parallel/test_shards.py::test_fp8_at_load_rounds_whole_rows",),
    ),
    Mutant(
        "a rank has gates of experts alone, another ups",
        SHARD,
        "(rank, size + rank), 2 * size",
        "(2 * rank, 2 * rank + 1), 2 * size",
        ("tests/parallel/test_shards.py::test_experts_in_one_tensor_are_shared",),
    ),
    Mutant(
        "a rank takes the first parts of experts in place of its own",
        SHARD,
        "Slice(GPT_OSS_EXPERTS[kind], (rank,), size)",
        "Slice(GPT_OSS_EXPERTS[kind], (0,), size)",
        ("tests/parallel/test_shards.py::test_experts_in_mxfp4_are_shared",),
    ),
    Mutant(
        "an engine goes on without a rank",
        "dflash_backend/worker/runner.py",
        "KVWriteError, RankLostError):",
        "KVWriteError):",
        ("tests/parallel/test_ranks.py::test_a_rank_that_is_lost_ends_the_engine",),
    ),
)
