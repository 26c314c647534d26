"""All layers of a decoder in one call of C++ give the bits of the layers one by one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dflash_backend.attention import AttentionBatch, KVLayer
from dflash_backend.attention.cpu_backend import CpuBackend
from dflash_backend.checkpoints import read_target
from dflash_backend.config import asset_path
from dflash_backend.models import load_target
from dflash_backend.models.decoder import DecoderTarget
from dflash_backend.models.interface import PagedContext, TargetOutput, WindowSlots
from dflash_backend.models.layer_stack import LayerStack
from dflash_backend.models.linear import PackedLinear
from dflash_backend.models.ops import CpuLayerOps, LayerOps
from dflash_backend.spec_stats import SpecDecodingStats
from dflash_backend.text.tokenizer import Tokenizer
from dflash_kernels.cpu_ops import HAS_CPU_OPS
from load_tests.prompts import load_prompts
from tests.support.tiny_models import KV_HEADS, make_target
from tests.worker.engines import Outputs, engine

pytestmark = pytest.mark.skipif(not HAS_CPU_OPS, reason="needs a C++ compiler")
HEADS = {"head_dim": 16, "hidden_size": 64}
# A decode row beside a prompt, prompts in pieces, and rows of drafts.
PROMPTS = [[1, 2, 3], [*range(4, 60)], [5, 6, 5, 6, 5, 6, 5]]
MIXED = ["sliding_attention", "full_attention", "full_attention", "sliding_attention", "full_attention"]
WINDOWS = {"layer_types": MIXED, "sliding_window": 9, "use_sliding_window": True}
CASES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "norms of heads": ("Qwen3ForCausalLM", {}, "float32", {}),
    "norms of heads in bfloat16": ("Qwen3ForCausalLM", {}, "bfloat16", {}),
    "biases of q, k and v": ("Qwen2ForCausalLM", {}, "bfloat16", {}),
    "all biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}, "float32", {}),
    "a window": ("MistralForCausalLM", {"sliding_window": 9}, "float32", {}),
    "windows and all": ("Qwen3ForCausalLM", WINDOWS, "bfloat16", {}),
    "KV in FP8": ("Qwen3ForCausalLM", {}, "float32", {"kv_cache_dtype": "fp8"}),
}  # fmt: skip


class Watched:
    """`LayerStack.rows`, or what says that layers must be run one by one, and what passes of targets gave."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on, self.num_found = True, 0
        self.given: list[TargetOutput] = []
        rows, target_forward = LayerStack.rows, DecoderTarget.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            found = rows(*args, **kwargs) if self.on else None
            self.num_found += found is not None
            return found

        def target(*args: Any, **kwargs: Any) -> TargetOutput:
            self.given.append(target_forward(*args, **kwargs))
            return self.given[-1]

        monkeypatch.setattr(LayerStack, "rows", watched)
        monkeypatch.setattr(DecoderTarget, "forward", target)

    def run(self, prompts: list[list[int]], **settings: Any) -> tuple[Any, list[TargetOutput]]:
        """Tokens and counts of drafts, and what the target gave."""
        built, self.given = engine(adaptive_speculation=False, **settings), []
        outputs = Outputs(built)
        for index, prompt in enumerate(prompts):
            outputs.add(str(index), prompt, temperature=0.0, max_tokens=12, ignore_eos=True)
            outputs.step()
        return (outputs.finish(), built.core.stats().spec_decoding), self.given

    def compare(self, prompts: list[list[int]], **settings: Any) -> SpecDecodingStats:
        """Run both ways; the counts of drafts."""
        found = []
        for self.on in (True, False):
            found.append(self.run(prompts, **settings))
        (both, at_once), (others, one_by_one) = found
        assert both == others
        assert len(at_once) == len(one_by_one) >= 3
        for first, second in zip(at_once, one_by_one, strict=True):
            assert torch.equal(first.hidden, second.hidden)
            assert (first.features is None) == (second.features is None)
            assert first.features is None or torch.equal(first.features, second.features)  # type: ignore[arg-type]
        assert self.num_found >= len(at_once)
        counts: SpecDecodingStats = both[1]
        return counts


@pytest.mark.parametrize("case", CASES)
def test_a_target_gives_the_bits_of_its_layers_one_by_one(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture, changes, dtype, settings = CASES[case]
    make_target(tmp_path, architecture=architecture, dtype=getattr(torch, dtype), **(HEADS | changes))
    Watched(monkeypatch).compare(
        PROMPTS, target_model=tmp_path, draft_model="ngram", max_num_batched_tokens=32, max_model_len=128, **settings
    )


def test_a_pair_drafts_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's, whose drafter reads outputs of some layers."""
    pair = asset_path("demo", "pair")
    encode = Tokenizer.load(pair / "target").encode
    counts = Watched(monkeypatch).compare(
        [encode(each.prompt) for each in load_prompts(2)],
        target_model=pair / "target", draft_model=str(pair / "draft"),
    )  # fmt: skip
    assert counts.num_accepted_tokens > 0


def test_layers_that_are_others_are_run_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_target(tmp_path / "experts", architecture="Qwen3MoeForCausalLM", **HEADS)
    make_target(tmp_path / "plain", **HEADS)
    watched = Watched(monkeypatch)
    watched.run([[1, 2, 3]], target_model=tmp_path / "experts", draft_model="")
    watched.run([[1, 2, 3]], target_model=tmp_path / "plain", draft_model="", attention_backend="torch")
    assert watched.num_found == 0
    assert len(watched.given) > 5
    watched.run([[1, 2, 3]], target_model=tmp_path / "plain", draft_model="")
    assert watched.num_found == len(watched.given)


def test_a_pass_is_that_of_its_own_caches_slots_and_captures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other caches than those of the pass before; layers with a window that have blocks of their own; the output of the
    last layer after the final norm."""
    make_target(tmp_path, **(HEADS | WINDOWS))
    target = load_target(read_target(tmp_path), 64, torch.float32, torch.device("cpu"))
    watched = Watched(monkeypatch)

    def run(capture: tuple[int, ...]) -> list[torch.Tensor]:
        lens = np.array([20, 1])
        layout, of_windows = (
            AttentionBatch(lens, np.array([20, 7]), torch.tensor(tables, dtype=torch.int32))
            for tables in ([[1, 2], [3, 0]], [[4, 5], [6, 0]])
        )
        positions = torch.tensor([*range(20), 6])
        slots = torch.tensor([*range(16, 36), 3 * 16 + 6])
        context = PagedContext(
            layout, positions, slots, CpuBackend(16), torch.float32, windows=WindowSlots(slots + 3 * 16, of_windows)
        )
        caches = [KVLayer(torch.zeros(8, 16, 2, KV_HEADS, 16)) for _ in target.patterns]
        given = target.forward(torch.arange(21), context, caches, capture)
        assert given.features is not None
        return [given.hidden, given.features, *(cache.data for cache in caches)]

    for capture, num_found in (((1, 3), 1), ((3, 1), 2), ((0, 5), 3), ((5,), 4), ((5, 0), 4)):
        watched.on = True
        at_once = run(capture)
        assert watched.num_found == num_found
        watched.on = False
        assert all(map(torch.equal, at_once, run(capture)))


def test_each_weight_knows_the_one_that_is_multiplied_by_next(tmp_path: Path) -> None:
    make_target(tmp_path, num_hidden_layers=2, **HEADS)
    target = load_target(read_target(tmp_path), 64, torch.bfloat16, torch.device("cpu"))
    assert isinstance(target, DecoderTarget)
    assert target.stack is not None
    assert isinstance(target.lm_head, PackedLinear)
    places = {weight.data.data_ptr(): weight for weight in (*target.stack.order, target.lm_head.packed)}
    following = target.stack.order[0]
    shapes = []
    for _ in range(len(places)):
        shapes.append(following.shape)
        address, num_bytes = following.described[4:].tolist()
        following = places[address]
        assert num_bytes == following.data.nbytes
    assert following is target.stack.order[0]
    assert len(shapes) == 9
    assert shapes[:4] == shapes[4:8]
    assert shapes[8] == (target.spec.vocab_size, 64)


def test_layers_without_operations_in_cpp_are_no_stack() -> None:
    norm = torch.ones(64)
    assert LayerStack.of([SimpleNamespace()], CpuLayerOps(), norm) is None
    assert LayerStack.of([], CpuLayerOps(), norm) is None
    assert LayerStack.of([SimpleNamespace()], LayerOps(), norm) is None


def test_a_last_norm_of_another_dtype_than_the_other_norms_is_no_stack(tmp_path: Path) -> None:
    make_target(tmp_path, **HEADS)
    target = load_target(read_target(tmp_path), 64, torch.bfloat16, torch.device("cpu"))
    assert isinstance(target, DecoderTarget)
    assert LayerStack.of(target.layers, target.ops, target.final_norm) is not None
    assert LayerStack.of(target.layers, target.ops, target.final_norm.float()) is None
