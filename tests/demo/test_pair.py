"""The committed pair: sizes, formats, tokenizer, and what the two networks compute."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo.checkpoint import load_target
from demo.data import SPECIAL_TOKEN_IDS, held_out_rows
from demo.evaluate import ReferencePair
from demo.kinds import read_config
from tests.support.scale import SCALE, scaled
from tests.support.tiny_models import layer_shapes

PAIR = Path(__file__).parents[2] / "demo" / "pair"
DRAFT_FIELDS = json.loads((PAIR / "draft" / "config.json").read_text(encoding="utf-8"))
TOKENIZER = AutoTokenizer.from_pretrained(str(PAIR / "target"))


@pytest.fixture(scope="module")
def pair() -> ReferencePair:
    return ReferencePair(PAIR)


def tensors(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(str(path), framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def layer_names(count: int) -> set[str]:
    return {name for i in range(count) for name in layer_shapes(f"layers.{i}.", intermediate=1)}


def test_all_weights_take_at_most_8_mb():
    assert sum(path.stat().st_size for path in PAIR.rglob("*.safetensors")) <= 8_000_000


def test_draft_checkpoint_has_exactly_the_z_lab_keys_in_bf16():
    weights = tensors(PAIR / "draft" / "model.safetensors")
    expected = {"fc.weight", "hidden_norm.weight", "norm.weight"} | layer_names(DRAFT_FIELDS["num_hidden_layers"])
    assert set(weights) == expected
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


def test_target_checkpoint_has_exactly_the_qwen3_keys_in_bf16():
    weights = tensors(PAIR / "target" / "model.safetensors")
    layers = {f"model.{name}" for name in layer_names(DRAFT_FIELDS["num_target_layers"])}
    assert set(weights) == layers | {"model.embed_tokens.weight", "model.norm.weight"}
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


def test_draft_config_is_non_causal_with_block_16_and_layer_ids_that_can_be_shifted():
    assert DRAFT_FIELDS["architectures"] == ["DFlashDraftModel"]
    assert DRAFT_FIELDS["block_size"] == 16
    assert DRAFT_FIELDS["dflash_config"]["mask_token_id"] == TOKENIZER.convert_tokens_to_ids("<|mask|>")
    assert not DRAFT_FIELDS["dflash_config"].get("causal", False)
    ids = DRAFT_FIELDS["dflash_config"]["target_layer_ids"]
    assert min(ids) >= 1
    assert max(ids) + 1 < DRAFT_FIELDS["num_target_layers"]


def test_own_target_and_features_equal_transformers():
    config = read_config(DRAFT_FIELDS)
    tokens = torch.tensor([TOKENIZER.encode(held_out_rows("math", 1)[0]["prompt"])])
    reference = AutoModelForCausalLM.from_pretrained(str(PAIR / "target"), dtype=torch.float32)
    own = load_target(PAIR / "target", config)
    with torch.no_grad():
        expected = reference(tokens, output_hidden_states=True)
        hidden, features = own(tokens)
    torch.testing.assert_close(own.logits(hidden), expected.logits, atol=1e-3, rtol=1e-3)
    captured = torch.cat([expected.hidden_states[i + 1] for i in config.target_layer_ids], dim=-1)
    torch.testing.assert_close(features, captured, atol=1e-3, rtol=1e-3)


def test_special_tokens_have_the_first_ids():
    assert {name: TOKENIZER.convert_tokens_to_ids(name) for name in SPECIAL_TOKEN_IDS} == SPECIAL_TOKEN_IDS
    assert (TOKENIZER.eos_token, TOKENIZER.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert len(TOKENIZER) == 1536


@given(st.text(max_size=60))
@settings(max_examples=scaled(300 if SCALE >= 4 else 100, at_least=30), deadline=None)
def test_any_text_survives_the_tokenizer(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@pytest.mark.parametrize("text", ["北京 🎉🏖️", "  two  spaces\n\n\ttab", "e\u0301 vs é", "a .b ,c 's", "<|im_end|>\n"])
def test_awkward_text_survives_the_tokenizer(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_some_characters_take_several_tokens():
    assert any(len(TOKENIZER.encode(character)) > 1 for character in "北京寿司🎉")


def test_digits_are_single_tokens():
    assert TOKENIZER.convert_ids_to_tokens(TOKENIZER.encode("1234")) == list("1234")


def test_chat_template_renders_what_training_used():
    for row in held_out_rows("chat", 5):
        assert (
            TOKENIZER.apply_chat_template(row["messages"], tokenize=False, add_generation_prompt=True) == row["prompt"]
        )


@pytest.mark.slow
def test_reference_loop_gives_the_targets_own_greedy_tokens(pair):
    for category in ("math", "code", "chat"):
        prompt = pair.tokenizer.encode(held_out_rows(category, 1)[0]["prompt"])
        drafted, acceptance = pair.generate(prompt)
        plain = pair.target.generate(torch.tensor([prompt]), max_new_tokens=200, do_sample=False)[0, len(prompt) :]
        assert drafted == plain.tolist()
        assert acceptance.length > 2
