"""A whole run of seconds: it ends where one that was interrupted does, bit for bit, and what is wrong is a sentence."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_backend import LLM
from dflash_backend.config import asset_path
from dflash_backend.drafters.registry import read_draft
from dflash_backend.training import loop
from dflash_backend.training import run as run_module
from dflash_backend.training.data import DataOptions, Sample
from dflash_backend.training.errors import TrainingError
from dflash_backend.training.features import Teacher
from dflash_backend.training.loop import (
    LoopOptions,
    Progress,
    Schedule,
    Trainer,
    make_batches,
    run_steps,
    save_atomically,
)
from dflash_backend.training.loss import Distillation, TargetStates
from dflash_backend.training.network import DraftModel, Tables
from dflash_backend.training.run import TrainOptions, train
from dflash_backend.training.sizes import Memory, check_fits, free_bytes

TARGET = asset_path("demo", "pair", "target")
DRAFT = asset_path("demo", "pair", "draft")
STEPS = 4


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    """Sums come out the same whatever else ran before; and two evaluations are enough."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "EVALUATIONS", 2)
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"messages": [{"role": "user", "content": f"What is {a} + {a + 1}?"}]} for a in range(2, 14)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def options(prompts: Path) -> Callable[..., TrainOptions]:
    def make(out: Path, **changes: Any) -> TrainOptions:
        data = DataOptions(40, max_answer=12, max_prompt=64, files=(prompts,))
        sizes = {"draft_layers": 1, "block_size": 4}
        settings = {"kv_cache_gb": 0.02, "max_num_seqs": 8, "adaptive_speculation": True}
        own: dict[str, Any] = {"steps": STEPS, "batch_tokens": 80, "accumulate": 2}
        own |= {"soft_labels": 0.25, "hidden_loss": 0.5, "drafter": sizes, "settings": settings}
        return TrainOptions(str(TARGET), out, data, **(own | changes))

    return make


@pytest.fixture(scope="module")
def whole(options: Callable[..., TrainOptions], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole") / "out"
    train(options(out), lambda text: None, lambda done, total: None)
    return out


def quietly(options: TrainOptions) -> dict[str, Any]:
    return train(options, lambda text: None, lambda done, total: None)


def test_it_writes_a_drafter_that_the_engine_runs_and_says_how_it_came_about(whole: Path) -> None:
    summary = json.loads((whole / "train.json").read_text(encoding="utf-8"))
    evaluated = [each["step"] for each in summary["evaluations"]]
    assert (summary["steps"], summary["ended"], evaluated) == (STEPS, "steps", [2, 4])
    assert summary["acceptance_length"] == max(each["acceptance_length"] for each in summary["evaluations"])
    assert (whole / "train.png").stat().st_size > 1000
    with_drafts = LLM(draft=str(whole), kv_cache_gb=0.02, max_model_len=128, adaptive_speculation=False)
    without = LLM(draft="", kv_cache_gb=0.02, max_model_len=128)
    prompt = "What is 5 + 6?\n"
    found = with_drafts.generate(prompt, max_tokens=16, temperature=0)[0]
    assert found.token_ids == without.generate(prompt, max_tokens=16, temperature=0)[0].token_ids
    assert found.stats is not None
    assert found.stats.spec_decoding.num_draft_tokens > 0


def test_an_interrupted_run_gives_the_same_weights(
    whole: Path, options: Callable[..., TrainOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in a step, behind the first of its two batches; gradients of half a step are not kept."""
    out, run, calls = tmp_path / "out", Trainer._run, []

    def interrupted(self: Trainer, index: int) -> Any:
        calls.append(index)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return run(self, index)

    monkeypatch.setattr(Trainer, "_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quietly(options(out))
    assert calls == list(range(6))
    state = torch.load(out / "training" / "state.pt", weights_only=True)
    assert state["trainer"]["progress"]["step"] == 2
    data = next((out / "training").glob("data-*")) / "samples.jsonl"
    before = data.read_bytes()
    summary = quietly(options(out))
    assert calls == [*range(6), *range(4, 8)]
    assert data.read_bytes() == before
    assert [each["step"] for each in summary["evaluations"]] == [2, 4]
    own, other = (torch.load(each / "training" / "state.pt", weights_only=True) for each in (whole, out))
    assert_equal(own["trainer"]["draft"], other["trainer"]["draft"])
    assert_equal(own["trainer"]["optimizer"], other["trainer"]["optimizer"])
    assert (whole / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


def assert_equal(one: Any, other: Any) -> None:
    """Bit for bit, through lists and dictionaries."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for first, second in zip(one, other, strict=True):
            assert_equal(first, second)
    else:
        assert one == other


@pytest.mark.nightly
def test_a_drafter_that_is_trained_further_is_measured_first_and_keeps_its_config(
    options: Callable[..., TrainOptions], tmp_path: Path
) -> None:
    changes = {"begin_from": DRAFT, "drafter": {}, "steps": 2, "accumulate": 1, "learning_rate": 1e-6}
    said: list[str] = []
    summary = train(options(tmp_path / "out", **changes), said.append, lambda done, total: None)
    first, *_, last = summary["evaluations"]
    assert first["step"] == 0
    assert first["acceptance_length"] > 3
    assert last["acceptance_length"] == pytest.approx(first["acceptance_length"], rel=0.05)
    assert any("the drafter it begins with: acceptance length" in line for line in said)
    fields = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert fields == json.loads((DRAFT / "config.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "dspark"}, "--kind was None and is dspark"),
        ({"steps": 2 * STEPS}, f"--steps was {STEPS} and is {2 * STEPS}"),
        ({"bf16": False}, "--bf16 was None and is False"),
        ({"num_tokens": 41}, "--tokens was 40 and is 41"),
    ],
)
def test_a_run_of_other_options_is_not_gone_on_with(
    whole: Path, options: Callable[..., TrainOptions], changes: dict[str, Any], said: str
) -> None:
    asked = options(whole)
    if "num_tokens" in changes:
        changes = {"data": replace(asked.data, **changes)}
    with pytest.raises(TrainingError, match=f"other options: {said}; take the options of that run"):
        quietly(replace(asked, **changes))


def test_answers_of_another_dtype_are_other_data(whole: Path, options: Callable[..., TrainOptions]) -> None:
    settings = {**options(whole).settings, "dtype": "bfloat16"}
    with pytest.raises(TrainingError, match="other options: data was"):
        quietly(options(whole, settings=settings))


def test_a_run_whose_samples_are_gone_is_not_gone_on_with(
    whole: Path, options: Callable[..., TrainOptions], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    samples = next((out / "training").glob("data-*")) / "samples.jsonl"
    lines = samples.read_text().splitlines(keepends=True)
    samples.write_text("".join(lines[1:]))
    with pytest.raises(TrainingError, match=f"{len(lines) - 1} samples, and the run .* has {len(lines)}: some were"):
        quietly(options(out))
    samples.unlink()
    with pytest.raises(TrainingError, match="has 0 samples"):
        quietly(options(out))


def test_an_evaluation_that_was_interrupted_is_done_when_the_run_goes_on(
    whole: Path, options: Callable[..., TrainOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*given: Any) -> Any:
        raise KeyboardInterrupt

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "measure_acceptance", interrupted)
        with pytest.raises(KeyboardInterrupt):
            quietly(options(out))
    assert not (out / "model.safetensors").exists()
    summary = quietly(options(out))
    assert [each["step"] for each in summary["evaluations"]] == [2, 4]
    assert (whole / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


class Written:
    """A publication that notes what was written where."""

    def __init__(self) -> None:
        self.folders: list[Path] = []

    def write(self, draft: object, folder: Path) -> None:
        self.folders.append(folder)


def test_the_best_drafter_is_published_and_its_length_is_told(
    options: Callable[..., TrainOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That which training began with among them: steps that make it worse are not published."""
    run = run_module.Run(options(tmp_path / "out", steps=None), lambda text: None, lambda done, total: None, True)
    monkeypatch.setattr(run, "_save", lambda trainer: None)
    trainer: Any = SlowTrainer(100)
    trainer.draft, best = None, []
    for step, length in enumerate((3.0, 2.5, 2.7, 3.1, 2.9)):
        found = {"step": step, "acceptance_length": length}
        monkeypatch.setattr(run, "_measure", lambda *_, found=found: found)
        written: Any = Written()
        trainer.progress.step = step
        assert not run._evaluate(trainer, None, None, written)  # type: ignore[arg-type]
        if tmp_path / "out" in written.folders:
            best.append(step)
        assert trainer.progress.evaluated == step
    assert best == [0, 3]
    assert run.record.published == 3.1
    assert len(run.record.evaluations) == 5


def test_a_process_that_does_not_speak_ends_with_the_first(
    options: Callable[..., TrainOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the clock or the record of one says is not what those of the others say."""

    def first_says(shared: list[Any]) -> None:
        shared[0] = True

    run = run_module.Run(options(tmp_path / "out"), lambda text: None, lambda done, total: None, False)
    trainer: Any = SlowTrainer(100)
    trainer.progress.step = 7
    monkeypatch.setattr(run_module.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(run_module.dist, "broadcast_object_list", first_says)
    assert run._evaluate(trainer, None, None, None)  # type: ignore[arg-type]
    assert trainer.progress.evaluated == 7, "so that no process evaluates once more at the end, alone"


@pytest.mark.parametrize("hidden_loss", [0.0, 1.0])
def test_the_last_layer_is_read_as_the_engine_will_read_it(
    options: Callable[..., TrainOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden_loss: float
) -> None:
    """z-lab's drafters read the target's last layer after the final norm, which counts as another layer."""
    captured: set[tuple[int, ...]] = set()
    features = Teacher.features

    def noted(self: Teacher, rows: Any, capture: tuple[int, ...]) -> torch.Tensor:
        captured.add(capture)
        return features(self, rows, capture)

    monkeypatch.setattr(Teacher, "features", noted)
    layers = json.loads((TARGET / "config.json").read_text())["num_hidden_layers"]
    sizes = {"draft_layers": 1, "block_size": 4, "target_layer_ids": (1, layers - 1)}
    changes = {"hidden_loss": hidden_loss, "soft_labels": 0.0, "drafter": sizes}
    quietly(options(tmp_path / "out", steps=1, accumulate=1, **changes))
    assert captured == {(1, layers, layers) if hidden_loss else (1, layers)}


@pytest.mark.parametrize(("kind", "scaled"), [("dflash", True), ("dspark", False)])
def test_embeddings_are_scaled_as_the_kinds_reader_says(
    options: Callable[..., TrainOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, scaled: bool
) -> None:
    asked: list[bool] = []
    tables = Teacher.tables

    def noted(self: Teacher, dtype: torch.dtype, scaled: bool, draft_tokens: Any) -> Tables:
        asked.append(scaled)
        return tables(self, dtype, scaled, draft_tokens)

    monkeypatch.setattr(Teacher, "tables", noted)
    out = tmp_path / "out"
    quietly(options(out, steps=1, accumulate=1, kind=kind, hidden_loss=0.0))
    spec: Any = read_draft(out)
    assert asked == [scaled] == [spec.scales_embedding]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda out: out.write_text("x"), r"is a file; name a folder"),
        (lambda out: (out.mkdir(), (out / "config.json").write_text("{}")), r"holds a model that no training wrote"),
        (
            lambda out: (
                (out / "training").mkdir(parents=True),
                (out / "training" / "state.pt").write_bytes(b"PK\3\4"),
            ),
            r"state.pt is damaged \([^.]*\); add --restart",
        ),
    ],
)
def test_a_folder_that_cannot_be_used_is_named(
    options: Callable[..., TrainOptions], tmp_path: Path, make: Callable[[Path], Any], said: str
) -> None:
    make(tmp_path / "out")
    with pytest.raises(TrainingError, match=said):
        quietly(options(tmp_path / "out"))


def test_options_that_contradict_each_other_are_refused(options: Callable[..., TrainOptions], tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"--from keeps the format and the sizes of its drafter"):
        quietly(options(tmp_path / "out", begin_from=DRAFT))
    with pytest.raises(TrainingError, match=r"--kind is eagle3, and the drafter of --from is of the kind dflash"):
        quietly(options(tmp_path / "out", begin_from=DRAFT, drafter={}, kind="eagle3"))


def test_what_does_not_fit_is_refused() -> None:
    memory = Memory(weights=3 << 30, tables=1 << 30, batch=1 << 30)
    check_fits(memory, 6 << 30)
    with pytest.raises(TrainingError, match=r"about 5.0 GiB beside the target .*, and 5.0 GiB are free: lower"):
        check_fits(memory, 5 << 30)


def test_prompts_leave_the_evaluation_a_position_for_an_answer(
    options: Callable[..., TrainOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has fewer positions than the engine that makes the data: a held-out prompt that fits there alone ends it."""
    asked: list[DataOptions] = []

    def noted(llm: LLM, store: object, data: DataOptions, *given: object) -> None:
        asked.append(data)
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "collect", noted)
    own = options(tmp_path / "out")
    own = replace(own, data=replace(own.data, max_prompt=100_000))
    with pytest.raises(KeyboardInterrupt):
        quietly(own)
    longest = json.loads((TARGET / "config.json").read_text())["max_position_embeddings"] - run_module.SPARE_POSITIONS
    assert asked[0].max_prompt == longest - 2


def test_processes_on_one_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = free_bytes(torch.device("cpu"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert free_bytes(torch.device("cpu")) == pytest.approx(alone / 4, rel=0.2)


@pytest.mark.parametrize("save", [torch.save, save_file])
def test_a_file_on_a_full_disk_leaves_the_one_before(save: Callable[..., None], tmp_path: Path) -> None:
    path = tmp_path / "weights"
    save_atomically(path, lambda partial: save({"step": torch.ones(1)}, partial))
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(TrainingError, match=r"weights cannot be written: .*; make room"):
            save_atomically(path, lambda partial: save({"step": torch.zeros(100_000)}, partial))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["weights"]


def test_batches_hold_each_sample_once_and_no_more_tokens_than_asked() -> None:
    samples = [Sample((1,) * (2 + i % 7), (1,) * (3 + i % 5)) for i in range(60)]
    batches = make_batches(samples, 40, seed=1)
    assert sorted(index for batch in batches for index in batch) == list(range(60))
    for batch in batches:
        assert len(batch) * max(len(samples[index].token_ids) for index in batch) <= 40
    assert make_batches(samples, 40, seed=1) == batches


def test_a_loss_that_is_no_number_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer.__new__(Trainer)
    trainer.options, trainer.progress, trainer.world, trainer.rank = LoopOptions(4, 1.0), loop.Progress(), 1, 0
    monkeypatch.setattr(Trainer, "_run", lambda self, index: (torch.tensor(float("nan"), requires_grad=True), 1))
    with pytest.raises(TrainingError, match=r"the loss of step 1 is nan: lower --learning-rate"):
        trainer.step()


def test_a_run_ends_when_it_gets_no_better(options: Callable[..., TrainOptions], tmp_path: Path) -> None:
    run = run_module.Run(options(tmp_path / "out"), lambda text: None, lambda done, total: None, True)
    lengths = [2.0, 2.5, 2.501, 2.4, 2.505, 2.5]
    run.record.evaluations = [{"step": i, "acceptance_length": each} for i, each in enumerate(lengths, 1)]
    assert run.is_plateau()
    run.record.evaluations.insert(0, {"step": 0, "acceptance_length": 9.9})  # of the drafter that it began with
    del run.record.evaluations[1:3]
    assert not run.is_plateau()
    run.record.evaluations = [{"step": i, "acceptance_length": each} for i, each in enumerate(lengths, 1)]
    run.record.evaluations.append({"step": 9, "acceptance_length": 2.6})
    assert not run.is_plateau()
    assert replace(run.options, steps=3).steps == 3


@pytest.mark.nightly
def test_two_processes_train_as_one_with_twice_the_batches_of_a_step(prompts: Path, tmp_path: Path) -> None:
    binaries = Path(sys.executable).parent
    command = [
        str(binaries / "dflash-triton"), "train", str(TARGET), "--data", str(prompts), "--steps", "2",
        "--tokens", "40", "--max-answer", "12", "--max-prompt", "64", "--layers", "1", "--block-size", "4",
        "--batch-tokens", "80", "--float32", "--set", "kv_cache_gb=0.02", "--set", "max_num_seqs=8",
    ]  # fmt: skip
    torchrun = [str(binaries / "torchrun"), "--standalone", "--no-python", "--nproc-per-node", "2"]
    ways = {
        "one": [*command, "--accumulate", "4"],
        "two": [*torchrun, *command, "--accumulate", "2"],
        "half": [*command, "--accumulate", "2"],
    }
    found = {}
    for name, way in ways.items():
        environ = os.environ | {"OMP_NUM_THREADS": "1"}
        ended = subprocess.run([*way, "--out", str(tmp_path / name)], capture_output=True, text=True, env=environ)
        assert ended.returncode == 0, ended.stderr
        state = torch.load(tmp_path / name / "training" / "state.pt", weights_only=True)
        assert state["trainer"]["progress"]["step"] == 2
        found[name] = state["trainer"]["draft"]
    # Two ways to sum gradients differ in their last bits, and Muon, which makes all directions of a gradient equally
    # large in bf16, multiplies that by some ten with each step: 0.001 of what half the batches change after one step,
    # 0.02 after two, 0.05 after four. So two steps, which is enough to see a batch of another process taken twice.
    apart = {
        name: math.sqrt(sum(float((found[name][each] - one).square().sum()) for each, one in found["one"].items()))
        for name in ("two", "half")
    }
    assert apart["two"] < 0.1 * apart["half"], apart


def test_the_fall_of_weights_distillation_and_a_head_that_is_shared_are_as_asked(
    options: Callable[..., TrainOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    falls: set[float] = set()
    draw = loop.draw_blocks

    def recorded(*given: Any) -> Any:
        falls.add(given[5])
        return draw(*given)

    targets: list[TargetStates] = []
    losses = DraftModel.losses

    def noted(self: DraftModel, *given: Any) -> Any:
        targets.append(given[-1])
        return losses(self, *given)

    monkeypatch.setattr(loop, "draw_blocks", recorded)
    monkeypatch.setattr(DraftModel, "losses", noted)
    asked = options(tmp_path / "out", decay=1.5, draft_vocab=40, share_head=True, soft_labels=0.5, hidden_loss=1.5)
    train(asked, lambda text: None, lambda *_: None)
    assert falls == {1.5}
    tensors = load_file(asked.out / "model.safetensors")
    assert targets
    for each in targets:
        assert each.distillation == Distillation(0.5, 1.0, 1.5)  # greedy answers
        assert len(each.head) == 40
    assert "lm_head.weight" not in tensors


def test_a_drafter_with_a_head_of_its_own_learns_from_the_targets_head(
    options: Callable[..., TrainOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = options(tmp_path / "first", steps=1, draft_vocab=40)
    quietly(first)
    tensors = load_file(first.out / "model.safetensors")
    of_target = tensors["lm_head.weight"].clone()
    save_file(tensors | {"lm_head.weight": 2 * of_target}, first.out / "model.safetensors", metadata={"format": "pt"})
    heads: list[tuple[torch.Tensor, torch.Tensor]] = []
    losses = DraftModel.losses

    def noted(self: DraftModel, tables: Tables, *given: Any) -> Any:
        heads.append((tables.head, given[-1].head))
        return losses(self, tables, *given)

    monkeypatch.setattr(DraftModel, "losses", noted)
    changes: dict[str, Any] = {"steps": 1, "begin_from": first.out, "drafter": {}}
    quietly(options(tmp_path / "second", hidden_loss=0.0, **changes))
    for own, aim in heads:
        torch.testing.assert_close(own.float(), 2 * of_target.float())
        torch.testing.assert_close(aim.float(), of_target.float())
    with pytest.raises(TrainingError, match="--hidden-loss is for drafters with the target's LM head"):
        quietly(options(tmp_path / "third", **changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"drafter": {"eagle_drafts": 3}}, "--drafts is not for drafters of the kind dflash"),
     ({"drafter": {"block_size": 4}, "kind": "eagle3"}, "--block-size is not for drafters of the kind eagle3"),
     ({"drafter": {"draft_layers": 2}, "kind": "eagle3"}, "--layers is not for drafters of the kind eagle3"),
     ({"drafter": {"mask_token_id": 2}, "kind": "eagle3"}, "--mask-token is not for drafters of the kind eagle3"),
     ({"drafter": {"mask_token_id": 10**6}}, "--mask-token is 1000000; the target has the tokens 0 to"),
     ({"drafter": {"block_size": 1}}, "--block-size is 1; a block has an anchor and at least one draft"),
     ({"drafter": {"target_layer_ids": (1, 99)}}, r"--layer-ids are \[1, 99\]; the target has the layers 0 to"),
     ({"draft_vocab": 40, "kind": "dflash2"}, "a dflash2 drafter proposes any token"),
     ({"soft_labels": 1.5}, "--soft-labels is 1.5; expected a share from 0 to 1"),
     ({"share_head": True}, "--share-head is for a --draft-vocab"),
     ({"share_head": True, "draft_vocab": 40, "form": "speculators"}, "--share-head is not for --format speculators"),
     ({"share_head": True, "begin_from": DRAFT, "drafter": {}}, "--draft-vocab and --share-head out")],
)  # fmt: skip
def test_what_cannot_be_is_a_sentence(
    changes: dict[str, Any], words: str, options: Callable[..., TrainOptions], tmp_path: Path
) -> None:
    with pytest.raises(TrainingError, match=words):
        train(options(tmp_path / "out", **changes), lambda text: None, lambda *_: None)
    assert not (tmp_path / "out").exists(), "before anything is made"


class SlowTrainer(Trainer):
    """Its steps take two seconds of a clock."""

    def __init__(self, steps: int) -> None:
        self.options, self.progress, self.now = LoopOptions(steps, learning_rate=1.0), Progress(), 100.0

    def step(self) -> None:
        self.now += 2
        self.progress.tick(tokens=1, loss=1.0, seconds=2.0)


@pytest.mark.parametrize(("steps", "deadline", "taken"), [(400, 200.0, 50), (30, 200.0, 50), (400, None, 400)])
def test_a_run_has_the_steps_that_fit_its_time(
    steps: int, deadline: float | None, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = SlowTrainer(steps)
    monkeypatch.setattr(time, "monotonic", lambda: trainer.now)
    told: list[int] = []
    schedule = Schedule(
        lambda: None, lambda: told.append(trainer.options.steps), lambda: False, lambda: 1000, report_every=8
    )
    assert run_steps(trainer, schedule, deadline) == "steps"
    assert trainer.progress.step == trainer.options.steps == taken
    assert set(told[1:]) == {taken}
