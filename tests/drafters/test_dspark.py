"""The DSpark drafter computes what a second, dense one computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_backend.attention import AttentionBatch
from dflash_backend.attention.torch_backend import TorchBackend
from dflash_backend.checkpoints.targets import read_target
from dflash_backend.drafters.base import ContextBatch, DraftBatch, DraftQueries, DraftSampler
from dflash_backend.drafters.dspark.config import DSparkSpec
from dflash_backend.drafters.dspark.drafter import DSparkDrafter, DSparkModel
from dflash_backend.drafters.registry import read_draft
from dflash_backend.models import load_target
from dflash_backend.models.ops import TritonLayerOps
from dflash_backend.worker.batch import spans
from dflash_backend.worker.step_ops import CpuStepOps
from dflash_kernels.gumbel_noise import gumbel_reference
from dflash_kernels.log_odds import MAX_LOG_ODDS, log_odds_reference
from tests.drafters.drafts import make_dspark
from tests.drafters.test_dflash import CPU, MAX_POSITIONS, NUM_ROWS, Pair, dense_drafter, drafts_of, largest_difference
from tests.models.dense_dspark import DenseDSpark, Walk
from tests.models.drafting import draft_batch, load_options, slots
from tests.support.paged import BLOCK_SIZE, block_tables, caches
from tests.support.tiny_models import VOCAB_SIZE, make_target

pytestmark = pytest.mark.usefixtures("inference_mode")

NOT_FROM_ANCHOR = {"sample_from_anchor": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gated": {"kind": "gated"},
    "recurrent": {"kind": "rnn"},
    "masks alone": NOT_FROM_ANCHOR,
    "gated, masks alone": {"kind": "gated", **NOT_FROM_ANCHOR},
    "recurrent, masks alone": {"kind": "rnn", **NOT_FROM_ANCHOR},
    "no Markov head": {"rank": 0},
    "no confidence head": {"kind": "gated", "confidence": False},
    "confidence of the output alone": {"reads_markov": False},
    "draft vocabulary": {"draft_vocab_size": 24},
    "draft vocabulary, recurrent": {"kind": "rnn", "draft_vocab_size": 24},
    "logit scale": {"kind": "gated", "logit_scale": 0.5},
}


def make_pair(directory: Path, **draft: Any) -> Pair:
    """The same drafter twice: paged, and dense."""
    make_target(directory / "target")
    target = load_target(read_target(directory / "target"), MAX_POSITIONS, torch.float32, CPU)
    tensors = make_dspark(directory / "draft", **draft)
    spec = read_draft(directory / "draft")
    assert isinstance(spec, DSparkSpec)
    model = DSparkModel.load(spec, load_options(MAX_POSITIONS))
    drafter = DSparkDrafter(model, target, caches(spec.decoder), TorchBackend(BLOCK_SIZE))
    dense = DenseDSpark(**vars(dense_drafter(directory / "draft", spec, tensors, target)))
    return Pair(drafter, dense)


@pytest.mark.parametrize("name", VARIANTS)
def test_drafts_equal_a_dense_implementation_after_any_acceptance(name: str, tmp_path: Path) -> None:
    """Blocks of different lengths beside one another, down to one draft, up to the most that there are."""
    pair = make_pair(tmp_path, **VARIANTS[name])
    drafts = drafts_of(pair)
    assert max(len(draft.tokens) for draft in drafts) == pair.dense.spec.max_speculative_tokens
    assert min(len(draft.tokens) for draft in drafts) == 1
    for draft in drafts:
        torch.testing.assert_close(draft.logits.double(), draft.dense_logits, atol=1e-4, rtol=0)
        assert draft.tokens == draft.dense_tokens


def test_a_block_has_as_many_drafts_as_places_or_one_less(tmp_path: Path) -> None:
    assert make_pair(tmp_path / "a").dense.spec.max_speculative_tokens == 8
    assert make_pair(tmp_path / "b", **NOT_FROM_ANCHOR).dense.spec.max_speculative_tokens == 7


class DraftIdsBefore(DenseDSpark):
    """A defect: the embedding of the token before is looked up by its draft id."""

    def _latent(self, output: torch.Tensor, previous: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        draft_id = self.target_ids.index(previous) if previous in self.target_ids else previous
        return super()._latent(output, draft_id, state)


class StateFromTheFirstMask(DenseDSpark):
    """A defect: a recurrent head has no step at an anchor whose output is not used."""

    def _first_state(self, output: torch.Tensor, anchor: int) -> torch.Tensor:
        return torch.zeros_like(super()._first_state(output, anchor))


@pytest.mark.parametrize(
    ("variant", "defect"),
    [("draft vocabulary", DraftIdsBefore), ("recurrent, masks alone", StateFromTheFirstMask)],
)
def test_the_comparison_notices_a_wrong_walk(variant: str, defect: type[DenseDSpark], tmp_path: Path) -> None:
    pair = make_pair(tmp_path, **VARIANTS[variant])
    assert largest_difference(drafts_of(Pair(pair.drafter, defect(**vars(pair.dense))))) > 1e-2


class Blocks:
    """One block for each of `NUM_ROWS` requests, of different lengths, to be drafted by both."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        assert isinstance(pair.dense, DenseDSpark)
        self.dense = pair.dense
        width = pair.dense.tensors["fc.weight"].shape[1]
        self.features = torch.randn(NUM_ROWS, 30, width, generator=torch.Generator().manual_seed(7))
        tables, self.done = block_tables(NUM_ROWS), np.array([4, 17, 29])
        self.k, self.anchors = np.array([7, 1, 5]), np.array([5, 90, 44])
        rows, positions = spans(np.zeros(NUM_ROWS, dtype=np.int64), self.done)
        drafter = pair.drafter
        drafter.inject(
            ContextBatch(self.features[rows, positions], torch.from_numpy(positions), slots(tables, rows, positions))
        )
        self.batch = draft_batch(
            self.anchors, self.done, self.k, tables, drafter.placeholder_id, drafter.lookahead_base
        )

    @property
    def positions(self) -> torch.Tensor:
        """Of the drafts, behind their anchors."""
        return torch.from_numpy(spans(self.done + 1, self.k)[1])

    def walks(self, temperature: float = 1.0, noise: torch.Tensor | None = None) -> list[Walk]:
        """What the dense drafter finds. noise: `[num_drafts, draft_vocab]`."""
        noises = [None] * NUM_ROWS if noise is None else list(noise.split(self.k.tolist()))
        return [
            self.dense.walk(
                self.features[row, : self.done[row]], int(self.anchors[row]), int(self.k[row]), temperature, noises[row]
            )
            for row in range(NUM_ROWS)
        ]


NOISY = ("vanilla", "recurrent", "masks alone", "draft vocabulary", "no Markov head", "logit scale")


@pytest.mark.parametrize("name", NOISY)
@pytest.mark.parametrize("temperature", [0.7, 3.0])
def test_noise_is_that_of_each_drafts_own_position_and_of_the_targets_ids(
    name: str, temperature: float, tmp_path: Path
) -> None:
    blocks = Blocks(make_pair(tmp_path, **VARIANTS[name]))
    count = int(blocks.k.sum())
    seeds = torch.arange(NUM_ROWS).repeat_interleave(torch.from_numpy(blocks.k))
    sampler = DraftSampler(CpuStepOps(), torch.full((count,), temperature), seeds)
    found = blocks.pair.drafter.propose(blocks.batch, sampler)
    noise = gumbel_reference(seeds, blocks.positions, torch.tensor(blocks.dense.target_ids))
    walks = blocks.walks(temperature, noise)
    assert found.token_ids.tolist() == [token for walk in walks for token in walk.tokens]
    assert found.token_ids.tolist() != [token for walk in blocks.walks() for token in walk.tokens]


HEADS = [name for name, draft in VARIANTS.items() if draft.get("confidence", True)]


@pytest.mark.parametrize("name", HEADS)
def test_a_confidence_head_reads_the_token_that_was_drafted_before(name: str, tmp_path: Path) -> None:
    """With noise, so that another token than the likeliest may stand there."""
    blocks = Blocks(make_pair(tmp_path, **VARIANTS[name]))
    seeds = torch.arange(NUM_ROWS).repeat_interleave(torch.from_numpy(blocks.k)) + 100
    noise = gumbel_reference(seeds, blocks.positions, torch.tensor(blocks.dense.target_ids))
    sampler = DraftSampler(CpuStepOps(), torch.full((len(seeds),), 2.0), seeds, wants_confidence=True)
    confidence = blocks.pair.drafter.propose(blocks.batch, sampler).confidence
    assert confidence is not None
    expected = [value for walk in blocks.walks(2.0, noise) for value in walk.log_odds]
    bounded = torch.tensor(expected).clamp(-MAX_LOG_ODDS, MAX_LOG_ODDS)
    assert (bounded.abs() < MAX_LOG_ODDS).sum() > len(expected) // 2
    torch.testing.assert_close(confidence, bounded, atol=1e-4, rtol=0)


def test_without_a_head_it_is_as_sure_as_the_logits_behind_the_token_before(tmp_path: Path) -> None:
    blocks = Blocks(make_pair(tmp_path, **VARIANTS["no confidence head"]))
    found = blocks.pair.drafter.propose(blocks.batch, DraftSampler(CpuStepOps(), wants_confidence=True))
    assert found.confidence is not None
    logits = torch.cat([walk.logits for walk in blocks.walks()])
    torch.testing.assert_close(found.confidence, log_odds_reference(logits.float(), found.token_ids), atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", ["no Markov head", "gated", "no confidence head"])
def test_a_confidence_is_left_out_where_it_is_not_asked_for(name: str, tmp_path: Path) -> None:
    blocks = Blocks(make_pair(tmp_path, **VARIANTS[name]))
    assert blocks.pair.drafter.propose(blocks.batch, DraftSampler(CpuStepOps())).confidence is None


def test_an_output_that_is_no_number_has_no_confidence(tmp_path: Path) -> None:
    drafter = make_pair(tmp_path).drafter
    assert isinstance(drafter, DSparkDrafter)
    head = drafter.model.confidence
    assert head is not None
    width = drafter.model.spec.decoder.hidden_size
    outputs = torch.full((2, width), float("nan"))
    assert head.log_odds(outputs, torch.zeros(2, 6)).tolist() == [-MAX_LOG_ODDS] * 2


@pytest.mark.parametrize("base", [0, 1])
def test_places_of_drafts_are_those_of_the_rows_whatever_their_layout(base: int) -> None:
    """All drafts at one place of their rows, and which rows of the place before have one."""

    def places(lens: list[int], draft_index: torch.Tensor | None) -> list[tuple[list[int] | None, list[int]]]:
        num_queries = np.array(lens) + base
        ids = torch.zeros(int(num_queries.sum()), dtype=torch.int64)
        layout = AttentionBatch(num_queries, num_queries, torch.zeros(len(lens), 1, dtype=torch.int32))
        width = int(num_queries.max())
        queries = DraftQueries(ids, ids, ids, layout, width, draft_index, from_anchor=base == 0)
        return [(None if rows is None else rows.tolist(), drafts.tolist()) for rows, drafts in queries.draft_steps()]

    assert places([3, 3], None) == [(None, [0, 3]), (None, [1, 4]), (None, [2, 5])]
    assert places([1, 3, 2], torch.zeros(1)) == [([0, 1, 2], [0, 1, 4]), ([1, 2], [2, 5]), ([0], [3])]


@pytest.mark.parametrize("name", ["gated", "recurrent, masks alone"])
def test_kernels_draft_what_the_references_draft(name: str, tmp_path: Path) -> None:
    blocks = Blocks(make_pair(tmp_path, **VARIANTS[name]))
    sampler = DraftSampler(CpuStepOps(), wants_confidence=True)
    batch: DraftBatch = blocks.batch
    expected = blocks.pair.drafter.propose(batch, sampler)
    assert expected.token_ids.max() < VOCAB_SIZE
    assert isinstance(blocks.pair.drafter.model, DSparkModel)
    assert batch.queries is not None
    outputs, drafter = torch.randn(len(batch.queries.token_ids), 32), blocks.pair.drafter
    logits = drafter.lm_head(batch.queries.of_drafts(outputs))
    by_reference = drafter._choose(outputs, logits, batch.queries, sampler)
    drafter.model.ops = TritonLayerOps()
    by_kernel = drafter._choose(outputs, logits, batch.queries, sampler)
    assert torch.equal(by_kernel.token_ids, by_reference.token_ids)
    torch.testing.assert_close(by_kernel.confidence, by_reference.confidence)
