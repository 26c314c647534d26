"""Every target family computes what `transformers` computes, through paged KV in any division of the work.

Each case is a small random checkpoint that `transformers` saved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from dflash_backend.attention import KVLayer
from dflash_backend.checkpoints import TARGET_ARCHITECTURES, read_target
from dflash_backend.models import TargetModel, load_target
from dflash_backend.models.recurrent_state import StatePool
from tests.support.paged import BLOCK_SIZE, block_tables, caches, context, noisy_pool
from tests.support.scale import by_night, others_by_night
from tests.support.tiny_models import GEMMA4_EXPERTS, TARGET_LAYERS, VOCAB_SIZE, make_target

pytestmark = pytest.mark.usefixtures("single_thread", "inference_mode")
CPU = torch.device("cpu")
TOLERANCE = {"atol": 1e-4, "rtol": 0.0}
NUM_TOKENS = 61
MAX_POSITIONS = 128
# Longer than a block, no multiple of it, and far shorter than the contexts.
WINDOW = 7

LLAMA, MISTRAL, MOE = "LlamaForCausalLM", "MistralForCausalLM", "Qwen3MoeForCausalLM"
GPT_OSS = "GptOssForCausalLM"
NEXT, QWEN35, QWEN35_MOE = "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"
HYBRIDS = (NEXT, QWEN35, QWEN35_MOE)
QWEN2, QWEN3 = "Qwen2ForCausalLM", "Qwen3ForCausalLM"
WINDOWED = {"use_sliding_window": True, "sliding_window": WINDOW}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
GEMMA = "Gemma4ForCausalLM"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": (QWEN3, {}),
    "qwen3 untied": (QWEN3, {"tie_word_embeddings": False}),
    "qwen3 attention bias": (QWEN3, {"attention_bias": True}),
    "qwen3 windows in the upper layers": (QWEN3, WINDOWED | {"max_window_layers": 2}),
    "qwen3 yarn": (QWEN3, {"rope_parameters": YARN}),
    "qwen2": (QWEN2, {}),
    "qwen2 untied": (QWEN2, {"tie_word_embeddings": False}),
    "qwen2 windows in the upper layers": (QWEN2, WINDOWED | {"max_window_layers": 3}),
    "llama": (LLAMA, {}),
    "llama untied": (LLAMA, {"tie_word_embeddings": False}),
    "llama biases": (LLAMA, {"attention_bias": True, "mlp_bias": True}),
    "llama mlp bias": (LLAMA, {"mlp_bias": True}),
    "llama one kv head": (LLAMA, {"num_key_value_heads": 1}),
    "llama a kv head for each": (LLAMA, {"num_key_value_heads": 4}),
    "llama head size from the hidden size": (LLAMA, {"head_dim": 8}),
    "llama theta": (LLAMA, {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama linear": (LLAMA, {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}}),
    "llama dynamic": (LLAMA, {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}),
    "llama yarn": (LLAMA, {"rope_parameters": YARN | {"attention_factor": 0.8, "beta_fast": 16.0}}),
    "llama3": (LLAMA, {"rope_parameters": LLAMA3}),
    "mistral": (MISTRAL, {}),
    "mistral untied": (MISTRAL, {"tie_word_embeddings": False}),
    "mistral windows": (MISTRAL, {"sliding_window": WINDOW}),
    "qwen3-moe": (MOE, {}),
    "qwen3-moe untied": (MOE, {"tie_word_embeddings": False}),
    "qwen3-moe router weights as they are": (MOE, {"norm_topk_prob": False}),
    "qwen3-moe experts in every second layer": (MOE, {"decoder_sparse_step": 2}),
    "qwen3-moe dense layers": (MOE, {"mlp_only_layers": [0, 3], "attention_bias": True}),
    "qwen3-moe windows": (MOE, WINDOWED),
    "gpt-oss": (GPT_OSS, {}),
    "gpt-oss tied": (GPT_OSS, {"tie_word_embeddings": True}),
    "gpt-oss no biases": (GPT_OSS, {"attention_bias": False}),
    "gpt-oss full and sliding": (
        GPT_OSS,
        {"layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"]},
    ),
    "gpt-oss sliding layers alone": (GPT_OSS, {"layer_types": ["sliding_attention"] * 5, "sliding_window": 1}),
    "gpt-oss one kv head": (GPT_OSS, {"num_key_value_heads": 1, "head_dim": 8}),
    "gpt-oss other gates": (GPT_OSS, {"swiglu_alpha": 0.9, "swiglu_limit": 0.5, "num_experts_per_tok": 4}),
    "qwen3-next": (NEXT, {}),
    "qwen3-next tied": (NEXT, {"tie_word_embeddings": True, "num_hidden_layers": 5}),
    "qwen3-next attention first": (
        NEXT,
        {"layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention", "full_attention"]},
    ),
    "qwen3-next dense": (NEXT, {"num_experts": 0, "attention_bias": True}),
    "qwen3-next dense layers": (NEXT, {"mlp_only_layers": [0, 3], "norm_topk_prob": False}),
    "qwen3-next one head": (
        NEXT,
        {"linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": 16, "num_key_value_heads": 1},
    ),
    "qwen3-next a value head for each key head": (
        NEXT,
        {"linear_num_key_heads": 4, "linear_conv_kernel_dim": 2, "full_attention_interval": 2},
    ),
    "qwen3-next other rotation": (
        NEXT,
        {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}, "linear_conv_kernel_dim": 6},
    ),
    "qwen3.5": (QWEN35, {}),
    "qwen3.5 attention first": (
        QWEN35,
        {"layer_types": ["full_attention", "linear_attention"] * 2 + ["linear_attention"]},
    ),
    "qwen3.5 one head": (QWEN35, {"linear_num_key_heads": 1, "linear_num_value_heads": 1, "num_key_value_heads": 1}),
    "qwen3.5-moe": (QWEN35_MOE, {}),
    "qwen3-next whole heads rotated": (
        NEXT,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}},
    ),
    "gemma 4": (GEMMA, {}),
    "gemma 4 untied, no softcap": (GEMMA, {"tie_word_embeddings": False, "final_logit_softcapping": None}),
    "gemma 4 experts": (GEMMA, GEMMA4_EXPERTS),
    "gemma 4 values of their own": (GEMMA, {"attention_k_eq_v": False, "attention_bias": True}),
    "gemma 4 one window": (GEMMA, {"layer_types": ["sliding_attention"] * 5, "sliding_window": 1}),
    "gemma 4 other rotations": (
        GEMMA,
        {
            "global_head_dim": 16,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 3000.0,
                    "partial_rotary_factor": 0.6,
                    "factor": 1.5,
                },
            },
        },
    ),
    "gpt-oss truncated ramp": (GPT_OSS, {"rope_parameters": YARN | {"rope_theta": 150000.0}}),
}


@dataclass
class Reference:
    """What `transformers` says of one sequence: logits `[n, vocab]`; outputs of each decoder layer `[n, hidden]`."""

    ids: torch.Tensor
    logits: torch.Tensor
    layers: list[torch.Tensor]

    @classmethod
    def run(cls, model: PreTrainedModel, ids: torch.Tensor) -> Reference:
        layers: list[torch.Tensor] = []
        # Its own `hidden_states` has the last layer's output after the final norm.
        hooks = [
            layer.register_forward_hook(lambda module, args, output: layers.append(output[0]))
            for layer in model.model.layers
        ]
        with torch.inference_mode():
            output = model(ids[None], output_hidden_states=True)
        for hook in hooks:
            hook.remove()
        for boundary, layer in enumerate(layers[:-1], start=1):
            assert torch.equal(layer, output.hidden_states[boundary][0])
        return cls(ids, output.logits[0], layers)


@dataclass
class Pair:
    """A model of `transformers`, ours from the checkpoint that it saved, and two sequences with one beginning."""

    model: PreTrainedModel
    target: TargetModel
    first: Reference
    second: Reference
    dtype: torch.dtype = torch.float32
    kv: list[KVLayer] = field(default_factory=list)
    pool: StatePool | None = None

    def run(
        self,
        tables: np.ndarray,
        rows: list[tuple[int, torch.Tensor]],
        capture: tuple[int, ...] = (),
        kept: list[int] | None = None,
    ) -> Any:
        """One pass in which row r runs the given tokens from the given position on: logits of each row, features.
        kept: how many tokens of each row are accepted; by default all."""
        starts, lens = [start for start, _ in rows], [len(ids) for _, ids in rows]
        paged = context(tables, starts, lens, self.dtype, pool=self.pool)
        output = self.target.forward(torch.cat([ids for _, ids in rows]), paged, self.kv, capture)
        if paged.states is not None:
            paged.states.check()
            paged.states.commit(torch.tensor(kept or lens, dtype=torch.int32))
        return self.target.logits(output.hidden).split(lens), output.features


SHARED = 5 * BLOCK_SIZE


# The forms of attention, KV and MLP, in every family: what the division of the work may meet.
FORMS = (
    "qwen3",
    "qwen3 windows in the upper layers",
    "qwen2",
    "qwen2 windows in the upper layers",
    "llama biases",
    "llama one kv head",
    "mistral",
    "mistral windows",
    "qwen3-moe experts in every second layer",
    "qwen3-moe windows",
    "gpt-oss",
    "gpt-oss one kv head",
    "qwen3-next",
    "qwen3-next one head",
    "qwen3-next other rotation",
    "qwen3.5",
    "qwen3.5-moe",
    "gemma 4",
    "gemma 4 experts",
)
# What another family, or another case of it, has by day.
BY_NIGHT = {
    "qwen3 untied",
    "qwen2 untied",
    "llama untied",
    "llama mlp bias",
    "llama a kv head for each",
    "llama theta",
    "mistral untied",
    "qwen3-moe untied",
    "qwen3-next tied",
    "qwen3-next dense",
    "qwen3.5 one head",
    "gpt-oss full and sliding",
}
of_every_case = pytest.mark.parametrize("pair", others_by_night(CASES, CASES.keys() - BY_NIGHT), indirect=True)
of_every_form = pytest.mark.parametrize("pair", FORMS, indirect=True)
# What a prefix hit restores is KV, not a recurrent state.
KV_FORMS = tuple(form for form in FORMS if CASES[form][0] not in HYBRIDS)
of_every_form_of_kv = pytest.mark.parametrize("pair", KV_FORMS, indirect=True)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """The pair of a case, which is made once."""

    @cache
    def made(name: str) -> Pair:
        architecture, changes = CASES[name]
        directory = tmp_path_factory.mktemp("target")
        model = make_target(directory, architecture=architecture, **changes)
        target = load_target(read_target(directory), MAX_POSITIONS, torch.float32, CPU)
        generator = torch.Generator().manual_seed(0)
        first, second = torch.randint(0, VOCAB_SIZE, (2, NUM_TOKENS), generator=generator)
        second[:SHARED] = first[:SHARED]
        return Pair(model, target, Reference.run(model, first), Reference.run(model, second))

    return made


@pytest.fixture
def pair(request: pytest.FixtureRequest, pairs: Callable[[str], Pair]) -> Pair:
    """That of a case, whose KV holds noise."""
    pair = pairs(request.param)
    pair.kv = caches(pair.target.spec.decoder)
    pair.pool = noisy_pool(pair.target.spec.decoder)
    return pair


@of_every_case
def test_a_whole_prompt_gives_the_logits_of_transformers(pair: Pair) -> None:
    (logits,), _ = pair.run(block_tables(1), [(0, pair.first.ids)])
    torch.testing.assert_close(logits, pair.first.logits, **TOLERANCE)


@of_every_form
def test_chunks_beside_another_row_give_the_same_logits(pair: Pair) -> None:
    tables = block_tables(2)
    cuts = [(0, 13), (13, 40), (40, 41), (41, NUM_TOKENS)], [(0, 5), (5, 6), (6, 7), (7, NUM_TOKENS)]
    logits: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for (a, b), (c, d) in zip(*cuts, strict=True):
        both, _ = pair.run(tables, [(a, pair.first.ids[a:b]), (c, pair.second.ids[c:d])])
        for row, part in enumerate(both):
            logits[row].append(part)
    torch.testing.assert_close(torch.cat(logits[0]), pair.first.logits, **TOLERANCE)
    torch.testing.assert_close(torch.cat(logits[1]), pair.second.logits, **TOLERANCE)


@of_every_form
def test_decode_one_token_at_a_time_gives_the_same_logits(pair: Pair) -> None:
    tables = block_tables(2)
    pair.run(tables, [(0, pair.first.ids[:18]), (0, pair.second.ids[:31])])
    for step in range(18, 48):
        (first, second), _ = pair.run(
            tables, [(step, pair.first.ids[step : step + 1]), (step + 13, pair.second.ids[step + 13 : step + 14])]
        )
        torch.testing.assert_close(first[0], pair.first.logits[step], **TOLERANCE)
        torch.testing.assert_close(second[0], pair.second.logits[step + 13], **TOLERANCE)


@of_every_form
def test_verify_blocks_give_the_same_logits_whatever_was_rejected_before(pair: Pair) -> None:
    tables, rng = block_tables(1), np.random.default_rng(4)
    pair.run(tables, [(0, pair.first.ids[:10])])
    done = 10
    while done < NUM_TOKENS - 8:
        good = int(rng.integers(1, 9))
        block = pair.first.ids[done : done + 8].clone()
        block[good:] = (block[good:] + 1) % VOCAB_SIZE
        (logits,), _ = pair.run(tables, [(done, block)], kept=[good])
        torch.testing.assert_close(logits[:good], pair.first.logits[done : done + good], **TOLERANCE)
        done += good


@of_every_form_of_kv
def test_a_prefix_hit_gives_the_same_logits(pair: Pair) -> None:
    tables = block_tables(2)
    pair.run(tables[:1], [(0, pair.first.ids)])
    tables[1, : SHARED // BLOCK_SIZE] = tables[0, : SHARED // BLOCK_SIZE]
    (logits,), _ = pair.run(tables[1:], [(SHARED, pair.second.ids[SHARED:])])
    torch.testing.assert_close(logits, pair.second.logits[SHARED:], **TOLERANCE)


@of_every_form
@pytest.mark.parametrize("border", [by_night(2**15), 2**16])
def test_positions_across_a_power_of_two_give_the_same_logits(pair: Pair, border: int) -> None:
    """The sequence begins shortly before them, and nothing lies before it."""
    positions = torch.arange(border - NUM_TOKENS // 2, border - NUM_TOKENS // 2 + NUM_TOKENS)
    expected = pair.model(pair.first.ids[None], position_ids=positions[None]).logits[0]
    target = load_target(pair.target.spec, border + NUM_TOKENS, torch.float32, CPU)
    paged = context(block_tables(1), [0], [NUM_TOKENS], pool=pair.pool)
    paged = replace(paged, positions=positions)
    output = target.forward(pair.first.ids, paged, pair.kv, ())
    torch.testing.assert_close(target.logits(output.hidden), expected, **TOLERANCE)


@of_every_form
def test_captured_features_are_the_outputs_of_the_layers_named(pair: Pair) -> None:
    layer_ids = (3, 0, 4, 2, 1)
    assert sorted(layer_ids) == list(range(TARGET_LAYERS))
    tables, features = block_tables(1), []
    for start, end in ((0, 22), (22, NUM_TOKENS)):
        features.append(pair.run(tables, [(start, pair.first.ids[start:end])], layer_ids)[1])
    expected = torch.cat([pair.first.layers[i] for i in layer_ids], dim=-1)
    # Some features are above 1, and grow with each layer, as their rounding does.
    torch.testing.assert_close(torch.cat(features), expected, atol=TOLERANCE["atol"], rtol=1e-4)


@of_every_form
def test_the_number_of_layers_captures_the_last_layer_after_the_final_norm(pair: Pair) -> None:
    """`hidden_states[id + 1]` of `transformers`, as the DFlash authors' code reads features."""
    states = pair.model(pair.first.ids[None], output_hidden_states=True).hidden_states
    layer_ids = (1, TARGET_LAYERS)
    _, features = pair.run(block_tables(1), [(0, pair.first.ids)], layer_ids)
    expected = torch.cat([states[2][0], states[TARGET_LAYERS][0]], dim=-1)
    torch.testing.assert_close(features, expected, **TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, by_night(torch.float16)])
@pytest.mark.parametrize("architecture", TARGET_ARCHITECTURES)
def test_half_precision_is_as_near_to_float32_as_that_of_transformers(
    tmp_path_factory: pytest.TempPathFactory, architecture: str, dtype: torch.dtype
) -> None:
    directory = tmp_path_factory.mktemp("target")
    # Every expert is asked, so that rounding cannot change which ones are.
    changes = {"num_experts_per_tok": 6} if architecture in (MOE, GPT_OSS, NEXT, QWEN35_MOE) else {}
    model = make_target(directory, architecture=architecture, dtype=dtype, **changes)
    spec = read_target(directory)
    assert spec.dtype == str(dtype).removeprefix("torch.")
    generator = torch.Generator().manual_seed(0)
    # The mean error of one prompt differs by a quarter from that of another, in float16.
    count = 3 if dtype == torch.float16 else 1
    prompts = [torch.randint(0, VOCAB_SIZE, (NUM_TOKENS,), generator=generator) for _ in range(count)]
    half = [Reference.run(model, ids) for ids in prompts]
    exact = torch.stack([Reference.run(model.float(), ids).logits for ids in prompts])
    target = load_target(spec, MAX_POSITIONS, dtype, CPU)
    pool = noisy_pool(spec.decoder, dtype)
    pair = Pair(model, target, half[0], half[-1], dtype, caches(spec.decoder, dtype), pool)
    logits = torch.stack([pair.run(block_tables(1), [(0, ids)])[0][0] for ids in prompts])
    assert logits.dtype == dtype
    theirs = torch.stack([reference.logits for reference in half])
    error, their_error = ((x.float() - exact).abs().mean() for x in (logits, theirs))
    assert error < 1.25 * their_error


def test_the_cases_are_of_every_architecture() -> None:
    assert {architecture for architecture, _ in CASES.values()} == set(TARGET_ARCHITECTURES)
    assert {CASES[form][0] for form in FORMS} == set(TARGET_ARCHITECTURES)
