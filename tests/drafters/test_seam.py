"""Nothing outside `drafters/` knows which drafter there is: another one runs through the same engine, and no name or
notion of DFlash's occurs elsewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from safetensors.torch import save_file

from dflash_backend.config import EngineConfig
from dflash_backend.drafters import registry
from dflash_backend.drafters.resolve import resolve_pair
from dflash_backend.messages import EngineStats
from tests.drafters.lookup_drafter import LOOKUP, METHOD, LookupDrafter
from tests.support.tiny_models import make_target
from tests.worker.engines import Outputs, engine, on_device_runner

PACKAGE = Path(__file__).parents[2]
K = 4
OF_DFLASH = re.compile(r"DFlash|mask_token|mask_id|[Mm]ask (token|embedding|quer)|MASK_EMBEDDING|k masks|one pass")
# What may be said outside: the product's name, what its authors measured, a file that every download must bring, and
# what a drafter's GGUF file has in place of the fields that `drafters` reads. Training makes drafters of each method.
ALLOWED = {
    "dflash_backend/__init__.py": "DFlash speculative decoding engine",
    "dflash_backend/config.py": "hub id of the DFlash drafter",
    "dflash_backend/checkpoints/files.py": "MASK_EMBEDDING",
    "dflash_backend/checkpoints/gguf/drafter.py": "",
    "dflash_backend/evaluation": "DFlash authors",
    "dflash_backend/training/": "",
    "kernels/dflash_kernels/qk_norm_rope_write.py": "in one pass over it",
}


def test_nothing_outside_drafters_names_dflash_or_its_notions() -> None:
    found = []
    for folder in ("dflash_backend", "kernels"):
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            name = path.relative_to(PACKAGE).as_posix()
            allowed = [text for prefix, text in ALLOWED.items() if name.startswith(prefix)]
            if name.startswith("dflash_backend/drafters/"):
                continue
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if OF_DFLASH.search(line) and not any(text in line for text in allowed):
                    found.append(f"{name}:{number}: {line.strip()}")
    assert not found


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A target `t` and a drafter `d` of a method that is not DFlash."""
    monkeypatch.setattr(registry, "METHODS", {**registry.METHODS, LOOKUP: METHOD})
    make_target(tmp_path / "t")
    (tmp_path / "d").mkdir()
    save_file({}, tmp_path / "d" / "model.safetensors")
    (tmp_path / "d" / "config.json").write_text(json.dumps({"speculators_model_type": LOOKUP, "k": K}))
    return tmp_path


# One beginning, which ends where a block does, and four ends.
PROMPTS = [[1 + i % 5 for i in range(48)] + [7 + end] * 9 for end in range(4)]


def answers(
    models: Path, draft: str, prompts: list[list[list[int]]], padded: bool = False
) -> tuple[dict[str, list[int]], EngineStats]:
    """The answers to groups of prompts, of which one follows the other, and the engine's counts."""
    built = engine(
        target_model=str(models / "t"),
        draft_model=draft,
        kv_block_size=8,
        kv_cache_gb=0.01,
        max_num_batched_tokens=24,
    )
    outputs = Outputs(on_device_runner(built) if padded else built)
    for number, group in enumerate(prompts):
        for index, prompt in enumerate(group):
            outputs.add(f"{number}.{index}", prompt, temperature=0.0, max_tokens=30, ignore_eos=True)
        outputs.finish()
    return outputs.tokens, outputs.core.stats()


@pytest.mark.parametrize("padded", [False, True])
def test_another_drafter_is_lossless_through_the_same_engine(models: Path, padded: bool) -> None:
    plain, _ = answers(models, "", [PROMPTS] * 2)
    drafted, stats = answers(models, str(models / "d"), [PROMPTS] * 2, padded)
    assert drafted == plain
    assert 0 < stats.spec_decoding.num_accepted_tokens < stats.spec_decoding.num_draft_tokens
    assert stats.prefix_cache_hits > 0


def test_a_hit_ends_where_its_context_would_be_that_of_another_text(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last block that the prompts share has another token behind it in each. The third finds the second's blocks,
    and among them that one, as the second made it and not the first; the second finds one block less."""
    contexts: list[list[int]] = []
    monkeypatch.setattr(LookupDrafter, "contexts", contexts)
    _, stats = answers(models, str(models / "d"), [PROMPTS[:1], PROMPTS[1:2], PROMPTS[1:2]])
    assert all(context[: len(PROMPTS[0]) - 1] in [prompt[1:] for prompt in PROMPTS] for context in contexts)
    assert stats.prefix_cache_hits == (48 - 8) + (len(PROMPTS[1]) - 1)


def test_a_drafter_that_reads_features_alone_shares_the_last_block_too(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, stats = answers(models, "", [PROMPTS[:1], PROMPTS[1:2]])
    assert stats.prefix_cache_hits == 48


def test_the_engine_asks_the_drafter_for_its_lookahead(models: Path) -> None:
    settings = {"target_model": str(models / "t"), "draft_model": str(models / "d")}
    pair = resolve_pair(EngineConfig.from_values(settings))
    assert pair.draft is not None
    assert (pair.draft.method, pair.num_speculative_tokens) == (LOOKUP, K)
    assert registry.drafter_class(pair.draft) is LookupDrafter
