"""Defects of gpt-oss's layers, which run on and give worse text: sinks, windows, gates and MXFP4."""

from __future__ import annotations

from tests.mutations.mutant import Mutant, mutants_of

MERGE = "kernels/dflash_kernels/attention_merge.py"
PAGED = "kernels/dflash_kernels/paged_attention.py"
PIECES = "kernels/dflash_kernels/invariant_attention.py"
EXPERTS = "kernels/dflash_kernels/moe.py"
FAMILIES = "dflash_backend/checkpoints/families.py"
MXFP4 = "dflash_backend/models/gpt_oss.py"
OF_SINKS = ("tests/kernels/test_attention_sinks.py",)
OF_PIECES = ("tests/kernels/test_invariant_kernels.py",)
OF_FAMILY = ("tests/models/test_families.py::test_a_whole_prompt_gives_the_logits_of_transformers",)
OF_MXFP4 = ("tests/models/test_mxfp4.py",)
OF_EXPERTS = ("tests/kernels/test_moe.py",)

GPT_OSS_MUTANTS = (
    Mutant(
        "the model's sinks do not reach attention",
        "dflash_backend/models/layers.py",
        "cache, context.metadata(self.pattern), w.sinks)",
        "cache, context.metadata(self.pattern), None)",
        OF_FAMILY,
    ),
    Mutant(
        "the sink counts in every piece of a context and in their merge",
        PAGED,
        (
            "        if (at == tile_begin) & (piece_end == tile_end):\n"
            "            acc = with_sink(acc, top, total, sinks_ptr, head)\n"
        ),
        (
            "        acc = with_sink(acc, top, total, sinks_ptr, head)\n"
            "        if (at == tile_begin) & (piece_end == tile_end):\n"
        ),
        OF_SINKS,
    ),
    Mutant(
        "a context that workers share has no sink",
        MERGE,
        "    acc = with_sink(acc, top, total, sinks_ptr, head)\n",
        "",
        OF_SINKS,
    ),
    Mutant(
        "a tile of a prompt has no sink",
        PAGED,
        ("    acc = with_sink(acc, top, total, sinks_ptr, head)\n    store_tile"),
        "    store_tile",
        OF_SINKS,
    ),
    Mutant(
        "a head reads the sink of its place in the group",
        PAGED,
        (
            "        if (at == tile_begin) & (piece_end == tile_end):\n"
            "            acc = with_sink(acc, top, total, sinks_ptr, head)\n"
        ),
        (
            "        if (at == tile_begin) & (piece_end == tile_end):\n"
            "            acc = with_sink(acc, top, total, sinks_ptr, head % GROUP)\n"
        ),
        OF_SINKS,
    ),
    *mutants_of(
        PIECES,
        OF_PIECES,
        (
            "a context of several pieces has no sink under batch_invariant",
            ("    head = kv_head * GROUP + m % GROUP\n    acc = with_sink(acc, top, total, sinks_ptr, head)\n"),
            "    head = kv_head * GROUP + m % GROUP\n",
        ),
        (
            "a context of one piece has no sink under batch_invariant",
            ("        acc = with_sink(acc, top, total, sinks_ptr, head)\n        store_tile"),
            "        store_tile",
        ),
    ),
    Mutant(
        "sinks of several queries of a tile change places under batch_invariant",
        "dflash_backend/attention/invariant_torch.py",
        "sinks.view(kv_heads, heads).repeat_interleave(group.per_tile, dim=1)",
        "sinks.view(kv_heads, heads).repeat(1, group.per_tile)",
        ("tests/attention/test_invariant_torch.py",),
    ),
    Mutant(
        "the mask hides the sink",
        "dflash_backend/attention/torch_backend.py",
        "        mask = F.pad(mask, (0, 1)) if pattern.sinks else mask\n",
        '        mask = F.pad(mask, (0, 1), value=float("-inf")) if pattern.sinks else mask\n',
        ("tests/attention/test_torch_backend.py",),
    ),
    Mutant(
        "a backend without sinks is chosen for layers that have them",
        "dflash_backend/models/interface.py",
        "AttentionPattern(True, cache.sliding_window, sinks)",
        "AttentionPattern(True, cache.sliding_window)",
        ("tests/attention/test_selection.py",),
    ),
    Mutant(
        "full and sliding layers of gpt-oss change places",
        FAMILIES,
        "tuple((SLIDING, FULL)[i % 2] for",
        "tuple((FULL, SLIDING)[i % 2] for",
        ("tests/checkpoints/test_targets.py",),
    ),
    Mutant(
        "the window of gpt-oss is one position wider",
        FAMILIES,
        '        raise config.fail("sliding_window", f"a number of positions for the layers of \'{SLIDING}\'")\n'
        "    return tuple(window if",
        '        raise config.fail("sliding_window", f"a number of positions for the layers of \'{SLIDING}\'")\n'
        "    return tuple((window or 0) + 1 if",
        OF_FAMILY,
    ),
    Mutant(
        "up is taken for the gate",
        "dflash_backend/models/gpt_oss.py",
        "torch.cat([rows[:, 0::2], rows[:, 1::2]], dim=1)",
        "torch.cat([rows[:, 1::2], rows[:, 0::2]], dim=1)",
        OF_FAMILY,
    ),
    Mutant(
        "gate and up are taken for halves",
        "dflash_backend/models/gpt_oss.py",
        "torch.cat([rows[:, 0::2], rows[:, 1::2]], dim=1)",
        "rows",
        OF_MXFP4,
    ),
    *mutants_of(
        MXFP4,
        OF_MXFP4,
        (
            "the upper half of a byte comes first",
            "VALUES[byte & 0x0F], VALUES[byte >> 4]",
            "VALUES[byte >> 4], VALUES[byte & 0x0F]",
        ),
        (
            "the scales of a matrix are transposed",
            "scales.flatten().int()).view(",
            "scales.transpose(-1, -2).flatten().int()).view(",
        ),
    ),
    *mutants_of(
        "kernels/dflash_kernels/mxfp4.py",
        OF_MXFP4,
        ("scales are 128 off", "NOT_A_NUMBER = 32, 127,", "NOT_A_NUMBER = 32, 128,"),
    ),
    *mutants_of(
        EXPERTS,
        OF_EXPERTS,
        ("an expert's bias of up is its gate's", "bias_ptrs + INNER, mask", "bias_ptrs, mask"),
        (
            "an expert's output has no bias",
            "        result += tl.load(bias_ptr + expert * HIDDEN",
            "        result += 0.0 * tl.load(bias_ptr + expert * HIDDEN",
        ),
    ),
    Mutant(
        "the gate is cut off below too",
        "kernels/dflash_kernels/activation.py",
        "    gate = tl.minimum(gate, LIMIT)\n",
        "    gate = tl.minimum(tl.maximum(gate, -LIMIT), LIMIT)\n",
        OF_EXPERTS,
    ),
)
