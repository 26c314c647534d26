"""Defects of experts that stay quantised. The model runs, and its text is worse or no text at all."""

from __future__ import annotations

from tests.mutations.mutant import mutants_of

KERNELS = "tests/kernels/test_quantised_moe.py"
MODELS = "tests/models/test_kept_experts.py"
EQUAL = (f"{KERNELS}::test_experts_equal_the_reference",)
STACKED = (
    f"{KERNELS}::test_a_stack_has_the_numbers_of_its_parts_in_their_order",
    f"{KERNELS}::test_a_stack_of_weights_of_which_one_has_zero_points_has_them_for_all",
)
LOGITS = (f"{MODELS}::test_experts_keep_their_codes_and_give_the_logits_of_their_numbers",)
LEFT = (f"{MODELS}::test_experts_of_which_one_is_not_quantised_are_dequantised_in_its_layer_alone",)
UNLIKE = (f"{MODELS}::test_experts_of_unlike_schemes_are_dequantised_in_their_layer_alone",)
HYBRIDS = (f"{MODELS}::test_a_hybrid_keeps_its_codes_in_all_but_small_gates",)
GATES = (f"{MODELS}::test_small_gates_of_a_delta_net_are_numbers_and_so_is_all_of_it_where_a_part_is",)
ORDERED = (f"{MODELS}::test_experts_with_columns_in_an_order_of_their_own_are_dequantised",)
MADE = (f"{MODELS}::test_fp8_made_at_load_keeps_the_codes_of_experts",)

KEPT_EXPERTS_MUTANTS = (
    *mutants_of(
        "kernels/dflash_kernels/quantised_moe.py",
        EQUAL,
        (
            "up has the scale of gate's row",
            "up = with_scale_of_rows(up, scales_ptr, of_up,",
            "up = with_scale_of_rows(up, scales_ptr, of_gate,",
        ),
        ("kept gate is up", "of_up = of_gate + INNER", "of_up = of_gate"),
        (
            "an expert's kept rows are those of the one before",
            "row = expert * HIDDEN + column",
            "row = tl.maximum(expert - 1, 0) * HIDDEN + column",
        ),
        (
            "packed rows lie as if one expert were all",
            "down.scales.shape[1], down.shape[0],",
            "down.scales.shape[1], hidden,",
        ),
        (
            "groups of kept experts lie as if one expert were all",
            "gate_up.scales.shape[1], gate_up.shape[0],",
            "gate_up.scales.shape[1] // num_experts, gate_up.shape[0],",
        ),
        (
            "kept experts read a token's neighbour",
            "(entries // PER_TOKEN).to(tl.int64)",
            "(tl.maximum(entries // PER_TOKEN, 1) - 1).to(tl.int64)",
        ),
        ("kept experts are not weighed", "(result * weights[None, :])", "(result + 0 * weights[None, :])"),
    ),
    *mutants_of(
        "kernels/dflash_kernels/quantised_moe.py",
        (f"{KERNELS}::test_a_token_has_the_same_bits_among_any_tokens_where_that_is_asked_for",),
        (
            "tiles of batch-invariant kept experts follow the tokens",
            "partial(quantised_experts_mlp, tile=INVARIANT_TILE)",
            "quantised_experts_mlp",
        ),
    ),
    *mutants_of(
        "kernels/dflash_kernels/quantised_moe.py",
        (f"{KERNELS}::test_tiles_change_where_those_of_experts_that_are_numbers_do",),
        (
            "the start compiles a tile of kept experts too few",
            "Tile(tokens=64, outputs=64, stages=3, warps=4),",
            "Tile(tokens=32, outputs=128, stages=3, warps=4),",
        ),
    ),
    *mutants_of(
        "kernels/dflash_kernels/quantised_weight.py",
        STACKED,
        (
            "an expert has the scales of its neighbour",
            "scales=torch.cat([part.scales for part in parts], dim=1), zeros=zeros)",
            "scales=torch.cat([part.scales for part in [*parts[1:], parts[0]]], dim=1), zeros=zeros)",
        ),
        (
            "zero points of an expert are left out where others have none",
            "if any(part.zeros is not None for part in parts):",
            "if all(part.zeros is not None for part in parts):",
        ),
        (
            "all experts have the codes of the first",
            "narrow(along, len(self._parts) * size, size)",
            "narrow(along, 0, size)",
        ),
    ),
    *mutants_of(
        "dflash_backend/models/experts.py",
        LOGITS,
        ("kept up is read before gate", "{gate: inner, up: inner}", "{up: inner, gate: inner}"),
    ),
    *mutants_of(
        "dflash_backend/models/experts.py",
        LEFT,
        (
            "experts stay quantised though what is out of them is not",
            "and source.keeps(dict.fromkeys(downs, hidden), inner, ordered=False)",
            "",
        ),
        (
            "experts stay quantised though up is not",
            "source.keeps(dict.fromkeys(gates + ups, inner), hidden, ordered=False)",
            "source.keeps(dict.fromkeys(gates, inner), hidden, ordered=False)",
        ),
    ),
    *mutants_of(
        "dflash_backend/checkpoints/quantization/keepable.py",
        UNLIKE,
        ("sizes take unlike experts for kept", "if len(each) > 1 or None in each", "if None in each"),
    ),
    *mutants_of(
        "dflash_backend/checkpoints/quantization/keepable.py",
        LEFT,
        ("sizes take all experts for kept", "if len(each) > 1 or None in each", "if False"),
    ),
    *mutants_of(
        "dflash_backend/checkpoints/quantization/keepable.py",
        (f"{MODELS}::test_projections_into_and_out_of_experts_may_be_of_two_schemes",),
        (
            "sizes want one scheme for all of an expert",
            "(match[1], match[2] in INTO_EXPERTS)",
            "(match[1], True)",
        ),
    ),
    *mutants_of(
        "dflash_backend/checkpoints/quantization/keepable.py",
        (f"{MODELS}::test_headers_say_what_experts_take_in_memory",),
        ("sizes forget that blocks of an expert are cut", "below = out  #", "below = below  #"),
    ),
    *mutants_of(
        "dflash_backend/models/hybrid_layers.py",
        HYBRIDS,
        (
            "gated attention is dequantised",
            "return stored.rows(_row_order(spec).to(source.device))",
            "return Linear(stored.weight, stored.bias).rows(_row_order(spec).to(source.device))",
        ),
    ),
    *mutants_of(
        "dflash_backend/models/delta_net.py",
        HYBRIDS,
        (
            "grouped delta nets are dequantised for their small gates",
            "return (large, small) if isinstance(large, QuantisedLinear) else (",
            "return (",
        ),
        (
            "delta nets are dequantised for their small gates",
            "if source.keeps({f",
            "if source.keep_quantised > 1 and source.keeps({f",
        ),
        (
            "rows of kept delta nets stay in the order of their heads",
            "for part in rows.split(list(sizes), dim=1)",
            "for part in rows.flatten().split(list(sizes))",
        ),
        (
            "a delta net's decay is its beta",
            "*parts[1].split(sizes[2:], dim=-1))",
            "*parts[1].flip(-1).split(heads, -1))",
        ),
    ),
    *mutants_of(
        "dflash_backend/models/delta_net.py",
        GATES,
        ("a delta net's parts are kept with one that is not", "if source.keeps({f", "if source.keep_quantised or ({f"),
    ),
    *mutants_of(
        "dflash_backend/checkpoints/quantization/kept.py",
        ORDERED,
        ("experts of desc_act are kept as if in order", "return ordered and all(", "return all("),
    ),
    *mutants_of(
        "dflash_backend/checkpoints/quantization/keepable.py",
        ORDERED,
        ("sizes take experts of desc_act for kept", "own_order = scheme.ordered and", "own_order = False and"),
    ),
    *mutants_of(
        "dflash_backend/checkpoints/quantization/at_load.py",
        MADE,
        ("sizes forget stacked experts made FP8", "len(header.shape) == 3 and name", "len(header.shape) == 4 and name"),
        (
            "stacked experts made FP8 become numbers",
            "return self.keep_quantised and kept_as_one([(",
            "return not kept_as_one([(",
        ),
    ),
)
