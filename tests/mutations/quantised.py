"""Defects of quantised weights. Most stay silent: the model runs, and its text is worse or no text at all."""

from __future__ import annotations

from tests.mutations.mutant import mutants_of

FOLDER = "dflash_backend/checkpoints/quantization"
PUBLISHED = "tests/checkpoints/test_quantised_published.py"
COMPRESSED = "tests/checkpoints/test_quantised_compressed.py"
REFUSALS = "tests/checkpoints/test_quantised_refusals.py"
LOADING = "tests/checkpoints/test_quantised_loading.py"
LAYOUTS = (f"{PUBLISHED}::test_a_published_layout_gives_the_logits_of_its_weights",)
LIBRARY = (f"{COMPRESSED}::test_what_the_library_writes_gives_the_logits_of_its_weights",)
MIXED = (f"{COMPRESSED}::test_each_projection_has_the_scheme_of_its_group_and_fused_ones_of_several",)
AT_LOAD = ("tests/checkpoints/test_fp8_at_load.py",)
ENDS = (f"{PUBLISHED}::test_zero_points_at_both_ends_of_their_codes",)

QUANTISED_MUTANTS = (
    *mutants_of(
        f"{FOLDER}/dequantise.py",
        LAYOUTS,
        (
            "the scales of blocks are transposed",
            "scales.reshape(below, beside)",
            "scales.reshape(beside, below).T",
        ),
        ("GPTQ's and AWQ's scales are not transposed", "scales.T if", "scales.reshape(scales.shape[::-1]) if"),
        (
            "a group of columns begins one late",
            "torch.arange(columns, device=device) //",
            "(torch.arange(columns, device=device) - 1).clamp(min=0) //",
        ),
        (
            "a block of rows begins one late",
            "torch.arange(rows, device=device) //",
            "(torch.arange(rows, device=device) - 1).clamp(min=0) //",
        ),
        ("stored zero points are left out", "if zeros is not None:", "if zeros is None:"),
        ("GPTQ's zero points are as they are stored", "(stored.int() + scheme.zero_offset)", "stored.int()"),
        ("the order of GPTQ's columns is not read", "if Role.ORDER in moved:", "if Role.ORDER not in parts and False:"),
        ("AWQ's rows are where their bits are", "(0, 4, 1, 5, 2, 6, 3, 7)", "(0, 1, 2, 3, 4, 5, 6, 7)"),
        ("AWQ's order is taken for its inverse", "(0, 4, 1, 5, 2, 6, 3, 7)", "(0, 2, 4, 6, 1, 3, 5, 7)"),
        (
            "the upper half of a byte of packed weights comes first",
            "[octets & 0x0F, octets >> 4]",
            "[octets >> 4, octets & 0x0F]",
        ),
        (
            "packed weights are read as bytes",
            "torch.stack([octets & 0x0F, octets >> 4], dim=-1)",
            "torch.stack([octets, octets], dim=-1)",
        ),
    ),
    *mutants_of(
        f"{FOLDER}/published.py",
        (f"{PUBLISHED}::test_projections_of_gptq_have_the_scheme_of_the_first_rule_that_names_them",),
        ("rules of GPTQ's `dynamic` are read past", "(*own, (EVERY, scheme))", "((EVERY, scheme),)"),
        (
            "a rule of GPTQ's `dynamic` leaves the groups as they are",
            'if rule.given("group_size") else',
            "if False else",
        ),
    ),
    *mutants_of(
        f"{FOLDER}/dequantise.py",
        LIBRARY,
        ("packed zero points are left out", "if Role.ZERO in parts:", "if Role.ZERO in parts and False:"),
        ("codes without zero points are not signed", "2.0 ** (scheme.bits - 1)", "0.0"),
        ("a zero point of INT8 is left out", "None if zeros is None else", "None if zeros is not None else"),
    ),
    *mutants_of(
        f"{FOLDER}/dequantise.py",
        ENDS,
        ("a zero point of 0 becomes 16", "+ scheme.zero_offset) % 2**scheme.bits)", "+ scheme.zero_offset))"),
    ),
    *mutants_of(
        f"{FOLDER}/dequantise.py",
        (f"{REFUSALS}::test_a_part_that_is_not_as_the_config_asks_is_named",),
        ("weights that are not finite are loaded", "if not bool(numbers.isfinite().all()):", "if False:"),
    ),
    *mutants_of(
        f"{FOLDER}/dequantise.py",
        (f"{REFUSALS}::test_parts_of_gptq_that_contradict_the_model",),
        (
            "a bias that the model has not is dropped",
            "bool(parts[Role.ZERO_BIAS].any())",
            "not bool(parts[Role.ZERO_BIAS].any())",
        ),
    ),
    *mutants_of(
        f"{FOLDER}/published.py",
        LAYOUTS,
        ("GPTQ v2 is read as v1", '"gptq_v2": 0', '"gptq_v2": 1'),
    ),
    *mutants_of(
        f"{FOLDER}/scheme.py",
        MIXED,
        ("an ignored projection is dequantised", "if any(name in self.ignored for name in names):", "if False:"),
    ),
    *mutants_of(
        f"{FOLDER}/compressed_tensors.py",
        MIXED,
        ("the class of a projection comes before its name", "(target == LINEAR, target", "(target != LINEAR, target"),
        (
            "a pattern comes before a name",
            "target.startswith(PATTERN), target)",
            "not target.startswith(PATTERN), target)",
        ),
        ("a group's own format is not read", 'group.string("format", default=overall)', "overall"),
    ),
    *mutants_of(
        f"{FOLDER}/stored.py",
        (f"{LOADING}::test_sizes_count_weights_and_not_words",),
        (
            "an int32 of packed weights counts as one",
            "    per_word = WORD_BITS // scheme.bits\n",
            "    per_word = 1\n",
        ),
    ),
    *mutants_of(
        f"{FOLDER}/at_load.py",
        AT_LOAD,
        ("FP8 at load has one scale for several rows", "amax(dim=1, keepdim=True)", "amax().expand(len(part), 1)"),
        ("codes at load are not rounded to e4m3", ".to(CODE).float() * scale", "* scale"),
        ("scales at load are left out", ".to(CODE).float() * scale", ".to(CODE).float()"),
        ("the LM head is made FP8", '("lm_head", "gate",', '("gate",'),
        ("routers are made FP8", '"lm_head", "gate",', '"lm_head",'),
        ("experts in one tensor stay as they are", "out, taken, name.endswith(STACKED))", "out, taken, False)"),
        ("a row of zeros becomes no numbers", ".clamp(min=SMALLEST_SCALE)", ""),
        ("weights that are not finite become FP8", "if not bool(largest.isfinite().all()):", "if False:"),
    ),
    *mutants_of(
        "dflash_backend/engine/checks.py",
        AT_LOAD,
        ("a quantised checkpoint is quantised again", "if method is not None:", "if False:"),
    ),
    *mutants_of(
        "dflash_backend/evaluation/compare.py",
        ("tests/evaluation/test_compare.py",),
        ("the second model's questions are not those of the first", "if each in both)", "if own)"),
        ("perplexities of other tokens are compared", "found[1][PERPLEXITY] = None", "pass"),
    ),
    *mutants_of(
        "dflash_backend/evaluation/engine.py",
        ("tests/evaluation/test_compare.py",),
        (
            "a text's perplexity is of its first piece",
            "for output in outputs for entry",
            "for output in outputs[:1] for entry",
        ),
    ),
)
