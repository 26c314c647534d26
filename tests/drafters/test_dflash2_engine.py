"""LOSSLESS with a DFlash2 drafter of random weights: every way to run gives the texts of the target alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.drafters.drafts import make_demo_dflash2, make_dflash2
from tests.invariants.test_device_lossless import (
    FORMS,
    REQUESTS,
    SETTINGS,
    WAYS,
    Result,
    check_adaptive_texts,
    prompts_of_many_lengths,
    run,
)
from tests.support.scale import by_night
from tests.support.tiny_models import make_target
from tests.worker.engines import Outputs, engine, on_device_runner, triton_engine

pytestmark = pytest.mark.usefixtures("single_thread")


# The same steps in another order, or without padding, which the target's own tests have.
BY_NIGHT = ("no overlap", "ragged steps alone", "small chunks")


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_demo_dflash2(tmp_path_factory.mktemp("draft")))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return prompts_of_many_lengths()


@pytest.fixture(scope="module")
def alone(prompts: list[list[int]]) -> Result:
    """What the target gives without a drafter."""
    requests = [{name: value for name, value in asked.items() if name != "k"} for asked in REQUESTS]
    return run(engine(**SETTINGS, draft_model=""), prompts, requests)


@pytest.fixture(scope="module")
def drafted(prompts: list[list[int]], draft: str) -> Result:
    """What a CPU's steps give with the drafter."""
    return run(engine(**SETTINGS, draft_model=draft), prompts)


def test_texts_are_the_targets_own(alone: Result, drafted: Result) -> None:
    """Greedy and sampled ones, with every drafting length, some drafts accepted and some not."""
    assert (drafted.tokens, drafted.reasons) == (alone.tokens, alone.reasons)
    assert drafted.num_drafted > drafted.num_accepted > 100


@pytest.mark.parametrize(
    ("settings", "options"),
    [pytest.param(*way, id=name, marks=pytest.mark.nightly if name in BY_NIGHT else []) for name, way in WAYS.items()],
)
def test_the_padded_steps_of_a_gpu_have_the_same_drafts(
    settings: dict[str, Any], options: dict[str, Any], prompts: list[list[int]], draft: str, drafted: Result
) -> None:
    built = on_device_runner(engine(**{**SETTINGS, **settings, "draft_model": draft}), **options)
    assert run(built, prompts) == drafted


@pytest.mark.parametrize("form", [by_night("on a CPU"), by_night("any number"), "shapes"])
def test_shorter_blocks_as_the_load_asks_change_no_text(
    form: str, prompts: list[list[int]], draft: str, alone: Result
) -> None:
    built = engine(**SETTINGS, draft_model=draft, adaptive_speculation=True)
    check_adaptive_texts(built, FORMS[form], prompts, alone)


@pytest.mark.parametrize("padded", [by_night(False), True])
def test_walks_with_the_requests_noise_change_no_text(
    padded: bool, prompts: list[list[int]], draft: str, alone: Result, drafted: Result
) -> None:
    built = engine(**SETTINGS, draft_model=draft, draft_temperature_ratio=1.0)
    found = run(on_device_runner(built) if padded else built, prompts)
    assert (found.tokens, found.reasons) == (alone.tokens, alone.reasons)
    assert found.num_accepted != drafted.num_accepted


def test_drafts_behind_a_prefix_hit_are_those_behind_a_miss(prompts: list[list[int]], draft: str) -> None:
    built = on_device_runner(engine(**SETTINGS, draft_model=draft))
    outputs, accepted = Outputs(built), []
    for name in ("miss", "hit"):
        before = built.core.stats().spec_decoding.num_accepted_tokens
        outputs.add(name, prompts[0], temperature=0.0, max_tokens=28, ignore_eos=True)
        outputs.finish()
        accepted.append(built.core.stats().spec_decoding.num_accepted_tokens - before)
    assert outputs.tokens["hit"] == outputs.tokens["miss"]
    assert built.core.stats().prefix_cache_hits > 0
    assert accepted[0] == accepted[1] > 0


def test_kernels_throughout_have_the_same_drafts(tmp_path: Path) -> None:
    """Two requests on models of two layers, greedy and with noise: a prefill step and a few padded decode steps."""
    layers = {"target_layer_ids": [0, 1], "mask_token_id": 96}
    own = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}
    make_target(tmp_path / "t", num_hidden_layers=2)
    make_dflash2(tmp_path / "d", block_size=3, num_target_layers=2, dflash_config=layers | own)
    models = {"target_model": str(tmp_path / "t"), "draft_model": str(tmp_path / "d"), "draft_temperature_ratio": 0.5}
    settings = {**models, "kv_block_size": 4, "max_model_len": 24, "max_num_seqs": 2}
    sampling = [{"temperature": 0.0, "max_tokens": 4}, {"temperature": 0.8, "seed": 3, "max_tokens": 4}]
    expected, found = (
        run(built, [[1, 2, 3, 4], [9, 8]], sampling)
        for built in (engine(**settings), triton_engine(**settings, kv_write_guard=False))
    )
    assert found == expected
