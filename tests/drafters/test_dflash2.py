"""The DFlash2 drafter computes what a second, dense one computes; its config is read as its authors meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_backend.attention import AttentionBatch
from dflash_backend.attention.torch_backend import TorchBackend
from dflash_backend.checkpoints import CheckpointError
from dflash_backend.checkpoints.targets import read_target
from dflash_backend.drafters.base import ContextBatch, DraftQueries, DraftSampler
from dflash_backend.drafters.dflash2.config import ConvSpec, DFlash2Spec, SelectorSpec
from dflash_backend.drafters.dflash2.drafter import DFlash2Drafter, DFlash2Model
from dflash_backend.drafters.registry import read_draft
from dflash_backend.models import load_target
from dflash_backend.worker.batch import spans
from dflash_backend.worker.step_ops import CpuStepOps
from dflash_kernels.gumbel_noise import gumbel_reference
from tests.drafters.drafts import edit, make_dflash2, put
from tests.drafters.test_dflash import CPU, MAX_POSITIONS, NUM_ROWS, Pair, dense_drafter, drafts_of, largest_difference
from tests.models.dense_dflash2 import DenseDFlash2
from tests.models.drafting import draft_batch, load_options, slots
from tests.support.paged import BLOCK_SIZE, block_tables, caches
from tests.support.speculators_checkpoint import speculators_config
from tests.support.tiny_models import VOCAB_SIZE, make_target, save_checkpoint

pytestmark = pytest.mark.usefixtures("inference_mode")

SLIDES = {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": 9}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one tap": {"taps": 1},
    "four taps of groups of four": {"taps": 4, "group_size": 4},
    "one candidate": {"top_k": 1},
    "all candidates": {"top_k": 64},
    "windows, not causal": SLIDES | {"is_causal": False},
    "causal windows": SLIDES,
}


def make_pair(directory: Path, **draft: Any) -> Pair:
    """The same drafter twice: paged, and dense."""
    make_target(directory / "target")
    target = load_target(read_target(directory / "target"), MAX_POSITIONS, torch.float32, CPU)
    tensors = make_dflash2(directory / "draft", **draft)
    spec = read_draft(directory / "draft")
    assert isinstance(spec, DFlash2Spec)
    model = DFlash2Model.load(spec, load_options(MAX_POSITIONS))
    drafter = DFlash2Drafter(model, target, caches(spec.decoder), TorchBackend(BLOCK_SIZE))
    dense = DenseDFlash2(**vars(dense_drafter(directory / "draft", spec, tensors, target)))
    return Pair(drafter, dense)


@pytest.mark.parametrize("name", VARIANTS)
def test_drafts_equal_a_dense_implementation_after_any_acceptance(name: str, tmp_path: Path) -> None:
    """Blocks of different lengths beside one another, down to one draft."""
    drafts = drafts_of(make_pair(tmp_path, **VARIANTS[name]))
    assert {len(draft.tokens) for draft in drafts} >= {1, 7}
    for draft in drafts:
        torch.testing.assert_close(draft.logits.double(), draft.dense_logits, atol=1e-4, rtol=0)
        assert draft.tokens == draft.dense_tokens


class NextBlocksFirst(DenseDFlash2):
    """A defect: before a block's first query stands its last."""

    def _convolve(self, x: torch.Tensor, base: torch.Tensor, dynamic: torch.Tensor) -> torch.Tensor:
        output = super()._convolve(x, base, dynamic)
        output[0] += (base[1] + dynamic[0, 1].repeat_interleave(self.spec.conv.group_size)) * x[-1]
        return output


class OneTapFurther(DenseDFlash2):
    """A defect: the second tap is of the query before the one before."""

    def _convolve(self, x: torch.Tensor, base: torch.Tensor, dynamic: torch.Tensor) -> torch.Tensor:
        further = torch.stack([base[0], torch.zeros_like(base[1]), base[1]])
        dynamic = torch.stack([dynamic[:, 0], torch.zeros_like(dynamic[:, 1]), dynamic[:, 1]], dim=1)
        return super()._convolve(x, further, dynamic)


@pytest.mark.parametrize("defect", [NextBlocksFirst, OneTapFurther])
def test_the_comparison_notices_a_wrong_convolution(defect: type[DenseDFlash2], tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    assert largest_difference(drafts_of(Pair(pair.drafter, defect(**vars(pair.dense))))) > 1e-2


@pytest.mark.parametrize("temperature", [0.0, 0.7, 3.0])
def test_noisy_walks_choose_among_the_best_with_noise(temperature: float, tmp_path: Path) -> None:
    """Rows of 7, 3 and 1 drafts, each with a seed of its own; and how sure the drafter says it is."""
    pair = make_pair(tmp_path)
    drafter, dense = pair.drafter, pair.dense
    assert isinstance(dense, DenseDFlash2)
    done, k, anchors = np.array([9, 30, 4]), np.array([7, 3, 1]), np.array([5, 60, 11])
    features = torch.randn(
        NUM_ROWS, 40, dense.tensors["fc.weight"].shape[1], generator=torch.Generator().manual_seed(1)
    )
    tables = block_tables(NUM_ROWS)
    rows, positions = spans(done * 0, done)
    drafter.inject(ContextBatch(features[rows, positions], torch.from_numpy(positions), slots(tables, rows, positions)))
    seeds = torch.tensor([3, 2**60, 17])
    sampler = DraftSampler(
        CpuStepOps(),
        torch.full((int(k.sum()),), temperature),
        seeds.repeat_interleave(torch.from_numpy(k)),
        wants_confidence=True,
    )
    drafts = drafter.propose(draft_batch(anchors, done, k, tables, drafter.placeholder_id), sampler)
    assert drafts.confidence is not None
    tokens, confidence = (each.split(k.tolist()) for each in (drafts.token_ids, drafts.confidence))
    beyond_the_likeliest = 0
    for row in range(NUM_ROWS):
        outputs = dense.outputs(features[row, : done[row]], int(anchors[row]), int(k[row]))
        logits = dense.logits(outputs)
        scores = logits
        if temperature:
            positions = torch.arange(done[row] + 1, done[row] + 1 + k[row])
            noise = gumbel_reference(seeds[row].expand(len(positions)), positions, torch.arange(VOCAB_SIZE))
            scores = logits / temperature + noise.double()
        expected, log_odds = dense.walk(logits, outputs, int(anchors[row]), scores, temperature or 1.0)
        assert tokens[row].tolist() == expected
        torch.testing.assert_close(
            confidence[row].double(), torch.tensor(log_odds).double().clamp(-8, 8), atol=1e-3, rtol=0
        )
        likeliest = logits.topk(dense.spec.selector.top_k).indices
        beyond_the_likeliest += int((likeliest != tokens[row][:, None]).all(dim=1).sum())
    assert (beyond_the_likeliest > 0) == (temperature > 0)


def test_places_in_blocks_are_those_of_the_rows_whatever_their_layout() -> None:
    """Of one width, as on a device, where padding follows a shorter row's own queries; and of their own lengths."""
    ids = torch.arange(12)

    def queries(lens: list[int], draft_index: torch.Tensor | None) -> DraftQueries:
        layout = AttentionBatch(np.array(lens), np.array(lens), torch.zeros(len(lens), 1, dtype=torch.int64))
        return DraftQueries(ids, ids, ids, layout, max(lens), draft_index)

    uniform, ragged = queries([4, 4, 4], None), queries([4, 2, 5, 1], ids)
    assert uniform.row_starts().tolist() == [0, 4, 8, 12]
    assert uniform.block_index().tolist() == [0, 1, 2, 3] * 3
    assert ragged.row_starts().tolist() == [0, 4, 6, 11, 12]
    assert ragged.block_index().tolist() == [0, 1, 2, 3, 0, 1, 0, 1, 2, 3, 4, 0]


def make_speculators(directory: Path) -> None:
    """A DFlash2 drafter in the speculators format, which has no fields of its own beside the defaults."""
    tensors = make_dflash2(directory, taps=2, group_size=16, rank=256, top_k=16, **SLIDES)
    config = zlab_data(directory)
    own = speculators_config(config, None, VOCAB_SIZE, k=7) | {"speculators_model_type": "dflash2"}
    save_checkpoint(directory, own, tensors)


def zlab_data(directory: Path) -> dict[str, Any]:
    data: dict[str, Any] = {}
    edit(directory / "config.json", data.update)
    return data


def read(directory: Path) -> DFlash2Spec:
    spec = read_draft(directory)
    assert isinstance(spec, DFlash2Spec)
    return spec


def test_a_zlab_config_has_its_fields_in_dflash_config_or_at_the_top_level(tmp_path: Path) -> None:
    make_dflash2(tmp_path, conv_kernel_size=5, selector_top_k=7)
    spec = read(tmp_path)
    assert (spec.method, spec.conv, spec.selector) == ("dflash2", ConvSpec(2, 8), SelectorSpec(6, 5))
    edit(tmp_path / "config.json", lambda data: data["dflash_config"].pop("selector_top_k"))
    assert read(tmp_path).selector == SelectorSpec(6, 7)


def test_a_speculators_config_has_the_librarys_defaults(tmp_path: Path) -> None:
    make_speculators(tmp_path)
    edit(tmp_path / "config.json", lambda data: data.pop("sliding_window_non_causal"))
    spec = read(tmp_path)
    assert (spec.conv, spec.selector) == (ConvSpec(2, 16), SelectorSpec(256, 16))
    assert (spec.causal, spec.decoder.sliding_windows) == ((False, False), (9, 9))
    put(tmp_path / "config.json", sliding_window_non_causal=False, conv_kernel_size=4)
    assert read(tmp_path).causal == (True, True)
    assert read(tmp_path).conv == ConvSpec(4, 16)


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"conv_kernel_size": None}, "'conv_kernel_size' is missing; expected an integer from 1 to 8"),
    ({"selector_rank": None}, "'selector_rank' is missing"),
    ({"conv_kernel_size": 9}, "dflash_config: field 'conv_kernel_size' is 9; expected an integer from 1 to 8"),
    ({"conv_group_size": 5}, r"'conv_group_size' is 5; expected a number that divides hidden_size \(32\)"),
    ({"selector_top_k": 65}, "'selector_top_k' is 65; expected an integer from 1 to 64"),
    ({"selector_rank": True}, "'selector_rank' is True"),
    ({"markov_rank": 4}, "'markov_rank' is 4; .* Markov head of DSpark"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSALS)
def test_what_would_be_misread_is_refused_by_field(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_dflash2(tmp_path)
    edit(tmp_path / "config.json", lambda data: data["dflash_config"].update(fields))
    with pytest.raises(CheckpointError, match=message):
        read_draft(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"draft_vocab_size": 24}, r"'draft_vocab_size' is 24; expected vocab_size \(97\)"),
        ({"sample_from_anchor": True}, "'sample_from_anchor' is True; expected false"),
    ],
)
def test_a_vocabulary_of_its_own_and_a_sampled_anchor_are_refused(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make_dflash2(tmp_path, **fields)
    with pytest.raises(CheckpointError, match=message):
        read_draft(tmp_path)


def test_a_table_of_another_size_is_refused_by_name(tmp_path: Path) -> None:
    make_dflash2(tmp_path, rank=6)
    edit(tmp_path / "config.json", lambda data: data["dflash_config"].update(selector_rank=7))
    with pytest.raises(CheckpointError, match=r"'candidate_selector.hidden_projection.weight' has shape \[6, 32\]"):
        DFlash2Drafter.check_weights(read(tmp_path))


def test_what_is_particular_to_the_method_is_said(tmp_path: Path) -> None:
    make_dflash2(tmp_path)
    facts = dict(read(tmp_path).facts())
    assert facts["convolutions"] == "2 taps, groups of 8 channels"
    assert facts["candidate selector"] == "the best 5 tokens of each position, edges of rank 6"
    assert "block" in facts


def test_a_drafter_of_the_first_kind_knows_no_convolutions(tmp_path: Path) -> None:
    make_dflash2(tmp_path, architectures=["DFlashDraftModel"])
    with pytest.raises(CheckpointError, match="convolutions of DFlash2 is not part of DFlash"):
        read_draft(tmp_path)
