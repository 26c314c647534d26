"""Defects of how a drafter's checkpoint is read and applied, and of how acceptance is measured: each stays lossless,
and shows as lower acceptance, or as a figure that is compared with the wrong one."""

from __future__ import annotations

from tests.mutations.mutant import Mutant, mutants_of

DRAFTERS_PACKAGE = "dflash_backend/drafters"
DFLASH = f"{DRAFTERS_PACKAGE}/dflash"
DRAFTER = f"{DFLASH}/drafter.py"
LOGITS = ("tests/oracle/test_golden.py::test_draft_logits_are_those_of_the_authors_code",)
FEATURES = ("tests/oracle/test_golden.py::test_features_are_those_of_the_authors_code_the_last_layers_too",)
READ = "tests/drafters/test_dflash_config.py::"
LAYER_IDS = ("tests/drafters/test_layer_ids.py",)
INSPECT = "tests/cli/test_inspect.py::"
CONFIG_ALONE = ("tests/cli/test_inspect_config.py",)
SEAM = "tests/drafters/test_seam.py::"
EMBEDDED = ("tests/drafters/test_target_embedding.py",)
NAMED = ("tests/checkpoints/test_tensor_names.py",)
TIED = ("tests/checkpoints/test_tied_heads.py",)
DESCRIBED = ("tests/checkpoints/test_describe.py",)
LOOKUP = "kernels/dflash_kernels/prompt_lookup.py"
LOOKED_UP = ("tests/kernels/test_prompt_lookup.py",)
NGRAM = ("tests/drafters/test_ngram.py",)
BESIDE = ("tests/drafters/test_lookup_beside.py",)

DRAFTERS_MUTANTS = (
    Mutant(
        "nothing is looked up beside a drafter",
        "dflash_backend/worker/step.py",
        "if self.lookup is not None:",
        "if False:",
        BESIDE,
    ),
    *mutants_of(
        f"{DRAFTERS_PACKAGE}/ngram/drafter.py",
        BESIDE,
        (
            "a row that nothing matched in draws its drafts from its last token",
            "torch.where(matched[:, 0] > 0, batch.num_drafts, 0)",
            "batch.num_drafts",
        ),
        ("a match is as sure as its tokens are many, on no scale", "matched - UNSURE_MATCH if", "matched if"),
    ),
    *mutants_of(
        f"{DRAFTERS_PACKAGE}/ngram/config.py",
        BESIDE,
        (
            "the longest n-gram beside a drafter is that of n-grams alone",
            "_spec_of(config, DEFAULT_MIN_BESIDE, DEFAULT_MAX_BESIDE)",
            "_spec_of(config, DEFAULT_MIN_BESIDE, DEFAULT_MAX)",
        ),
        (
            "tokens are looked up beside a drafter unasked",
            "    if config.prompt_lookup_min is None and config.prompt_lookup_max is None:\n        return None\n",
            "",
        ),
    ),
    *mutants_of(
        "kernels/dflash_kernels/draft_choice.py",
        (*BESIDE, "tests/kernels/test_draft_choice.py"),
        ("what is looked up is always taken", "takes = gains[request] >= 0", "takes = True"),
        ("the worse block is taken", "accepted - worth if last > 0 else worth - accepted", "worth - accepted"),
        (
            "a block that was right so far would have had no more",
            "if would > accepted else float(would)",
            "if False else float(would)",
        ),
        ("a gain grows without end", "min(max(mean, -MOST_GAIN), MOST_GAIN)", "mean"),
        ("the kernel always takes what is looked up", "takes = contest & (mean >= 0)", "takes = contest"),
        ("the kernel keeps the block that it takes", "tl.where(takes, own, found)", "found"),
    ),
    Mutant(
        "what was looked up judges the drafter",
        "dflash_backend/core/engine.py",
        "if request.looks_up:\n                    self._spec_counts",
        "if False:\n                    self._spec_counts",
        BESIDE,
    ),
    Mutant(
        "what was looked up hides a drafter that is of no use",
        "dflash_backend/triton/activity_log.py",
        "stats.spec_decoding.num_drafts - stats.lookup.num_drafts",
        "stats.spec_decoding.num_drafts",
        ("tests/triton/test_activity_log.py",),
    ),
    Mutant(
        "vLLM's n-grams are looked up beside a drafter",
        "dflash_backend/triton/model_config.py",
        "            settings.pop(name, None)\n",
        "            pass\n",
        ("tests/triton/test_model_config.py",),
    ),
    Mutant(
        "a drafter that takes another's place is said to draft alone",
        "dflash_backend/engine/drafter_loader.py",
        "dataclasses.replace(self.pair, draft=spec).drafting",
        "spec.summary(self.pair.num_speculative_tokens)",
        BESIDE,
    ),
    Mutant(
        "positions are rotated in 16 bits",
        "dflash_backend/models/rope.py",
        "table.index_select(0, positions) for",
        "table.index_select(0, positions % 2**15) for",
        ("tests/worker/test_long_positions.py::test_drafts_across_a_border_are_those_of_a_dense_drafter",),
    ),
    *mutants_of(
        "dflash_backend/checkpoints/rope.py",
        ("tests/checkpoints/test_rope.py", "tests/checkpoints/test_targets.py"),
        ("a drafter's mrope_section refuses it", "text_alone=partial or drafter", "text_alone=partial"),
        (
            "the attn_factor of yarn is read past",
            '    attention_factor *= entry.number("attn_factor", default=1.0, high=MAX_FACTOR)\n',
            "",
        ),
        (
            "a length beside the file's scaling wins over that of the setting rope_scaling",
            "    changes |= {ORIGINAL: None} if given.given(ORIGINAL) else {}\n",
            "",
        ),
    ),
    Mutant(
        "a target of dual chunk attention offers all of its positions",
        "dflash_backend/checkpoints/decoder_fields.py",
        "min(max_positions, one_chunk(config) or max_positions)",
        "max_positions",
        ("tests/checkpoints/test_targets.py",),
    ),
    Mutant(
        "a drafter that reaches less far than requests is not said",
        f"{DRAFTERS_PACKAGE}/pairing.py",
        "if draft is None or draft.decoder.max_len >= max_model_len:",
        "if True:",
        ("tests/engine/test_build.py::test_a_drafter_that_reaches_less_far_than_requests_is_said",),
    ),
    *mutants_of(
        "dflash_backend/engine/inspection.py",
        (
            f"{INSPECT}test_layers_with_a_window_keep_few_blocks_of_a_request",
            f"{INSPECT}test_the_kv_in_fp8_has_scales_and_is_the_targets_alone",
        ),
        (
            "inspect: a long request keeps all blocks of its windows",
            "        kept -= max(0,",
            "        kept -= 0 * max(0,",
        ),
        (
            "inspect: blocks of windows have no place for drafts",
            "window_group(EngineConfig(), max(of_layers), num_drafts)",
            "window_group(EngineConfig(), max(of_layers), 0)",
        ),
        (
            "inspect: KV in FP8 has no scales",
            "per_token = bytes_per_token(decoder.caches, dtype)",
            "per_token = bytes_per_token(decoder.caches, torch.uint8 if dtype == FP8 else dtype)",
        ),
    ),
    Mutant(
        "a prefix that was not found counts as a hit",
        "checks/prefix.py",
        "measured.fewest_cached_tokens < MIN_HIT_SHARE * measured.prefix_tokens",
        "False",
        ("tests/benchmarks/test_bounds.py::test_a_prefix_measurement_names_each_bound_that_is_missed",),
    ),
    Mutant(
        "the last layer's feature is taken before the norm, as for speculators",
        DRAFTER,
        "i + 1 if i == last and spec.normed_last_layer else i",
        "i",
        FEATURES,
    ),
    Mutant(
        "input_embedding_scale is read and not applied",
        DRAFTER,
        "if model.spec.input_embedding_scale != 1:",
        "if False:",
        LOGITS,
    ),
    Mutant(
        "the logits' soft cap is read and not applied", DRAFTER, "if form.softcap is not None:", "if False:", LOGITS
    ),
    Mutant(
        "layers that slide by max_window_layers are not causal",
        f"{DFLASH}/config.py",
        "return tuple(window is not None for window in qwen_windows(config, num_layers))",
        "return (False,) * num_layers",
        LOGITS,
    ),
    Mutant(
        "the last of several fields names the layers",
        f"{DRAFTERS_PACKAGE}/layer_ids.py",
        "chosen, name = found[0]",
        "chosen, name = found[-1]",
        LAYER_IDS,
    ),
    Mutant(
        "boundary ids are taken for layer ids",
        f"{DRAFTERS_PACKAGE}/layer_ids.py",
        "tuple(boundary - 1 for boundary in boundary_ids)",
        "tuple(boundary_ids)",
        LAYER_IDS,
    ),
    Mutant(
        "the layers that a drafter reads are captured one further on",
        DRAFTER,
        "i + 1 if i == last and spec.normed_last_layer else i for",
        "min(i + 1, last + 1) for",
        FEATURES,
    ),
    Mutant(
        "what DeepSpec saves as DFlash is called DSpark",
        f"{DRAFTERS_PACKAGE}/dspark/config.py",
        'return "DSpark" if self.markov is not None or self.has_confidence_head else "DFlash"',
        'return "DSpark"',
        CONFIG_ALONE,
    ),
    Mutant(
        "a config alone says whose the embedding is",
        f"{DRAFTERS_PACKAGE}/spec.py",
        "return self.path.is_file()",
        "return False",
        CONFIG_ALONE,
    ),
    Mutant(
        "dflash_config.layer_ids are read as layer ids",
        f"{DFLASH}/config.py",
        '("dflash_config", "layer_ids", BOUNDARY)',
        '("dflash_config", "layer_ids", LAYER)',
        LAYER_IDS,
    ),
    Mutant(
        "default layers are taken without a word",
        f"{DFLASH}/config.py",
        "return ids, (note,)",
        "return ids, ()",
        DESCRIBED,
    ),
    *mutants_of(
        f"{DRAFTERS_PACKAGE}/base.py",
        EMBEDDED,
        (
            "a drafter's embedding is scaled as the target's whatever its format",
            "self.target.embed(token_ids, self.model.spec.scales_embedding)",
            "self.target.embed(token_ids)",
        ),
    ),
    Mutant(
        "a drafter of z-lab reads the stored rows of Gemma 4",
        f"{DFLASH}/config.py",
        "scales_embedding=True",
        "scales_embedding=False",
        EMBEDDED,
    ),
    Mutant(
        "ranks give a drafter scaled rows whatever it asks for",
        "dflash_backend/parallel/vocabulary.py",
        "self._target.embed(task.token_ids, task.scaled)",
        "self._target.embed(task.token_ids)",
        ("tests/parallel/test_shards.py::test_ranks_give_a_drafter_the_rows_that_it_asks_for",),
    ),
    Mutant(
        "a drafter in vain is not warned of",
        "dflash_backend/triton/reporter.py",
        "is not None and self.has_drafter():",
        "is not None and not self.has_drafter():",
        ("tests/triton/test_reporter.py::test_a_drafter_that_drafts_in_vain_is_warned_of_in_the_log",),
    ),
    *mutants_of(
        "dflash_backend/checkpoints/tensor_names.py",
        NAMED,
        (
            "one prefix is taken away",
            "while len(words) > 1 and words[0] in OUTER:",
            "if len(words) > 1 and words[0] in OUTER:",
        ),
        ("wrappers within a name stay", "if word not in WRAPPERS]", "if word not in WRAPPERS[:1]]"),
    ),
    Mutant(
        "a tensor is looked for by the name that it has here",
        "dflash_backend/checkpoints/weights.py",
        "get_slice(header.name)",
        "get_slice(name)",
        NAMED,
    ),
    Mutant(
        "a tensor that is read ahead is looked for by the name that it has here",
        "dflash_backend/checkpoints/read_ahead.py",
        "[self._headers[name].name]",
        "[name]",
        (f"{NAMED[0]}::test_so_are_shards_with_an_index_and_tensors_that_are_read_ahead",),
    ),
    Mutant(
        "lists of a quantisation do not mean the names in the files",
        "dflash_backend/checkpoints/quantization/scheme.py",
        "names = {projection, _stored_projection(projection, headers)}",
        "names = {projection}",
        NAMED,
    ),
    Mutant(
        "a head of other numbers is dropped where the config says tied",
        "dflash_backend/checkpoints/targets.py",
        "have_equal_numbers(head, embedding)",
        "True",
        TIED,
    ),
    Mutant(
        "an equal head is kept apart",
        "dflash_backend/checkpoints/targets.py",
        "have_equal_numbers(head, embedding)",
        "False",
        TIED,
    ),
    *mutants_of(
        "dflash_backend/checkpoints/decoder_fields.py",
        ("tests/checkpoints/test_targets.py",),
        (
            "a dtype of auto is a dtype",
            "_dtype_of(tensors) if first == AUTO else",
            "_dtype_of(tensors) if not given else",
        ),
        ("of several dtypes that with the fewest bytes counts", "-sizes[kind]", "sizes[kind]"),
        ("scales of quantised weights count as weights", "not in PARTS:", "not in ():"),
    ),
    Mutant(
        "DeepSpec's EAGLE-3 names boundary ids",
        f"{DRAFTERS_PACKAGE}/eagle3/config.py",
        'DEEPSPEC_FIELDS = (("", "target_layer_ids", LAYER),)',
        'DEEPSPEC_FIELDS = (("", "target_layer_ids", BOUNDARY),)',
        ("tests/drafters/test_eagle3_config.py::test_a_drafter_of_deepspec_is_read",),
    ),
    Mutant(
        "unknown fields are passed over without a word",
        f"{DRAFTERS_PACKAGE}/fields.py",
        "value is not None and value is not False",
        "value is not None and False",
        DESCRIBED,
    ),
    Mutant(
        "a k of the whole block is kept",
        f"{DFLASH}/config.py",
        "return possible, (note,)",
        "return k, (note,)",
        (READ + "test_what_a_config_says_is_read",),
    ),
    Mutant(
        "windows at the top level of a speculators config are not read",
        f"{DRAFTERS_PACKAGE}/speculators.py",
        "JsonReader({**layer.data, **outer}, layer.where)",
        "layer",
        (READ + "test_what_a_config_says_is_read",),
    ),
    Mutant(
        "use_aux_hidden_state is not read",
        f"{DFLASH}/config.py",
        'if not config.boolean("use_aux_hidden_state", default=True):',
        "if False:",
        (READ + "test_what_would_be_misread_is_refused_by_field",),
    ),
    Mutant(
        "a hit ends with drafter KV of another text",
        "dflash_backend/core/request.py",
        "config.block_size, config.reads_next_tokens, sampling",
        "config.block_size, False, sampling",
        (SEAM + "test_a_hit_ends_where_its_context_would_be_that_of_another_text",),
        (("dflash_backend/core/kv/manager.py", "int(config.reads_next_tokens)", "0"),),
    ),
    Mutant(
        "the drafter is given each position's own token for the next one",
        "dflash_backend/worker/step.py",
        "context.positions + 1]",
        "context.positions]",
        (SEAM + "test_another_drafter_is_lossless_through_the_same_engine",),
    ),
    *mutants_of(
        LOOKUP,
        LOOKED_UP,
        ("drafts begin with the token that matched", "text[end + 1 + column", "text[end + column"),
        ("drafts are read behind the anchor", "column % (anchor - end)", "column"),
        ("an n-gram that is too short is proposed", "        if n >= min_ngram:\n", "        if True:\n"),
        ("n-grams longer than the longest are looked up", "range(1, max_ngram + 1)", "range(1, max_ngram + 2)"),
        ("the earliest match is taken", "int(found[-1])", "int(found[0])"),
        ("a row that does not draft is looked up", " & (num_drafts.numpy() > 0)", ""),
        ("kernel: drafts begin with the token that matched", "anchor - period + 1 +", "anchor - period +"),
        ("kernel: drafts are read behind the anchor", "+ 1 + column % period", "+ 1 + column"),
        ("kernel: the anchor's n-gram matches itself", "matches = end < anchor", "matches = end <= anchor"),
        ("kernel: an n-gram that is too short is proposed", "length >= MIN_NGRAM", "length > 0"),
        ("kernel: a text's last block is not searched", "range(0, anchor, BLOCK)", "range(0, anchor - BLOCK, BLOCK)"),
    ),
    Mutant(
        "prompt lookup reserves positions for queries that it does not run",
        f"{DRAFTERS_PACKAGE}/ngram/drafter.py",
        "lookahead_base = None",
        "lookahead_base = 0",
        NGRAM,
    ),
    Mutant(
        "the least n of prompt lookup is not passed on",
        f"{DRAFTERS_PACKAGE}/ngram/drafter.py",
        "spec.min_ngram, spec.max_ngram",
        "spec.max_ngram, spec.max_ngram",
        NGRAM,
    ),
    Mutant(
        "mask queries past the 8th are rotated as the 8th",
        "kernels/dflash_kernels/cpu_step.h",
        "      if (i > 0) out.ids[at] = placeholder;\n",
        "      if (i > 0) out.ids[at] = placeholder;\n      if (i > 8) out.positions[at] = anchor + 8;\n",
        ("tests/oracle/test_golden.py",),
        more=(
            (
                "kernels/dflash_kernels/prepare_draft.py",
                ("positions, covered\n    )\n    ids = tl.where(covered & (column > 0), placeholder_id, ids)"),
                (
                    "positions, covered\n"
                    "    )\n"
                    "    positions = tl.minimum(positions, anchor + 8)\n"
                    "    ids = tl.where(covered & (column > 0), placeholder_id, ids)"
                ),
            ),
        ),
    ),
    Mutant(
        "the mean acceptance length is the pooled one",
        "dflash_backend/evaluation/run.py",
        "mean_acceptance_length=mean_acceptance_length(answer.counts for answer in answers)",
        "mean_acceptance_length=SpecDecodingStats.total(answer.counts for answer in answers).acceptance_length",
        ("tests/evaluation/test_run.py", "tests/evaluation/test_published.py"),
    ),
)
