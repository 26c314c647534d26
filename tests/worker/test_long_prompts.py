"""Prompts that a package attends, over gathered keys and values, beside rows that decode with drafts in flight."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from dflash_backend.attention import KVLayer
from dflash_backend.engine.build import BuiltEngine
from tests.worker.engines import Outputs, engine, on_device_runner, triton_engine

pytest.importorskip("triton")
from dflash_backend.attention import cudnn_rows, long_rows
from dflash_backend.attention.triton_backend import TritonBackend
from tests.attention.dense_attention import dense_attention, small_pieces

pytestmark = pytest.mark.usefixtures("single_thread")
SIZES = {"kv_block_size": 4, "max_model_len": 96, "max_num_seqs": 4, "num_speculative_tokens": 3}


def run(built: BuiltEngine) -> Outputs:
    """Prompts in chunks of unlike sizes, since rows decode beside them; the last one begins with cached blocks."""
    outputs = Outputs(built)
    prompts = [list(range(5, 15)), list(range(20, 71)), [*range(20, 61), *range(7, 30)]]
    for i, prompt in enumerate(prompts):
        outputs.add(str(i), prompt, max_tokens=9, temperature=0.0, ignore_eos=True)
        for _ in range(3):
            outputs.step()
    outputs.finish()
    return outputs


def test_the_text_is_that_of_our_own_kernels(few_layers: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)
    monkeypatch.setattr(cudnn_rows, "attention_of_cudnn", dense_attention)
    monkeypatch.setattr(long_rows, "MIN_POSITIONS", 1)
    calls: list[tuple[int, int]] = []

    def attend(query: torch.Tensor, layer: KVLayer, rows: long_rows.LongRows) -> torch.Tensor:
        assert rows.known
        calls.append((len(query), int(rows.most_positions[0])))
        return long_rows.by_cudnn(query, layer, rows)

    sizes = few_layers | SIZES | {"kv_write_guard": False, "max_num_batched_tokens": 24}
    expected = run(engine(**sizes))
    built = on_device_runner(triton_engine(**sizes))
    assert built.runner.overlaps
    backend = built.runner.model.backend
    assert isinstance(backend, TritonBackend)
    backend.long_attention = dataclasses.replace(long_rows.CUDNN, attend=attend, pays=lambda start, end: True)
    assert run(built).tokens == expected.tokens
    # Of each layer: alone; beside a row that decodes with three drafts, a chunk after the other; after cached blocks.
    assert calls == [each for each in ((10, 10), (20, 20), (20, 40), (11, 51), (16, 56)) for _ in range(2)]
    assert backend.long_attention is not None, "none failed"
