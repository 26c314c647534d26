"""Our Qwen3 decoder computes what `transformers` computes, through paged K/V in any division of the work."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash_backend.checkpoints.targets import TARGET_ARCHITECTURES, read_target
from dflash_backend.models import TARGETS, load_target
from tests.paged import block_tables, caches, context
from tests.tiny_models import TARGET_LAYERS, VOCAB_SIZE, make_target

CPU = torch.device("cpu")


def reference(model: torch.nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Logits and hidden states of `transformers` for one sequence."""
    with torch.no_grad():
        output = model(ids[None], output_hidden_states=True)
    return output.logits[0], tuple(state[0] for state in output.hidden_states)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}, {"attention_bias": True}])
@torch.inference_mode()
def test_prefill_chunks_and_decode_equal_transformers(tmp_path: Path, changes: dict[str, bool]) -> None:
    model = make_target(tmp_path, **changes)
    target = load_target(read_target(tmp_path), 512, torch.float32, CPU)
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(0, VOCAB_SIZE, (37,), generator=generator)
    second = torch.randint(0, VOCAB_SIZE, (21,), generator=generator)
    kv, tables = caches(target.spec.decoder), block_tables(2)
    hidden_first, hidden_second = [], []
    # Row 0 in chunks of 13, 20, 1 and 3; row 1 in chunks of 5, 1, 1, 14, beside it.
    for (a, b), (c, d) in zip([(0, 13), (13, 33), (33, 34), (34, 37)], [(0, 5), (5, 6), (6, 7), (7, 21)], strict=True):
        tokens = torch.cat([first[a:b], second[c:d]])
        output = target.forward(tokens, context(tables, [a, c], [b - a, d - c]), kv, ())
        hidden_first.append(output.hidden[: b - a])
        hidden_second.append(output.hidden[b - a :])
    for ids, hidden in ((first, hidden_first), (second, hidden_second)):
        torch.testing.assert_close(target.logits(torch.cat(hidden)), reference(model, ids)[0], atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_captured_features_are_the_outputs_of_the_layers_named(tmp_path: Path) -> None:
    model = make_target(tmp_path)
    target = load_target(read_target(tmp_path), 512, torch.float32, CPU)
    ids = torch.arange(19)
    layer_ids = (3, 0, 2)
    output = target.forward(ids, context(block_tables(1), [0], [19]), caches(target.spec.decoder), layer_ids)
    states = reference(model, ids)[1]
    # transformers puts the embedding first, so the output of layer i is hidden_states[i + 1].
    expected = torch.cat([states[i + 1] for i in layer_ids], dim=-1)
    torch.testing.assert_close(output.features, expected, atol=1e-4, rtol=1e-4)
    assert len(states) == TARGET_LAYERS + 1


def test_the_architectures_accepted_at_the_edge_are_those_the_registry_runs() -> None:
    assert set(TARGET_ARCHITECTURES) == set(TARGETS)
