"""Gemma 4's embedding beneath a drafter: scaled as its first layer reads it where the authors' code calls it, and as it
is stored where the drafter was trained on the stored rows. The format tells."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dflash_backend.attention.torch_backend import TorchBackend
from dflash_backend.checkpoints import read_target
from dflash_backend.drafters.base import LoadOptions
from dflash_backend.drafters.describe import draft_facts
from dflash_backend.drafters.dflash.config import DFlashSpec
from dflash_backend.drafters.registry import drafter_class, read_draft
from dflash_backend.models import load_target
from dflash_backend.models.ops import LayerOps
from tests.drafters.drafts import dspark_fields, make_dflash2, make_dspark, make_eagle3
from tests.models.dense_drafter import DenseDrafter
from tests.support.paged import BLOCK_SIZE, caches
from tests.support.speculators_checkpoint import speculators_config
from tests.support.tiny_models import HIDDEN, MASK_TOKEN_ID, TARGET_LAYER_IDS, VOCAB_SIZE, make_draft, make_target
from tests.worker.engines import Outputs, engine

pytestmark = pytest.mark.usefixtures("single_thread", "inference_mode")
CPU = torch.device("cpu")
GEMMA = "Gemma4ForCausalLM"
SCALED, STORED = "scaled where the target's first layer scales it", "its rows as they are stored"
EMBEDDING = "model.embed_tokens.weight"
OF_DSPARK = ("sample_from_anchor", *dspark_fields("vanilla", 6))
OF_DFLASH2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def as_speculators(make: Callable[[Path], object], method: str) -> Callable[[Path], None]:
    """Makes the same drafter in the format of speculators, without an embedding, as the library saves it since 0.9."""

    def made(directory: Path) -> None:
        make(directory)
        config = json.loads((directory / "config.json").read_text())
        layers = {"target_layer_ids": TARGET_LAYER_IDS, "mask_token_id": MASK_TOKEN_ID}
        config["dflash_config"] = layers | config.get("dflash_config", {})
        wrapped = speculators_config(config, None, VOCAB_SIZE, config["block_size"] - 1)
        layer = wrapped["transformer_layer_config"]
        own = {name: layer.pop(name) for name in OF_DSPARK if name in layer}
        own |= {name: config["dflash_config"][name] for name in OF_DFLASH2 if name in config["dflash_config"]}
        text = json.dumps(wrapped | own | {"speculators_model_type": method})
        (directory / "config.json").write_text(text)

    return made


DRAFTERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "z-lab DFlash": (make_draft, SCALED),
    "z-lab DFlash2": (make_dflash2, SCALED),
    "DeepSpec DSpark": (make_dspark, STORED),
    "speculators DFlash": (as_speculators(make_draft, "dflash"), STORED),
    "speculators DFlash2": (as_speculators(make_dflash2, "dflash2"), STORED),
    "speculators DSpark": (as_speculators(make_dspark, "dspark"), STORED),
    "EAGLE-3": (make_eagle3, STORED),
}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gemma")
    make_target(directory, architecture=GEMMA)
    return directory


@pytest.mark.parametrize("kind", DRAFTERS)
def test_the_format_says_which_rows_a_drafter_reads(kind: str, gemma: Path, tmp_path: Path) -> None:
    make, how = DRAFTERS[kind]
    make(tmp_path)
    spec = read_draft(tmp_path)
    assert dict(draft_facts(spec))["embedding"] == f"the target's, {how}"
    target = load_target(read_target(gemma), 64, torch.float32, CPU)
    options = LoadOptions(64, torch.float32, CPU, lambda name, share: None, LayerOps())
    drafter: Any = drafter_class(spec).load(spec, options)(target, caches(spec.decoder), TorchBackend(BLOCK_SIZE))
    stored = load_file(gemma / "model.safetensors")[EMBEDDING]
    factor = HIDDEN**0.5 if how is SCALED else 1.0
    torch.testing.assert_close(drafter._embed(torch.arange(VOCAB_SIZE)), stored * factor)


# A target whose next token follows from the last one alone, and a drafter that knows it as far as the mask's embedding
# leaves it to: the larger that is, the less the anchor's counts.
K, PROMPT, MAX_TOKENS = 3, [5, 17, 40, 8], 48


def make_chain(directory: Path) -> None:
    """The target: no layer adds anything, and the head is another than the embedding."""
    make_target(directory, architecture=GEMMA, tie_word_embeddings=False, final_logit_softcapping=None)
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    tensors[EMBEDDING][:, 0] = 0.0
    tensors[EMBEDDING][MASK_TOKEN_ID] = 0.0
    tensors[EMBEDDING][MASK_TOKEN_ID, 0] = 1.5
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def make_follower(directory: Path, target: Path) -> None:
    """The drafter: its first layer passes on the anchor's embedding, and nothing of the context or the masks."""
    tensors = make_draft(directory, block_size=1 + K)
    for name, tensor in tensors.items():
        tensor.fill_(1.0 if "norm" in name else 0.0)
    keep = torch.eye(HIDDEN)
    keep[0, 0] = 0.0
    tensors["layers.0.self_attn.v_proj.weight"] = 40.0 * keep
    # Of four heads the first two share the first half of the values, the others the second.
    half = HIDDEN // 2
    tensors["layers.0.self_attn.o_proj.weight"][:half, :half] = torch.eye(half)
    tensors["layers.0.self_attn.o_proj.weight"][half:, 2 * half : 3 * half] = torch.eye(half)
    tensors["norm.weight"] = load_file(target / "model.safetensors")["model.norm.weight"]
    save_file(tensors, directory / "model.safetensors")


def reference(target: Path, draft: Path, factor: float) -> tuple[list[int], int]:
    """Text and number of drafting steps, without any cache: `transformers` for the target, a dense drafter in float64.
    factor: of the embedding's stored rows."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    raw, spec = load_file(target / "model.safetensors"), read_draft(draft)
    assert isinstance(spec, DFlashSpec)
    table = raw[EMBEDDING] * factor
    tensors = load_file(draft / "model.safetensors")
    dense = DenseDrafter(spec, tensors, table, raw["lm_head.weight"], table[MASK_TOKEN_ID], list(range(VOCAB_SIZE)))
    greedy = model(torch.arange(VOCAB_SIZE)[:, None]).logits[:, 0].argmax(dim=-1).tolist()
    tokens, steps = [*PROMPT, greedy[PROMPT[-1]]], 0
    while len(tokens) < len(PROMPT) + MAX_TOKENS:
        features = torch.zeros(len(tokens) - 1, len(TARGET_LAYER_IDS) * HIDDEN)
        steps += 1
        for draft_token in [*dense.drafts(features, tokens[-1], K)[1], -1]:
            tokens.append(greedy[tokens[-1]])
            if draft_token != tokens[-1]:
                break
    return tokens[len(PROMPT) :][:MAX_TOKENS], steps


@pytest.mark.parametrize("written", ["z-lab", "speculators"])
def test_steps_are_those_of_a_reference_that_keeps_no_cache(written: str, tmp_path: Path) -> None:
    target, draft = tmp_path / "t", tmp_path / "d"
    make_chain(target)

    def make(directory: Path) -> None:
        make_follower(directory, target)

    (make if written == "z-lab" else as_speculators(make, "dflash"))(draft)
    by_format = {
        "speculators": reference(target, draft, 1.0),
        "z-lab": reference(target, draft, HIDDEN**0.5),
    }
    built = engine(target_model=str(target), draft_model=str(draft), kv_cache_gb=0.01, max_model_len=128)
    outputs = Outputs(built)
    outputs.add("0", PROMPT, max_tokens=MAX_TOKENS, ignore_eos=True, temperature=0.0)
    text, steps = by_format[written]
    assert outputs.finish() == {"0": text}
    assert built.core.stats().spec_decoding.num_drafts == steps
    # The other reading would take clearly more steps, or fewer.
    assert by_format["z-lab"][1] - by_format["speculators"][1] > 10
