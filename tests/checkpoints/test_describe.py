"""What the server says of a checkpoint is what it read."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file

from dflash_backend.checkpoints import read_target, target_facts
from dflash_backend.config import EngineConfig
from dflash_backend.drafters.describe import draft_facts
from dflash_backend.drafters.registry import read_draft
from dflash_backend.engine.build import build_engine
from tests.drafters.drafts import edit, make_speculators, put
from tests.support.tiny_models import make_draft, make_pair, make_target


def test_a_zlab_drafter_in_words(tmp_path: Path) -> None:
    make_draft(tmp_path, layer_types=["sliding_attention", "full_attention"], sliding_window=8)
    facts = dict(draft_facts(read_draft(tmp_path)))
    assert facts["format"] == "z-lab"
    assert facts["made for"] == "a target of 5 layers, hidden size 32, 97 tokens"
    assert facts["causality"] == "causal in layer 0, not causal in layer 1"
    assert facts["attention"] == "window of 8 in layer 0, full in layer 1"
    assert facts["features"] == "layer ids [1, 3] of the target, which are boundary ids [2, 4]"
    assert facts["block"] == "8 places: the anchor and up to 7 drafts"
    assert facts["vocabulary"] == "all 97 tokens"
    assert facts["embedding"] == "the target's, scaled where the target's first layer scales it"
    assert facts["LM head"] == "the target's"
    assert facts["rotary embedding"] == "theta 10000"
    assert "code" not in facts
    assert "logits" not in facts
    assert "input embedding scale" not in facts


def test_a_speculators_drafter_in_words(tmp_path: Path) -> None:
    make_speculators(tmp_path, target="example/target")
    put(tmp_path / "config.json", auto_map={"AutoModel": "x.Y"})
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "attention_factor": 1.5}
    edit(tmp_path / "config.json", lambda data: data["transformer_layer_config"].update(rope_scaling=yarn))
    (tmp_path / "mask_embedding.pt").write_bytes(b"")
    facts = dict(draft_facts(read_draft(tmp_path)))
    assert facts["made for"] == "example/target, hidden size 32, 97 tokens"
    assert facts["vocabulary"] == "proposes 24 of 97 tokens, mapped by d2t"
    assert facts["LM head"] == "its own"
    assert facts["mask token"] == "96, with an embedding of its own (mask_embedding.pt)"
    assert facts["rotary embedding"] == "theta 10000, yarn scaling by 4 from 512 positions, attention factor 1.5"
    assert facts["positions"] == "2048"
    assert facts["causality"] == "not causal in all layers"
    assert facts["speculative tokens"] == "5, as the checkpoint asks"
    assert facts["code"] == "named by auto_map: never run, and not needed"


def test_a_target_in_words(tmp_path: Path) -> None:
    make_target(tmp_path, architecture="Qwen3MoeForCausalLM")
    facts = dict(target_facts(read_target(tmp_path)))
    assert facts["architecture"] == "Qwen3MoeForCausalLM"
    assert facts["heads"] == "4 for queries, 2 for keys and values, of size 16"
    assert facts["experts"] == "6 of size 24, 2 for a token, in 5 of 5 layers; weights scaled to sum to 1"
    assert facts["vocabulary"] == "97 tokens, tied: the LM head is the embedding"
    assert facts["weights"].startswith("float32, ")
    assert facts["end of sequence"] == "0"


def test_loading_says_how_both_checkpoints_were_read_and_what_was_guessed(tmp_path: Path) -> None:
    reports: list[tuple[str, float]] = []
    settings = make_pair(tmp_path, dflash_config={"mask_token_id": 96}) | {"kv_cache_gb": 0.01}
    build_engine(EngineConfig.from_values(settings), lambda *report: reports.append(report))
    messages = [message for message, _ in reports]
    assert "drafter: features: layer ids [1, 2] of the target, which are boundary ids [2, 3]" in messages
    assert "target: architecture: Qwen3ForCausalLM" in messages
    assert [text for text in messages if text.startswith("drafter: warning: no field names the target's layers")]
    fractions = [fraction for _, fraction in reports]
    assert fractions == sorted(fractions)


def test_what_was_guessed_or_said_twice_is_said(tmp_path: Path) -> None:
    make_draft(tmp_path)
    assert "warning" not in dict(draft_facts(read_draft(tmp_path)))
    dflash = {"mask_token_id": 96, "conv_taps": 2, "block_size": 4}
    put(tmp_path / "config.json", dflash_config=dflash, unheard_of=[1], not_on=False, not_given=None)
    facts = dict(draft_facts(read_draft(tmp_path)))
    warnings = [facts[label] for label in ("warning", "warning 2", "warning 3")]
    assert "no field names the target's layers, so the layer ids [1, 2] are the method's default" in warnings[0]
    assert warnings[1] == "dflash_config.block_size is 4 and is used; block_size is 8"
    assert "not known here and not read: unheard_of = [1], dflash_config.conv_taps = 2; drafts" in warnings[2]


def test_scales_and_the_normed_last_layer_are_said(tmp_path: Path) -> None:
    extra = {"input_embedding_scale": 2.5, "output_multiplier": 0.5, "final_logit_softcapping": 30}
    make_draft(tmp_path, logit_scale=0.25, dflash_config={"mask_token_id": 96, "target_layer_ids": [1, 4]} | extra)
    facts = dict(draft_facts(read_draft(tmp_path)))
    assert facts["input embedding scale"] == "2.5"
    assert facts["logits"] == "times 0.5, then soft-capped at 30, then times 0.25"
    assert facts["features"].endswith("boundary ids [2, 5]; the last layer's after the final norm")


def test_a_draft_vocabulary_without_a_head_takes_rows_of_the_targets(tmp_path: Path) -> None:
    make_speculators(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    assert dict(draft_facts(read_draft(tmp_path)))["LM head"] == "the target's, 24 rows of it"
