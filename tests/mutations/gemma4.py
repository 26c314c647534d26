"""Defects of Gemma 4's layers, which run on and give worse text."""

from __future__ import annotations

from tests.mutations.mutant import Mutant, mutants_of

MODEL = "dflash_backend/models/gemma4.py"
TARGET = "dflash_backend/models/decoder.py"
OF_FAMILY = ("tests/models/test_families.py::test_a_whole_prompt_gives_the_logits_of_transformers",)
OF_READING = ("tests/checkpoints/test_targets.py",)

GEMMA4_MUTANTS = (
    *mutants_of(
        MODEL,
        OF_FAMILY,
        (
            "values are not normed",
            "self.ops.rms_norm(heads, w.value_norm, self.eps).view(values.shape)",
            "heads.view(values.shape)",
        ),
        (
            "scores are divided by the root of the head size",
            "    query = query * heads.head_dim**0.5\n",
            "",
        ),
        (
            "a layer's output is not multiplied by its scalar",
            "self.eps)) * w.scalar",
            "self.eps))",
        ),
        (
            "values of layers that see everything are the queries' last rows",
            "joint.rows(slice(heads.query_size, None))",
            "joint.rows(slice(heads.query_size - heads.kv_size, heads.query_size))",
        ),
        (
            "an expert's own scale is left out",
            "        weights = weights * self.expert_scale[experts.long()]\n",
            "",
        ),
        (
            "experts read what the MLP reads",
            "x = ops.rms_norm(hidden, self.norm, eps)",
            "x = ops.rms_norm(hidden, self.own_norm, eps)",
        ),
        (
            "the router reads hidden states that are not scaled",
            "scale.float() * hidden**-0.5",
            "scale.float()",
        ),
        (
            "the MLP's output is not normed beside the experts'",
            "ops.rms_norm(added, w.experts.mlp_norm, self.eps) + own",
            "added + own",
        ),
    ),
    *mutants_of(
        "dflash_backend/checkpoints/families.py",
        OF_READING,
        (
            "a missing field of Gemma 4 12B is read as of the others",
            "has_own_embeddings=False",
            "has_own_embeddings=True",
        ),
    ),
    *mutants_of(
        TARGET,
        OF_FAMILY,
        (
            "embeddings are as they are stored",
            "return rows * self.embedding_scale if scaled else rows",
            "return rows",
        ),
        (
            "logits are not capped",
            "logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap",
            "logits",
        ),
        (
            "the capped logits are not scaled back",
            "torch.tanh(logits / self.softcap) * self.softcap",
            "torch.tanh(logits / self.softcap)",
        ),
    ),
    Mutant(
        "the first pairs of a head turn as if they were all of it",
        "dflash_backend/models/rope.py",
        "base_frequencies(rope.theta, head_dim)[:turned]",
        "base_frequencies(rope.theta, 2 * turned)",
        OF_FAMILY,
    ),
    Mutant(
        "layers with a window keep KV of the shape of those that see everything",
        "dflash_backend/checkpoints/spec.py",
        "        if own is None or not own.global_layers[index]:\n",
        "        if own is None:\n",
        OF_FAMILY,
    ),
    Mutant(
        "the last layer of Gemma 4 has the window that the file says",
        "dflash_backend/checkpoints/gemma4.py",
        "return (*types[:-1], FULL)",
        "return types",
        OF_READING,
    ),
    Mutant(
        "GELU is SiLU",
        "dflash_backend/models/mlp.py",
        "return ops.gated_mlp(self.gate_up, self.down, x, self.is_gelu)",
        "return ops.gated_mlp(self.gate_up, self.down, x, False)",
        OF_FAMILY,
    ),
    Mutant(
        "drafts know nothing of the target's soft cap",
        "dflash_backend/drafters/dflash/config.py",
        "dataclasses.replace(found, logits=dataclasses.replace(self.logits, softcap=gemma4.softcap))",
        "found",
        ("tests/drafters/test_dflash_config.py",),
    ),
)
