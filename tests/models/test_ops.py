"""The Triton operations in whole models: what they compute is what the torch operations compute, padding included."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_backend.attention import KVLayer
from dflash_backend.attention.torch_backend import TorchBackend
from dflash_backend.checkpoints import TARGET_ARCHITECTURES
from dflash_backend.checkpoints.spec import DecoderSpec
from dflash_backend.checkpoints.targets import read_target
from dflash_backend.drafters.base import ContextBatch
from dflash_backend.drafters.dflash.drafter import DFlashDrafter, DFlashModel
from dflash_backend.drafters.registry import read_draft
from dflash_backend.models import TargetModel, load_target
from dflash_backend.models.interface import PagedContext
from dflash_backend.models.ops import CpuLayerOps, LayerOps, TritonLayerOps, select_ops
from dflash_backend.worker.kv_cache import PagedKVCache
from dflash_kernels.context_write import stacked
from dflash_kernels.cpu_ops import HAS_CPU_OPS
from tests.models.drafting import load_options
from tests.support.paged import BLOCK_SIZE, block_tables, caches, context, noisy_pool
from tests.support.tiny_models import TARGET_LAYERS, VOCAB_SIZE, make_draft, make_target

pytestmark = pytest.mark.usefixtures("single_thread", "inference_mode")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Of the largest number of a tensor.
TOLERANCE = 1e-5
MAX_POSITIONS = 64
CAPTURE = (3, 0, 4)
OPS = [LayerOps(), TritonLayerOps()]
with_either = pytest.mark.parametrize("ops", OPS, ids=["torch", "triton"])


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@dataclass(frozen=True)
class Outcome:
    """What passes through a model left behind: tensors that it returned, then its KV."""

    returned: list[torch.Tensor]
    kv: list[KVLayer]

    def assert_close(self, other: Outcome) -> None:
        ours, theirs = ([*each.returned, *(layer.data for layer in each.kv)] for each in (self, other))
        for actual, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(actual, expected, atol=TOLERANCE * expected.abs().max().item(), rtol=0.0)


def two_passes(target: TargetModel) -> Outcome:
    """A prompt of each of two rows, then a block of each over it: hidden states, features and logits."""
    kv, tables = caches(target.spec.decoder, device=DEVICE.type), block_tables(2)
    pool = noisy_pool(target.spec.decoder, device=DEVICE.type)
    rng, returned = np.random.default_rng(0), []
    for starts, lens in (([0, 0], [5, 2]), ([5, 2], [1, 4])):
        ids = torch.from_numpy(rng.integers(0, VOCAB_SIZE, sum(lens))).to(DEVICE)
        paged = context(tables, starts, lens, device=DEVICE.type, pool=pool)
        output = target.forward(ids, paged, kv, CAPTURE)
        if paged.states is not None:
            paged.states.commit(torch.tensor(lens, dtype=torch.int32, device=DEVICE))
        assert output.features is not None
        returned += [output.hidden, output.features, target.logits(output.hidden)]
    return Outcome(returned, kv)


@pytest.mark.parametrize("architecture", TARGET_ARCHITECTURES)
def test_a_target_computes_the_same_with_either(architecture: str, tmp_path: Path) -> None:
    # Dense layers beside those with experts.
    changes = {"decoder_sparse_step": 2} if architecture == "Qwen3MoeForCausalLM" else {}
    make_target(tmp_path, architecture=architecture, **changes)
    spec = read_target(tmp_path)
    torch_outcome, triton_outcome = (
        two_passes(load_target(spec, MAX_POSITIONS, torch.float32, DEVICE, ops=ops)) for ops in OPS
    )
    triton_outcome.assert_close(torch_outcome)


@with_either
def test_the_last_captured_feature_is_the_hidden_state_itself(ops: LayerOps, tmp_path: Path) -> None:
    make_target(tmp_path)
    target = load_target(read_target(tmp_path), MAX_POSITIONS, torch.float32, DEVICE, ops=ops)
    paged = context(block_tables(1), [0], [3], device=DEVICE.type)
    kv = caches(target.spec.decoder, device=DEVICE.type)
    output = target.forward(torch.tensor([5, 6, 7], device=DEVICE), paged, kv, (TARGET_LAYERS - 1,))
    assert output.features is not None
    assert torch.equal(output.features, output.hidden)


def drafter(directory: Path, ops: LayerOps) -> DFlashDrafter:
    """Over caches with noise."""
    make_target(directory / "target")
    make_draft(directory / "draft")
    target = load_target(read_target(directory / "target"), MAX_POSITIONS, torch.float32, DEVICE, ops=ops)
    model = DFlashModel.load(read_draft(directory / "draft"), load_options(MAX_POSITIONS, device=DEVICE, ops=ops))
    return DFlashDrafter(model, target, caches(model.spec.decoder, device=DEVICE.type), TorchBackend(BLOCK_SIZE))


def inject_and_forward(drafter: DFlashDrafter) -> Outcome:
    """Context of seven positions, two of them padding, then a block of four queries over it."""
    model, kv, tables = drafter.model, drafter.caches, block_tables(1)
    positions = torch.arange(7, device=DEVICE)
    slots = context(tables, [0], [7], device=DEVICE.type).slots
    slots[5:] = -1
    drafter.inject(ContextBatch(random(7, model.fc.in_features), positions, slots, padded=True))
    paged = context(tables, [5], [4], device=DEVICE.type)
    return Outcome([model.forward(random(4, model.fc.out_features, seed=1), paged, kv)], kv)


def test_a_drafter_injects_and_computes_the_same_with_either(tmp_path: Path) -> None:
    torch_outcome, triton_outcome = (inject_and_forward(drafter(tmp_path, ops)) for ops in OPS)
    triton_outcome.assert_close(torch_outcome)


def written_slots(kv: list[KVLayer], run: Callable[[list[KVLayer]], object]) -> list[set[int]]:
    """The slots of each layer that `run` changes."""
    before = stacked([layer.slots for layer in kv]).clone()
    run(kv)
    changed = (stacked([layer.slots for layer in kv]) != before).flatten(2).any(dim=2)
    return [set(layer.nonzero().flatten().tolist()) for layer in changed]


def with_padding(paged: PagedContext) -> tuple[PagedContext, set[int]]:
    """The context with its second and last tokens as padding, and the slots that it still writes."""
    slots = paged.slots.clone()
    slots[[1, -1]] = -1
    return dataclasses.replace(paged, slots=slots, padded=True), set(slots.tolist()) - {-1}


@with_either
def test_padding_tokens_of_a_target_write_nothing(ops: LayerOps, tmp_path: Path) -> None:
    make_target(tmp_path)
    target = load_target(read_target(tmp_path), MAX_POSITIONS, torch.float32, DEVICE, ops=ops)
    paged, slots = with_padding(context(block_tables(1), [0], [6], device=DEVICE.type))
    kv = caches(target.spec.decoder, device=DEVICE.type)
    ids = torch.arange(6, device=DEVICE)
    assert written_slots(kv, lambda kv: target.forward(ids, paged, kv, ())) == [slots] * TARGET_LAYERS


@with_either
def test_padding_tokens_of_a_drafter_write_nothing(ops: LayerOps, tmp_path: Path) -> None:
    own = drafter(tmp_path, ops)
    paged, slots = with_padding(context(block_tables(1), [0], [6], device=DEVICE.type))
    features, queries = random(6, own.model.fc.in_features), random(6, own.model.fc.out_features)
    for run in (
        lambda kv: own.inject(ContextBatch(features, paged.positions, paged.slots, padded=True)),
        lambda kv: own.model.forward(queries, paged, kv),
    ):
        own.caches = caches(own.model.spec.decoder, device=DEVICE.type)
        assert written_slots(own.caches, run) == [slots] * len(own.model.layers)


def shape_of_drafter(directory: Path) -> DecoderSpec:
    make_draft(directory)
    return read_draft(directory).decoder


def test_the_layers_of_the_kv_cache_are_one_tensor(tmp_path: Path) -> None:
    spec = shape_of_drafter(tmp_path)
    kv = PagedKVCache.allocate(spec, spec, 3, BLOCK_SIZE, torch.float32, DEVICE)
    stack = stacked([layer.slots for layer in kv.draft])
    for index, layer in enumerate(kv.draft):
        layer.slots.fill_(index + 1)
        assert torch.equal(stack[index], layer.slots)


def test_layers_that_do_not_follow_one_another_are_refused(tmp_path: Path) -> None:
    first, second = PagedKVCache.allocate(shape_of_drafter(tmp_path), None, 3, BLOCK_SIZE, torch.float32, DEVICE).target
    with pytest.raises(ValueError, match="layer 1 does not follow that of layer 0 in one allocation"):
        stacked([second.slots, first.slots])
    with pytest.raises(ValueError, match="layer 1 does not follow"):
        stacked([first.slots, second.slots.clone()])


def test_a_gpu_gets_the_kernels_and_a_cpu_those_asked_for() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    chosen = [select_ops(cpu, "torch"), select_ops(cuda, "torch"), select_ops(cuda), select_ops(cpu, "triton")]
    assert [type(ops) for ops in chosen] == [LayerOps, LayerOps, TritonLayerOps, TritonLayerOps]
    assert type(select_ops(cpu)) is (CpuLayerOps if HAS_CPU_OPS else LayerOps)
    with pytest.raises(ValueError, match="'flash_attn'; there are 'torch' and 'triton'"):
        select_ops(cpu, "flash_attn")
