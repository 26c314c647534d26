"""The EAGLE-3 drafter computes what a second, dense one computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_backend.attention.torch_backend import TorchBackend
from dflash_backend.checkpoints.targets import read_target
from dflash_backend.drafters.base import ContextBatch, DraftSampler
from dflash_backend.drafters.eagle3.config import Eagle3Spec
from dflash_backend.drafters.eagle3.drafter import Eagle3Drafter, Eagle3Model
from dflash_backend.drafters.registry import read_draft
from dflash_backend.models import load_target
from dflash_backend.models.ops import LayerOps, TritonLayerOps
from dflash_backend.worker.batch import spans
from dflash_backend.worker.step_ops import CpuStepOps
from dflash_kernels.gumbel_noise import gumbel_reference
from dflash_kernels.log_odds import log_odds_reference
from tests.drafters.drafts import make_eagle3
from tests.models.dense_eagle3 import DenseEagle3
from tests.models.drafting import KeepsLogits, draft_batch, load_options, slots
from tests.support.paged import BLOCK_SIZE, block_tables, caches
from tests.support.tiny_models import VOCAB_SIZE, make_target

pytestmark = pytest.mark.usefixtures("inference_mode")
CPU = torch.device("cpu")
MAX_POSITIONS = 512
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
WINDOW = {"layer_types": ["sliding_attention"], "sliding_window": 9}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"qwen3": True, "layer": "layers.0."},
    "all tokens": {"draft_vocab_size": VOCAB_SIZE},
    "target's rows": {"head": False},
    "own embedding": {"embedding": True},
    "another target hidden size": {"target_hidden": 24, "embedding": True},
    "norm before residual": {"norm_before_residual": True},
    "norm before fc": {"norm_before_fc": True},
    "a norm of each feature": {"fc_norm": True, "norm_before_residual": True},
    "normed output": {"norm_output": True},
    "attention bias": {"attention_bias": True},
    "window": WINDOW,
    "llama3 rope": {"rope_scaling": LLAMA3},
    "logit scale": {"logit_scale": 0.5},
    "deepspec": {
        "qwen3": True, "layer": "layers.0.", "embedding": True, "draft_vocab_size": VOCAB_SIZE,
        "architectures": ["Qwen3Eagle3Model"], "num_target_layers": 5, "target_layer_ids": [0, 2, 3],
    },
    "two features": {"num_features": 2},
    "all at once": {
        "qwen3": True, "norm_before_residual": True, "fc_norm": True, "norm_output": True, "target_hidden": 24,
        "embedding": True, "attention_bias": True, "logit_scale": 2.0, **WINDOW,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """The same drafter twice: paged, and dense."""

    drafter: Eagle3Drafter
    dense: DenseEagle3


def make_pair(directory: Path, ops: LayerOps | None = None, **draft: Any) -> Pair:
    make_target(directory / "target", hidden_size=draft.get("target_hidden", 32))
    target = load_target(read_target(directory / "target"), MAX_POSITIONS, torch.float32, CPU)
    tensors = make_eagle3(directory / "draft", **draft)
    spec = read_draft(directory / "draft")
    assert isinstance(spec, Eagle3Spec)
    assert spec.notes == ()
    model = Eagle3Model.load(spec, load_options(MAX_POSITIONS, ops=ops))
    drafter = Eagle3Drafter(model, target, caches(spec.decoder), TorchBackend(BLOCK_SIZE))
    ids = [i + 3 * i * spec.maps_vocabulary for i in range(spec.draft_vocab_size)]
    embedding = tensors.get("embed_tokens.weight", target.embed(torch.arange(VOCAB_SIZE)))
    head = tensors["lm_head.weight"] if "lm_head.weight" in tensors else target.lm_head.weight[ids]
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    return Pair(drafter, DenseEagle3(spec, tensors, embedding, head, ids))


@dataclass(frozen=True)
class Draft:
    """What one row drafted in one step, by both."""

    logits: torch.Tensor
    tokens: list[int]
    dense_logits: torch.Tensor
    dense_tokens: list[int]


NUM_ROWS = 3
LAST_POSITION = 60


def drafts_of(pair: Pair, most: int = 6, last_position: int = LAST_POSITION, seed: int = 5) -> list[Draft]:
    """Rows of different lengths and k, drafting step after step with random numbers of drafts accepted.

    A step makes 1 to 1 + k more positions of each row final, overwriting what the last drafts left there, while what
    they left behind those goes stale. The first step is a prompt in two chunks.
    """
    drafter, dense = pair.drafter, pair.dense
    rng = np.random.default_rng(seed)
    width = dense.tensors["fc.weight"].shape[1]
    features = torch.randn(NUM_ROWS, 90, width, generator=torch.Generator().manual_seed(seed))
    tokens = rng.integers(0, VOCAB_SIZE, (NUM_ROWS, 90))
    tables = block_tables(NUM_ROWS)
    done = np.zeros(NUM_ROWS, dtype=np.int64)
    chunks = [np.array([2, 7, 20]), np.array([1, 4, 6])]
    found: list[Draft] = []
    while True:
        for accepted in chunks:
            rows, positions = spans(done, accepted)
            drafter.inject(
                ContextBatch(
                    features[rows, positions],
                    torch.from_numpy(positions),
                    slots(tables, rows, positions),
                    next_token_ids=torch.from_numpy(tokens[rows, positions + 1]),
                )
            )
            done = done + accepted
        if done.max() > last_position:
            return found
        k = rng.integers(1, most + 1, NUM_ROWS)
        every = np.arange(NUM_ROWS)
        sampler = KeepsLogits()
        batch = draft_batch(tokens[every, done], done, k, tables, 0, 0, features[every, done - 1])
        drafted = drafter.propose(batch, sampler).token_ids.split(k.tolist())
        for row, logits in enumerate(sampler.logits.split(k.tolist())):
            n = int(done[row])
            expected = dense.drafts(features[row, :n], tokens[row, : n + 1].tolist(), int(k[row]))
            found.append(Draft(logits, drafted[row].tolist(), *expected))
        chunks = [rng.integers(1, k + 2)]


def largest_difference(drafts: list[Draft]) -> float:
    return max((draft.logits - draft.dense_logits).abs().max().item() for draft in drafts)


@pytest.mark.parametrize("name", VARIANTS)
def test_drafts_equal_a_dense_implementation_after_any_acceptance(name: str, tmp_path: Path) -> None:
    drafts = drafts_of(make_pair(tmp_path, **VARIANTS[name]))
    assert {len(draft.tokens) for draft in drafts} >= {1, 6}
    for draft in drafts:
        torch.testing.assert_close(draft.logits.double(), draft.dense_logits, atol=1e-4, rtol=0)
        assert draft.tokens == draft.dense_tokens


class TokensOfTheirOwn(DenseEagle3):
    """A defect: each position goes with its own token, not with the one behind it."""

    def behind(self, tokens: Sequence[int]) -> Sequence[int]:
        return tokens[:-1]


class OneHiddenState(DenseEagle3):
    """A defect: the hidden state that the next pass reads is the final-normed one."""

    def run_layer(self, inputs: torch.Tensor, hidden: torch.Tensor, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        output, _ = super().run_layer(inputs, hidden, position)
        return output, output


@pytest.mark.parametrize("defect", [TokensOfTheirOwn, OneHiddenState])
def test_the_comparison_notices_a_wrong_chain(defect: type[DenseEagle3], tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    assert largest_difference(drafts_of(Pair(pair.drafter, defect(**vars(pair.dense))))) > 1e-2


class Blocks:
    """Drafts of `NUM_ROWS` requests, of different lengths."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        width = pair.dense.tensors["fc.weight"].shape[1]
        self.features = torch.randn(NUM_ROWS, 30, width, generator=torch.Generator().manual_seed(7))
        self.tokens = np.random.default_rng(7).integers(0, VOCAB_SIZE, (NUM_ROWS, 31))
        tables, self.done = block_tables(NUM_ROWS), np.array([4, 17, 29])
        self.k, every = np.array([6, 1, 4]), np.arange(NUM_ROWS)
        rows, positions = spans(np.zeros(NUM_ROWS, dtype=np.int64), self.done)
        pair.drafter.inject(
            ContextBatch(
                self.features[rows, positions],
                torch.from_numpy(positions),
                slots(tables, rows, positions),
                next_token_ids=torch.from_numpy(self.tokens[rows, positions + 1]),
            )
        )
        anchors, before = self.tokens[every, self.done], self.features[every, self.done - 1]
        self.batch = draft_batch(anchors, self.done, self.k, tables, 0, 0, before)
        self.seeds = torch.arange(NUM_ROWS).repeat_interleave(torch.from_numpy(self.k)) + 100

    def dense_logits(self, drafts: Sequence[int]) -> torch.Tensor:
        """Of all rows' drafts where these were drafted, float64 `[num_drafts, draft_vocab]`."""
        found, chosen = [], list(drafts)
        for row in range(NUM_ROWS):
            n, k = int(self.done[row]), int(self.k[row])
            forced = Forced(**vars(self.pair.dense), chain=tuple(chosen[:k]))
            chosen = chosen[k:]
            found.append(forced.drafts(self.features[row, :n], self.tokens[row, : n + 1].tolist(), k)[0])
        return torch.cat(found)


@dataclass(frozen=True)
class Forced(DenseEagle3):
    """Drafts these tokens, whatever the logits say."""

    chain: tuple[int, ...]

    def choose(self, logits: torch.Tensor, place: int) -> int:
        return self.chain[place]


@pytest.mark.parametrize("name", ["llama", "all tokens", "logit scale"])
@pytest.mark.parametrize("temperature", [0.7, 3.0])
def test_noise_is_that_of_each_drafts_own_position_and_of_the_targets_ids(
    name: str, temperature: float, tmp_path: Path
) -> None:
    blocks = Blocks(make_pair(tmp_path, **VARIANTS[name]))
    temperatures = torch.full((len(blocks.seeds),), temperature)
    found = blocks.pair.drafter.propose(blocks.batch, DraftSampler(CpuStepOps(), temperatures, blocks.seeds))
    positions = torch.from_numpy(spans(blocks.done + 1, blocks.k)[1])
    ids = torch.tensor(blocks.pair.dense.target_ids)
    logits = blocks.dense_logits(found.token_ids.tolist())
    scores = logits / temperature + gumbel_reference(blocks.seeds, positions, ids)
    assert found.token_ids.tolist() == ids[scores.argmax(dim=-1)].tolist()
    assert found.token_ids.tolist() != ids[logits.argmax(dim=-1)].tolist()


def test_it_is_as_sure_of_a_draft_as_the_logits_that_it_was_chosen_by(tmp_path: Path) -> None:
    blocks = Blocks(make_pair(tmp_path))
    found = blocks.pair.drafter.propose(blocks.batch, DraftSampler(CpuStepOps(), wants_confidence=True))
    columns = torch.tensor([blocks.pair.dense.target_ids.index(token) for token in found.token_ids.tolist()])
    expected = log_odds_reference(blocks.dense_logits(found.token_ids.tolist()).float(), columns)
    torch.testing.assert_close(found.confidence, expected, atol=1e-3, rtol=0)
    assert blocks.pair.drafter.propose(blocks.batch, DraftSampler(CpuStepOps())).confidence is None


@pytest.mark.parametrize("name", ["llama", "all at once"])
def test_kernels_draft_what_the_references_draft(name: str, tmp_path: Path) -> None:
    drafts = drafts_of(make_pair(tmp_path, TritonLayerOps(), **VARIANTS[name]), most=3, last_position=29)
    assert len(drafts) > NUM_ROWS
    for draft in drafts:
        torch.testing.assert_close(draft.logits.double(), draft.dense_logits, atol=1e-4, rtol=0)
        assert draft.tokens == draft.dense_tokens
