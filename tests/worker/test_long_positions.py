"""Positions across 2^15 and 2^16, where numbers of 16 bits end: text and scores are those of `transformers`, drafts
those of a dense drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from dflash_backend.attention import KVLayer
from dflash_backend.attention.torch_backend import TorchBackend
from dflash_backend.checkpoints.targets import read_target
from dflash_backend.drafters.base import ContextBatch
from dflash_backend.drafters.dflash.drafter import DFlashDrafter, DFlashModel
from dflash_backend.drafters.registry import read_draft
from dflash_backend.models import load_target
from dflash_backend.worker.batch import spans
from tests.drafters.test_dflash import dense_drafter
from tests.models.drafting import KeepsLogits, draft_batch, load_options, slots
from tests.support.paged import BLOCK_SIZE
from tests.support.scale import SCALE
from tests.support.tiny_models import VOCAB_SIZE, make_draft, make_target
from tests.worker.engines import engine, outputs_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("single_thread", "inference_mode")]
BORDERS = (2**15, 2**16)
LONGEST = 2**17
BEFORE, MAX_TOKENS = 20, 40
# The dense drafter's angles are float64's; those of float32, which `transformers` has too, are up to 0.004 from them.
OTHER_ANGLES = 5e-4
# All heads and all cases where there is time, as in `make nightly`.
ALL = SCALE >= 4
TINY = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
# With each target its drafter: drafts of prompt lookup are accepted now and then, those of random weights hardly ever.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gated delta net": (
        "ngram",
        {
            "architecture": "Qwen3_5ForCausalLM",
            "layer_types": ["linear_attention", "full_attention"],
            "num_attention_heads": 2 if ALL else 1,
        },
    ),
    "attention": ("dflash", {}),
    "sinks and windows": ("ngram", {"architecture": "GptOssForCausalLM"}),
    "two kinds of heads": (
        "dflash",
        {"architecture": "Gemma4ForCausalLM", "layer_types": ["sliding_attention", "full_attention"]},
    ),
}
BOTH = [(name, border) for name in CASES for border in BORDERS]
if not ALL:
    BOTH = [("attention", BORDERS[0]), ("gated delta net", BORDERS[0])]
# Families of which `transformers` keeps all scores in memory, or all of a mask, and positions that it computes at once.
CHUNKED, CHUNK = ("gpt_oss", "gemma4"), 1024


def logits_of(model: PreTrainedModel, ids: list[int], count: int) -> torch.Tensor:
    """The last `count` positions' logits, `[count, vocab]`."""
    if not model.config.model_type.startswith(CHUNKED):
        return model(torch.tensor([ids]), logits_to_keep=count).logits[0]
    first, cache = len(ids) - count, DynamicCache(config=model.config)
    for start in range(0, first, CHUNK):
        model(torch.tensor([ids[start : min(start + CHUNK, first)]]), past_key_values=cache, logits_to_keep=1)
    return model(torch.tensor([ids[first:]]), past_key_values=cache).logits[0]


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "border"), BOTH)
def test_text_and_scores_across_a_border_are_those_of_transformers(name: str, border: int, tmp_path: Path) -> None:
    method, changes = CASES[name]
    model = make_target(tmp_path / "t", max_position_embeddings=LONGEST, **(TINY | changes))
    layers = {"target_layer_ids": [0, 1], "mask_token_id": VOCAB_SIZE - 1}
    make_draft(tmp_path / "d", num_target_layers=2, max_position_embeddings=LONGEST, dflash_config=layers)
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(1, VOCAB_SIZE, (border - BEFORE,), generator=generator).tolist()
    built = engine(
        target_model=str(tmp_path / "t"),
        draft_model=str(tmp_path / "d") if method == "dflash" else method,
        max_model_len=border + 64,
        max_num_seqs=1,
        max_num_batched_tokens=4096,
        kv_write_guard=False,
    )
    outputs = outputs_of(built, [prompt], [{"temperature": 0.0, "max_tokens": MAX_TOKENS, "logprobs": 0}])
    tokens, found = outputs.tokens["0"], outputs.logprobs["0"]
    drafted = built.core.stats().spec_decoding
    assert drafted.num_draft_tokens > drafted.num_accepted_tokens
    logits = logits_of(model, prompt + tokens, MAX_TOKENS + 1)[:-1]
    assert tokens == logits.argmax(dim=-1).tolist()
    expected = logits.log_softmax(dim=-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor([each.logprobs[0] for each in found]), expected, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("border", BORDERS if ALL else BORDERS[1:])
def test_drafts_across_a_border_are_those_of_a_dense_drafter(border: int, tmp_path: Path) -> None:
    make_target(tmp_path / "target")
    target = load_target(read_target(tmp_path / "target"), 8, torch.float32, torch.device("cpu"))
    tensors = make_draft(tmp_path / "draft", max_position_embeddings=LONGEST)
    spec = read_draft(tmp_path / "draft")
    num_blocks = (border + 64) // BLOCK_SIZE
    shape = num_blocks, BLOCK_SIZE, *spec.decoder.caches[0].token_shape
    kv = [KVLayer(torch.zeros(shape)) for _ in range(spec.decoder.num_layers)]
    model = DFlashModel.load(spec, load_options(border + 64))
    drafter = DFlashDrafter(model, target, kv, TorchBackend(BLOCK_SIZE))
    dense = dense_drafter(tmp_path / "draft", spec, tensors, target)
    width = tensors["fc.weight"].shape[1]
    features = torch.randn(border + 8, width, generator=torch.Generator().manual_seed(5))
    tables = np.random.default_rng(3).permutation(num_blocks)[None].astype(np.int64)
    done = 0
    for start in (border - 9, border - 4, border - 1, border, border + 1, border + 8):
        rows, positions = spans(np.array([done]), np.array([start - done]))
        context = ContextBatch(features[positions], torch.from_numpy(positions), slots(tables, rows, positions))
        drafter.inject(context)
        done, sampler = start, KeepsLogits()
        batch = draft_batch(
            np.array([7]), np.array([start]), np.array([7]), tables, drafter.placeholder_id, drafter.lookahead_base
        )
        drafts = drafter.propose(batch, sampler).token_ids.tolist()
        logits, expected = dense.drafts(features[:start], 7, 7)
        torch.testing.assert_close(sampler.logits.double(), logits, atol=OTHER_ANGLES, rtol=0.0)
        assert drafts == expected
