"""The drafter, through `inject` and `propose` over paged KV, computes what a second, dense implementation computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dflash_backend.attention.torch_backend import TorchBackend
from dflash_backend.checkpoints import CheckpointError, RopeSpec
from dflash_backend.checkpoints.targets import read_target
from dflash_backend.drafters.base import ContextBatch
from dflash_backend.drafters.dflash.config import DFlashSpec, LogitsSpec
from dflash_backend.drafters.dflash.drafter import DFlashDrafter, DFlashModel
from dflash_backend.drafters.registry import read_draft
from dflash_backend.models import TargetModel, load_target
from dflash_backend.worker.batch import spans
from tests.models.dense_drafter import DenseDrafter
from tests.models.drafting import KeepsLogits, draft_batch, load_options, slots
from tests.support.paged import BLOCK_SIZE, block_tables, caches
from tests.support.tiny_models import VOCAB_SIZE, make_draft, make_target

pytestmark = pytest.mark.usefixtures("inference_mode")
CPU = torch.device("cpu")
MAX_POSITIONS = 512
HIDDEN = 32
DRAFT_VOCAB = 23


@dataclass(frozen=True)
class Variant:
    """A drafter to compare: fields of its spec that differ from the plain one, and tensors that it ships besides."""

    spec: dict[str, Any] = field(default_factory=dict)
    decoder: dict[str, Any] = field(default_factory=dict)
    target_hidden: int = HIDDEN
    draft_vocab: int = VOCAB_SIZE
    embedding: bool = False
    head: bool = False
    mask_embedding: bool = False


VARIANTS = {
    "non-causal": Variant(),
    "causal": Variant({"causal": (True, True)}),
    "causality of each layer": Variant({"causal": (False, True)}),
    "window beside full attention": Variant({"causal": (True, False)}, {"sliding_windows": (20, None)}),
    "window shorter than the block": Variant({"causal": (False, True)}, {"sliding_windows": (None, 5)}),
    "non-causal windows": Variant({}, {"sliding_windows": (20, 5)}),
    "llama3 rope": Variant({}, {"rope": RopeSpec(500.0, "llama3", 8.0, 32)}),
    "yarn rope": Variant({}, {"rope": RopeSpec(10000.0, "yarn", 4.0, 32, attention_factor=1.1386)}),
    "target's rows for a cut vocabulary": Variant(draft_vocab=DRAFT_VOCAB),
    "own head for a cut vocabulary": Variant(draft_vocab=DRAFT_VOCAB, head=True),
    "own embedding and head": Variant(embedding=True, head=True),
    "other target hidden size": Variant(target_hidden=24, embedding=True, head=True),
    "mask embedding": Variant(mask_embedding=True),
    "block of 16": Variant({"block_size": 16, "causal": (False, True)}, {"sliding_windows": (9, None)}),
    "input embedding scale": Variant({"input_embedding_scale": 2.5}, mask_embedding=True),
    "logits": Variant({"logits": LogitsSpec(1.5, 2.0, 0.75)}),
    "all at once": Variant(
        {
            "causal": (True, False),
            "block_size": 16,
            "input_embedding_scale": 0.5,
            "logits": LogitsSpec(softcap=3.0, scale=0.5),
        },
        {"sliding_windows": (7, None), "rope": RopeSpec(10000.0, "linear", 4.0)},
        target_hidden=24,
        draft_vocab=DRAFT_VOCAB,
        embedding=True,
        head=True,
        mask_embedding=True,
    ),
}


@dataclass(frozen=True)
class Pair:
    """The same drafter twice: paged, and dense."""

    drafter: DFlashDrafter
    dense: DenseDrafter


def make_pair(directory: Path, variant: Variant) -> Pair:
    """Write the checkpoints of a variant and load them both ways."""
    generator = torch.Generator().manual_seed(11)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    make_target(directory / "target", hidden_size=variant.target_hidden)
    target = load_target(read_target(directory / "target"), MAX_POSITIONS, torch.float32, CPU)
    tensors = make_draft(directory / "draft")
    spec = variant_spec(read_draft(directory / "draft"), variant)
    tensors["fc.weight"] = normal(HIDDEN, len(spec.target_layer_ids) * variant.target_hidden)
    if variant.embedding:
        tensors["embed_tokens.weight"] = normal(VOCAB_SIZE, HIDDEN)
    if variant.head:
        tensors["lm_head.weight"] = normal(variant.draft_vocab, HIDDEN)
    if spec.maps_vocabulary:
        kept = torch.randperm(VOCAB_SIZE, generator=generator)[: variant.draft_vocab].sort().values
        tensors["d2t"] = kept - torch.arange(variant.draft_vocab)
        tensors["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, kept, True)
    save_file(tensors, directory / "draft" / "model.safetensors")
    if variant.mask_embedding:
        torch.save(normal(1, HIDDEN), directory / "draft" / "mask_embedding.pt")
    model = DFlashModel.load(spec, load_options(MAX_POSITIONS))
    drafter = DFlashDrafter(model, target, caches(spec.decoder), TorchBackend(BLOCK_SIZE))
    return Pair(drafter, dense_drafter(directory / "draft", spec, tensors, target))


def with_decoder(spec: DFlashSpec, **changes: Any) -> DFlashSpec:
    return dataclasses.replace(spec, decoder=dataclasses.replace(spec.decoder, **changes))


def variant_spec(plain: DFlashSpec, variant: Variant) -> DFlashSpec:
    return dataclasses.replace(
        with_decoder(plain, **variant.decoder),
        target_hidden_size=variant.target_hidden,
        draft_vocab_size=variant.draft_vocab,
        has_embedding=variant.embedding,
        has_lm_head=variant.head,
        has_mask_embedding=variant.mask_embedding,
        **variant.spec,
    )


def dense_drafter(
    directory: Path, spec: DFlashSpec, tensors: dict[str, torch.Tensor], target: TargetModel
) -> DenseDrafter:
    """The dense implementation over the checkpoint's raw tensors."""
    ids = list(range(VOCAB_SIZE))
    if "d2t" in tensors:
        ids = [draft_id + offset for draft_id, offset in enumerate(tensors["d2t"].tolist())]
    embedding = tensors.get("embed_tokens.weight")
    if embedding is None:
        embedding = target.embed(torch.arange(VOCAB_SIZE))
    mask = embedding[spec.mask_token_id]
    if spec.has_mask_embedding:
        mask = torch.load(directory / "mask_embedding.pt", weights_only=True)[0]
    head = tensors["lm_head.weight"] if "lm_head.weight" in tensors else target.lm_head.weight[ids]
    return DenseDrafter(spec, tensors, embedding, head, mask, ids)


@dataclass(frozen=True)
class Draft:
    """What one row drafted in one step, by both."""

    logits: torch.Tensor
    tokens: list[int]
    dense_logits: torch.Tensor
    dense_tokens: list[int]


NUM_ROWS = 3
LAST_POSITION = 60


def drafts_of(pair: Pair, seed: int = 5) -> list[Draft]:
    """Rows of different lengths and k, drafting step after step with random numbers of drafts accepted.

    A step makes 1 to 1 + k more positions of each row final, overwriting what the last block left there, while what
    it left behind them goes stale.
    """
    drafter, dense = pair.drafter, pair.dense
    rng = np.random.default_rng(seed)
    width = dense.tensors["fc.weight"].shape[1]
    features = torch.randn(NUM_ROWS, 80, width, generator=torch.Generator().manual_seed(seed))
    tables = block_tables(NUM_ROWS)
    done = np.zeros(NUM_ROWS, dtype=np.int64)
    accepted = np.array([3, 11, 26])
    found: list[Draft] = []
    while True:
        rows, positions = spans(done, accepted)
        drafter.inject(
            ContextBatch(features[rows, positions], torch.from_numpy(positions), slots(tables, rows, positions))
        )
        done = done + accepted
        if done.max() > LAST_POSITION:
            return found
        k = rng.integers(1, dense.spec.max_speculative_tokens + 1, NUM_ROWS)
        anchors = rng.integers(0, VOCAB_SIZE, NUM_ROWS)
        sampler = KeepsLogits()
        batch = draft_batch(anchors, done, k, tables, drafter.placeholder_id, drafter.lookahead_base)
        tokens = drafter.propose(batch, sampler).token_ids.split(k.tolist())
        for row, logits in enumerate(sampler.logits.split(k.tolist())):
            expected = dense.drafts(features[row, : done[row]], int(anchors[row]), int(k[row]))
            found.append(Draft(logits, tokens[row].tolist(), *expected))
        accepted = rng.integers(1, k + 2)


def largest_difference(drafts: list[Draft]) -> float:
    return max((draft.logits - draft.dense_logits).abs().max().item() for draft in drafts)


@pytest.mark.parametrize("name", VARIANTS)
def test_drafts_equal_a_dense_implementation_after_any_acceptance(name: str, tmp_path: Path) -> None:
    drafts = drafts_of(make_pair(tmp_path, VARIANTS[name]))
    assert len(drafts) >= 3 * NUM_ROWS
    assert {draft.logits.shape[1] for draft in drafts} == {VARIANTS[name].draft_vocab}
    for draft in drafts:
        torch.testing.assert_close(draft.logits.double(), draft.dense_logits, atol=1e-4, rtol=0)
        assert draft.tokens == draft.dense_tokens


def test_a_block_of_16_is_compared_at_all_its_positions(tmp_path: Path) -> None:
    drafts = drafts_of(make_pair(tmp_path, VARIANTS["block of 16"]))
    assert max(len(draft.tokens) for draft in drafts) == 15


class LaterQueriesInPlace(DenseDrafter):
    """A defect: mask queries past the eighth are rotated as the eighth."""

    def query_positions(self, n: int, q: int) -> torch.Tensor:
        return n + torch.arange(q).clamp(max=8)


Misread = Callable[[DenseDrafter], DenseDrafter]


def spec(**changes: Any) -> Misread:
    return lambda dense: dataclasses.replace(dense, spec=dataclasses.replace(dense.spec, **changes))


def decoder(**changes: Any) -> Misread:
    return lambda dense: dataclasses.replace(dense, spec=with_decoder(dense.spec, **changes))


def features_in_another_order(dense: DenseDrafter) -> DenseDrafter:
    weight = torch.cat(dense.tensors["fc.weight"].chunk(2, dim=1)[::-1], dim=1)
    return dataclasses.replace(dense, tensors=dense.tensors | {"fc.weight": weight})


MISREADINGS: dict[str, tuple[str, Misread]] = {
    "causality of one layer": ("causality of each layer", spec(causal=(False, False))),
    "window one too long": ("window beside full attention", decoder(sliding_windows=(21, None))),
    "window on every layer": ("window shorter than the block", decoder(sliding_windows=(5, 5))),
    "rope scaling ignored": ("llama3 rope", decoder(rope=RopeSpec(500.0))),
    "features in another order": ("non-causal", features_in_another_order),
    "queries past the eighth at the eighth's position": (
        "block of 16",
        lambda dense: LaterQueriesInPlace(**vars(dense)),
    ),
    "input embeddings as they are": ("input embedding scale", spec(input_embedding_scale=1.0)),
    "logits without their cap": ("logits", spec(logits=LogitsSpec(1.5, None, 0.75))),
    "logits scaled before their cap": ("logits", spec(logits=LogitsSpec(1.5 * 0.75, 2.0))),
    "the table's row for the mask": (
        "mask embedding",
        lambda dense: dataclasses.replace(dense, mask=dense.embedding[dense.spec.mask_token_id]),
    ),
}


@pytest.mark.parametrize("name", MISREADINGS)
def test_the_comparison_notices_a_misread_checkpoint(name: str, tmp_path: Path) -> None:
    """The test above can fail."""
    variant, misread = MISREADINGS[name]
    pair = make_pair(tmp_path, VARIANTS[variant])
    assert largest_difference(drafts_of(Pair(pair.drafter, misread(pair.dense)))) > 1e-2


@pytest.mark.parametrize("mistake", ["features at other positions", "query KV left in place"])
def test_the_comparison_notices_a_wrong_injection(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can fail for the cache as well: what is injected must be each position's own, and must be all of them."""
    pair = make_pair(tmp_path, VARIANTS["non-causal"])
    inject = DFlashDrafter.inject

    def wrong(drafter: DFlashDrafter, batch: ContextBatch) -> None:
        if mistake == "features at other positions":
            inject(drafter, dataclasses.replace(batch, features=batch.features.roll(1, 0)))
        else:
            # The first block comes after the prompt; from then on, the last position of each row keeps the KV of the
            # mask query that drafted it.
            last = torch.cat([batch.positions[1:] != batch.positions[:-1] + 1, torch.tensor([True])])
            kept = ~last if batch.positions.min() > 0 else torch.ones_like(last)
            inject(drafter, ContextBatch(batch.features[kept], batch.positions[kept], batch.slots[kept]))

    monkeypatch.setattr(DFlashDrafter, "inject", wrong)
    assert largest_difference(drafts_of(pair)) > 1e-2


def test_an_anchor_that_is_the_mask_token_has_the_mask_embedding_and_no_other_token_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drafter = make_pair(tmp_path, VARIANTS["mask embedding"]).drafter
    vector = torch.load(tmp_path / "draft" / "mask_embedding.pt", weights_only=True)[0]
    given: list[torch.Tensor] = []
    forward = drafter.model.forward
    monkeypatch.setattr(drafter.model, "forward", lambda each, *rest: (given.append(each), forward(each, *rest))[1])
    ones, tables = np.ones(NUM_ROWS, dtype=np.int64), block_tables(NUM_ROWS)
    tokens: list[torch.Tensor] = []
    for first in range(0, VOCAB_SIZE, NUM_ROWS):
        anchors = (first + np.arange(NUM_ROWS)) % VOCAB_SIZE
        batch = draft_batch(anchors, ones, ones, tables, drafter.placeholder_id, drafter.lookahead_base)
        drafter.propose(batch, KeepsLogits())
        assert batch.queries is not None
        tokens.append(batch.queries.token_ids)
    ids, embeddings = torch.cat(tokens), torch.cat(given)
    assert set(ids.tolist()) == set(range(VOCAB_SIZE))
    changed = (embeddings != drafter.target.embed(ids)).any(dim=1)
    assert torch.equal(changed, ids == drafter.model.spec.mask_token_id)
    assert (embeddings[changed] == vector).all()


def small_vocabulary_checkpoint(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> DFlashSpec:
    """The spec of a drafter with a cut vocabulary whose tensors `change` has edited."""
    tensors = make_draft(directory)
    tensors["d2t"] = torch.arange(DRAFT_VOCAB) * 3
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    return dataclasses.replace(read_draft(directory), draft_vocab_size=DRAFT_VOCAB)


def d2t_is(index: int, value: int) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors["d2t"].__setitem__(index, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            d2t_is(2, VOCAB_SIZE - 2),
            rf"model.safetensors: tensor 'd2t' is {VOCAB_SIZE - 2} at draft id 2; .*from 0 to 96",
        ),
        (d2t_is(4, -5), "tensor 'd2t' is -5 at draft id 4"),
        (d2t_is(4, 2**63 - 1), "tensor 'd2t' is 9223372036854775807 at draft id 4"),
        (d2t_is(4, -(2**63)), "tensor 'd2t' is -9223372036854775808 at draft id 4"),
        (
            d2t_is(4, 0),
            r"draft ids 1 \(d2t 3\) and 4 \(d2t 0\) both to the target id 4; expected one draft id for each",
        ),
        (lambda tensors: tensors.pop("d2t"), "tensor 'd2t'.* is missing"),
        (lambda tensors: tensors.update(d2t=torch.zeros(DRAFT_VOCAB)), "tensor 'd2t' is F32"),
        (lambda tensors: tensors.update(d2t=torch.zeros(9, dtype=torch.int64)), r"tensor 'd2t' has shape \[9\]"),
    ],
    ids=["too high", "too low", "overflow", "underflow", "not distinct", "missing", "float", "length"],
)
def test_a_bad_vocabulary_map_is_refused(
    change: Callable[[dict[str, torch.Tensor]], None], message: str, tmp_path: Path
) -> None:
    spec = small_vocabulary_checkpoint(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        DFlashModel.load(spec, load_options(MAX_POSITIONS))


def test_maps_of_equal_vocabularies_and_what_only_training_needs_are_ignored(tmp_path: Path) -> None:
    tensors = make_draft(tmp_path)
    tensors |= {
        "d2t": torch.full((VOCAB_SIZE,), 10**6),
        "t2d": torch.ones(VOCAB_SIZE, dtype=torch.bool),
        "verifier_norm.weight": torch.ones(HIDDEN),
        "verifier_lm_head.weight": torch.ones(VOCAB_SIZE, HIDDEN),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    model = DFlashModel.load(read_draft(tmp_path), load_options(MAX_POSITIONS))
    assert model.id_map is None


def test_a_map_is_allocated_for_a_draft_vocabulary_only(tmp_path: Path) -> None:
    spec = small_vocabulary_checkpoint(tmp_path, lambda tensors: None)
    model = DFlashModel.load(spec, load_options(MAX_POSITIONS))
    assert model.id_map is not None
    assert model.id_map.tolist() == [4 * i for i in range(DRAFT_VOCAB)]
