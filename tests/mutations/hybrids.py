"""Defects of recurrent layers, which run on and give worse text: their state, its slots, and gated attention."""

from __future__ import annotations

from tests.mutations.mutant import Mutant, mutants_of

RULE = "kernels/dflash_kernels/delta_rule.py"
CHUNKS = "kernels/dflash_kernels/delta_chunks.py"
CONV = "kernels/dflash_kernels/conv_heads.py"
STATE = "dflash_backend/models/recurrent_state.py"
NET = "dflash_backend/models/delta_net.py"
LAYERS = "dflash_backend/models/hybrid_layers.py"
OF_STATE = ("tests/models/test_recurrent_state.py",)
OF_CHUNKS = ("tests/kernels/test_delta_chunks.py",)
OF_CONV_KERNEL = ("tests/kernels/test_conv_heads.py",)
OF_ENGINE = ("tests/worker/test_recurrent_engines.py::test_greedy_text_is_that_of_transformers",)
OF_FAMILY = ("tests/models/test_families.py::test_a_whole_prompt_gives_the_logits_of_transformers",)

HYBRID_MUTANTS = (
    *mutants_of(
        STATE,
        OF_STATE,
        (
            "a state takes in rejected drafts",
            "            count = num_kept.index_select(0, group.rows).long()\n",
            "            count = group.valid.sum(1)\n",
        ),
        (
            "the convolution's tail is that of all drafts",
            "            tail = count[:, None] + torch.arange(",
            "            tail = group.valid.sum(1)[:, None] + torch.arange(",
        ),
        (
            "the convolution's tail is one input too early",
            "            tail = count[:, None] + torch.arange(",
            "            tail = (count - 1).clamp(min=0)[:, None] + torch.arange(",
        ),
        (
            "the convolution's tail is lost between steps",
            "self.pool.tails[layer].index_select(0, group.slots).masked_fill_(fresh, 0.0)",
            "self.pool.tails[layer].index_select(0, group.slots).zero_()",
        ),
        (
            "padding rows write to the slot of request 0",
            "torch.where(index < 0, pool.states.shape[1] - 1, index)",
            "index.clamp(min=0)",
        ),
        (
            "a chunk of few tokens keeps its state as a block that has none rejected",
            "return self.index.shape[1] <= CHUNK",
            "return self.index.shape[1] < 1",
        ),
    ),
    Mutant(
        "the decay of a gated delta net is rounded to the dtype of the weights",
        NET,
        'source.tensor(f"{prefix}A_log", net.num_value_heads, dtype=torch.float32)',
        'source.tensor(f"{prefix}A_log", net.num_value_heads).float()',
        ("tests/models/test_loading.py::test_the_decay_of_a_gated_delta_net_is_not_rounded",),
    ),
    Mutant(
        "a slot keeps its last owner's state",
        STATE,
        "fresh = group.fresh[:, None, None]",
        "fresh = (group.fresh & False)[:, None, None]",
        OF_ENGINE,
    ),
    *mutants_of(
        RULE,
        OF_STATE,
        (
            "the state after no token decays by one",
            "block.decayed.gather(2, last).masked_fill((num_tokens == 0)[:, None, None], 0.0)",
            "block.decayed.gather(2, last)",
        ),
        (
            "a token's update sees that of its own",
            "(mixed[:, :, t, None, :t] @ updates[:, :, :t])",
            "(mixed[:, :, t, None, : t + 1] @ updates[:, :, : t + 1])",
        ),
        (
            "the decay between two tokens is masked behind its exp",
            '    between = between.masked_fill(future, float("-inf")).exp()\n',
            "    between = between.exp() * ~future\n",
        ),
    ),
    *mutants_of(
        NET,
        OF_FAMILY,
        ("the rate of a token is not its sigmoid", "beta = beta.float().sigmoid()", "beta = beta.float().clamp(0, 1)"),
        ("the norm's gate is left out", "* F.silu(gate.float())", "* 1.0"),
    ),
    *mutants_of(
        CONV,
        OF_FAMILY,
        ("keys are not normalised", "per_head(keys), split_values", "per_head(keys) * 1.01, split_values"),
        (
            "a value head reads the key head of its place",
            "x.repeat_interleave(heads.group, dim=1)",
            "x.repeat(1, heads.group, 1, 1)",
        ),
    ),
    *mutants_of(
        CONV,
        OF_CONV_KERNEL,
        (
            "the kernel's convolution has its taps the other way round",
            "(first + offset) * TAPS + tap,",
            "(first + offset) * TAPS + TAPS - 1 - tap,",
        ),
        ("the kernel's queries are not scaled", "offset, x * scale, mask", "offset, x, mask"),
        (
            "a key head of the kernel serves the first of its value heads alone",
            "key_head * GROUP + i) * width",
            "key_head * GROUP) * width",
        ),
    ),
    *mutants_of(
        CHUNKS,
        OF_CHUNKS,
        (
            "a token's system has its own update",
            "earlier = place[:, None] < place\n",
            "earlier = place[:, None] <= place\n",
        ),
        (
            "the second token of a chunk takes nothing from the first",
            "for i in range(1, tl.min",
            "for i in range(2, tl.min",
        ),
        (
            "an update has the rate of the token that reads it",
            "tl.store(inverse_ptr + tile, inverse * beta)",
            "tl.store(inverse_ptr + tile, inverse * beta[:, None])",
        ),
        (
            "a chunk's state lacks the decay of its last token",
            "tl.minimum((chunk + 1) * SIZE, width) - 1",
            "tl.minimum((chunk + 1) * SIZE, width) - 2",
        ),
        (
            "the upper rows of a state are the lower ones",
            "of_high = of_low + HALF_KEY * VALUE_DIM\n",
            "of_high = of_low\n",
        ),
        (
            "a system's decays are masked behind their exp",
            'mixing *= tl.exp(tl.where(seen, between, float("-inf")))',
            "mixing *= tl.exp(between) * seen",
        ),
    ),
    Mutant(
        "blocks of more tokens than few are not compiled at the start",
        "dflash_backend/worker/graphs.py",
        "{min(DELTA_CHUNK, max_tokens)} if model.pool is not None else set()",
        "set()",
        ("tests/benchmarks/test_kernel_variants.py",),
    ),
    Mutant(
        "the numbers of padding tokens reach a state",
        NET,
        "mixed[group.index].masked_fill_(~group.valid[..., None], 0.0)",
        "mixed[group.index]",
        OF_STATE,
    ),
    *mutants_of(
        LAYERS,
        OF_FAMILY,
        (
            "the gate of attention is left out",
            "return attended * gate.sigmoid().view(attended.shape)",
            "return attended",
        ),
        (
            "zero-centred norms multiply by their weight",
            "return 1.0 + weight.float()",
            "return 0.0 + weight.float()",
        ),
    ),
    Mutant(
        "the whole of a head is rotated",
        "dflash_backend/models/rope.py",
        "spec.rotary_dim or spec.head_dim",
        "spec.head_dim",
        OF_FAMILY,
    ),
    Mutant(
        "numbers of a head are rotated with those of the other half",
        "dflash_backend/models/hybrid_layers.py",
        "torch.cat([torch.arange(half), low, torch.arange(half, 2 * half), high])",
        "torch.arange(spec.head_dim)",
        OF_FAMILY,
    ),
    Mutant(
        "gates of attention lie before its keys",
        "dflash_backend/models/hybrid_layers.py",
        "keys[:, order].flatten(), values.flatten(), gates.flatten()",
        "gates.flatten(), keys[:, order].flatten(), values.flatten()",
        OF_FAMILY,
    ),
    Mutant(
        "the shared expert has no gate",
        "dflash_backend/models/mlp.py",
        "self.gate(x).sigmoid() * self.shared.forward(x, ops)",
        "self.shared.forward(x, ops)",
        OF_FAMILY,
    ),
    Mutant(
        "states are brought up to date without the accepted drafts",
        "dflash_backend/worker/step.py",
        "self._commit(step.states, batch.num_new + step.num_accepted.int(), copies)",
        "self._commit(step.states, batch.num_new, copies)",
        OF_ENGINE,
    ),
    Mutant(
        "a hybrid without copies of its states has a prefix cache",
        "dflash_backend/engine/build.py",
        "config.enable_prefix_caching and copies != 0",
        "config.enable_prefix_caching",
        ("tests/worker/test_recurrent_engines.py::test_how_many_copies_there_are",),
    ),
    Mutant(
        "zero-centred norms are rounded to 16 bits",
        LAYERS,
        "return 1.0 + weight.float() if spec.centred_norms else weight",
        "return (1.0 + weight.float()).to(weight.dtype) if spec.centred_norms else weight",
        ("tests/models/test_families.py::test_half_precision_is_as_near_to_float32_as_that_of_transformers",),
    ),
    Mutant(
        "a head of a text part is tied as its text part alone says",
        "dflash_backend/checkpoints/tensor_names.py",
        'return config.boolean("tie_word_embeddings", default=text.boolean("tie_word_embeddings", default=missing))',
        'return text.boolean("tie_word_embeddings", default=False)',
        ("tests/models/test_text_parts.py",),
    ),
)
