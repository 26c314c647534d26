"""With `batch_invariant` a request's logits have the same bits whatever runs beside it and however it is computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_backend.attention import BackendError
from tests.support.batch_invariance import differing, random_prompts, run
from tests.support.scale import SCALE, by_night
from tests.support.tiny_models import GEMMA4_EXPERTS, VOCAB_SIZE, make_draft, make_target
from tests.worker.engines import engine

# Rows that run together, k, and the most tokens of a step: whole prompts, or chunks of them.
SHAPES = [(1, 15, 2048), (1, 0, 64), (3, 15, 2048), (3, 15, 130), (17, 0, 2048), (17, 15, 300), (64, 0, 100)]
WIDE = (64, 15, 1100)
# For each change: the widest, and one in chunks.
QUICK = [(3, 15, 130), WIDE]
# For each number of threads and each type: alone with drafts, the widest, and many without drafts in chunks; all of
# them where there is time, as in `make nightly`.
MOST_UNLIKE = [(1, 15, 2048), WIDE, (64, 0, 100)]
# For each kind of layer: some rows with drafts, in chunks, and many without drafts.
OF_LAYERS = [(3, 15, 130), (17, 0, 2048)]
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("Qwen3ForCausalLM", {}),
    ("LlamaForCausalLM", {"num_key_value_heads": 1}),
    ("MistralForCausalLM", {"sliding_window": 9}),
    ("Qwen3MoeForCausalLM", {}),
    ("GptOssForCausalLM", {}),
    ("Gemma4ForCausalLM", {}),
    ("Gemma4ForCausalLM", GEMMA4_EXPERTS),
]


@pytest.fixture(params=[by_night(1), 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Threads within operations: libraries share out their work by them."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def settings(rows: int, k: int, tokens: int, **others: Any) -> dict[str, Any]:
    """An engine with `batch_invariant` for that many rows at a time."""
    return {
        "num_speculative_tokens": k,
        "max_num_batched_tokens": tokens,
        "max_num_seqs": rows,
        "max_model_len": 256,
        "kv_write_guard": False,
        "batch_invariant": True,
        **others,
    }


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [by_night("float32"), "bfloat16"])
def test_logits_are_the_same_to_the_bit_in_any_batch_with_any_k_chunked_or_whole(dtype: str) -> None:
    prompts = random_prompts(64, 1500)
    alone = run(engine(**settings(1, 0, 2048, dtype=dtype)), prompts[:1])
    for rows, k, tokens in [*SHAPES, WIDE] if SCALE >= 4 else MOST_UNLIKE if SCALE >= 1 else QUICK:
        together = run(engine(**settings(rows, k, tokens, dtype=dtype)), prompts[:rows])
        assert differing(alone[1], together[1]) == 0, (rows, k, tokens)
        assert together[0]["0"] == alone[0]["0"]


# Llama and Gemma 4 without experts have no layer that the others lack.
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [by_night(*case) if case[0] == "LlamaForCausalLM" or case == FAMILIES[5] else case for case in FAMILIES],
)
def test_every_kind_of_layer_keeps_its_bits(tmp_path: Path, architecture: str, changes: dict[str, Any]) -> None:
    make_target(tmp_path / "target", architecture=architecture, **changes)
    make_draft(tmp_path / "draft", block_size=16)
    models = {"target_model": str(tmp_path / "target"), "kv_block_size": 4}
    prompts = random_prompts(17, VOCAB_SIZE)
    alone = run(engine(**settings(1, 0, 2048, draft_model="", **models)), prompts[:1])
    shapes = SHAPES if SCALE >= 4 else OF_LAYERS if SCALE >= 1 else QUICK
    for rows, k, tokens in [shape for shape in shapes if shape[0] <= 17]:
        own = {"draft_model": str(tmp_path / "draft") if k else "", **models}
        together = run(engine(**settings(rows, k, tokens, **own)), prompts[:rows])
        assert differing(alone[1], together[1]) == 0, (rows, k, tokens)


def test_a_prefix_hit_changes_no_bit() -> None:
    prompts = random_prompts(3, 1500)
    built = engine(**settings(3, 15, 2048))
    first = run(built, prompts)
    hits = built.core.stats().prefix_cache_hits
    again = run(built, prompts[:1], prefix="again ")
    assert built.core.stats().prefix_cache_hits > hits
    assert differing(first[1], again[1]) == 0
    longer = run(engine(**settings(1, 0, 2048)), [prompts[0][:20] + prompts[1]])
    built = engine(**settings(3, 15, 2048))
    run(built, prompts)
    behind = run(built, [prompts[0][:20] + prompts[1]], prefix="behind ")
    assert differing(longer[1], behind[1]) == 0


def test_preemption_changes_no_bit() -> None:
    prompts = random_prompts(12, 1500, longest=60)
    alone = run(engine(**settings(1, 0, 2048)), prompts[-1:], max_tokens=40)
    built = engine(**settings(12, 7, 512, kv_cache_gb=0.0015))
    crowded = run(built, prompts, max_tokens=40)
    assert built.core.stats().num_preemptions > 0
    last = {("0", position): row for (name, position), row in crowded[1].items() if name == "11"}
    assert differing(alone[1], last) == 0


def test_sampled_texts_and_their_log_probabilities_are_the_same_in_any_batch() -> None:
    prompts = random_prompts(17, 1500)
    sampling = {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "seed": 4}
    alone = run(engine(**settings(1, 0, 2048, dtype="bfloat16")), prompts[:1], **sampling)
    together = run(engine(**settings(17, 15, 400, dtype="bfloat16")), prompts, **sampling)
    assert together[0]["0"] == alone[0]["0"]
    assert differing(alone[1], together[1]) == 0


def test_a_backend_that_cannot_guarantee_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from dflash_backend.attention import selection

    capabilities, make = selection.BACKENDS["torch"]
    without = replace(capabilities, batch_invariant=frozenset())
    monkeypatch.setitem(selection.BACKENDS, "torch", (without, make))
    with pytest.raises(BackendError, match="'torch' lacks batch_invariant on cpu"):
        engine(**settings(1, 0, 64, attention_backend="torch"))
