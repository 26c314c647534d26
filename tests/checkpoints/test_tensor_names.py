"""A checkpoint is the same one whatever its tensors' names begin with."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_backend.checkpoints import CheckpointError, read_target
from dflash_backend.checkpoints.quantization.slices import Slice
from dflash_backend.checkpoints.tensor_names import bare_name, beginnings
from dflash_backend.checkpoints.weights import WeightSource, load_weights
from dflash_backend.drafters.registry import drafter_class, read_draft
from dflash_backend.engine.inspection import inspect_target
from dflash_backend.models import decoder, load_target
from tests.drafters.drafts import make_dflash2, make_dspark, make_eagle3, make_speculators
from tests.support.mxfp4_checkpoint import make_mxfp4_target
from tests.support.quantised import FP8_BLOCK, GPTQ, fp8_block, fp8_rows, gptq, write
from tests.support.scale import SCALE, by_night, others_by_night
from tests.support.tiny_models import make_draft, make_target

CPU = torch.device("cpu")
PREFIXES: tuple[str, ...] = (
    "",
    "model.",
    "module.",
    "_orig_mod.",
    "language_model.",
    "model.language_model.",
    "language_model.model.",
    "module._orig_mod.model.",
    "_orig_mod.module.model.language_model.",
    "base_model.model.model.",
    "draft_model.",
)
if SCALE < 4:
    PREFIXES = ("", "_orig_mod.module.model.language_model.")

COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
        }
    },
}


def rename(directory: Path, change: Callable[[str], str], files: int = 1) -> None:
    """Write the tensors of a checkpoint again, by other names, in some shards with an index."""
    tensors = {change(name): tensor for name, tensor in load_file(directory / "model.safetensors").items()}
    (directory / "model.safetensors").unlink()
    if files == 1:
        save_file(tensors, directory / "model.safetensors")
        return
    where = {name: f"model-{i % files}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in sorted(set(where.values())):
        save_file({name: tensors[name] for name in where if where[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


class Kept(WeightSource):
    """Keeps every tensor that a model reads, quantised ones as numbers."""

    def __init__(self, source: WeightSource, found: dict[str, torch.Tensor]) -> None:
        super().__init__(source.dtype, source.device)
        self._source, self._found = source, found

    def read(self, name: str, out: torch.Tensor, taken: Slice | None = None) -> None:
        self._source.read(name, out, taken)
        self._found[name] = out

    def read_projection(self, name: str, out: torch.Tensor, taken: Slice | None = None) -> None:
        self._source.read_projection(name, out, taken)
        self._found[name] = out


def target_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """What a target reads of its files."""
    spec, found = read_target(directory), {}
    load_weights(
        directory,
        lambda source: decoder.TargetWeights.read(Kept(source, found), spec),
        torch.float32,
        CPU,
        ignored=lambda name: decoder.is_unused(spec, name),
    )
    return found


def draft_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """What a drafter reads of its files."""
    spec, found = read_draft(directory), {}
    kind: Any = drafter_class(spec)
    kind.check_weights(spec)
    weights = kind.model_class.weights_class if hasattr(kind, "model_class") else None
    if weights is None:
        from dflash_backend.drafters.eagle3.drafter import Eagle3Weights as weights
    load_weights(
        directory, lambda source: weights.read(Kept(source, found), spec), torch.float32, CPU, ignored=lambda _: True
    )
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def quantised(make: Callable[[Path], Any], packer: Any, config: dict[str, Any]) -> Callable[[Path], Path]:
    """Makes a checkpoint of which all projections are quantised so."""

    def made(path: Path) -> Path:
        make(path / "source")
        return write(path / "source", path, packer, config).quantised

    return made


def make_nested(directory: Path) -> Path:
    """The text part of a multimodal target, with a part that is not served."""
    make_target(directory, architecture="Gemma4ForCausalLM")
    config = json.loads((directory / "config.json").read_text())
    outer = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": config, "tie_word_embeddings": True}
    (directory / "config.json").write_text(json.dumps(outer))
    rename(directory, lambda name: name.replace("model.", "model.language_model."))
    tensors = load_file(directory / "model.safetensors") | {"model.vision_tower.layers.0.weight": torch.ones(2)}
    save_file(tensors, directory / "model.safetensors")
    return directory


TARGETS: dict[str, Callable[[Path], Any]] = {
    "tied": make_target,
    "untied": lambda path: make_target(path, tie_word_embeddings=False),
    "experts": lambda path: make_target(path, architecture="Qwen3MoeForCausalLM"),
    "recurrent": lambda path: make_target(path, architecture="Qwen3_5ForCausalLM"),
    "MXFP4": make_mxfp4_target,
    "a text part": make_nested,
    "FP8": quantised(make_target, fp8_block(16, 16), FP8_BLOCK | {"weight_block_size": [16, 16]}),
    "GPTQ": quantised(make_target, gptq(), GPTQ),
    "compressed-tensors": quantised(make_target, fp8_rows, COMPRESSED),
}
DRAFTERS: dict[str, Callable[[Path], Any]] = {
    "DFlash": make_draft,
    "DFlash of speculators": make_speculators,
    "DFlash2": make_dflash2,
    "DSpark": make_dspark,
    "EAGLE-3": lambda path: make_eagle3(path, embedding=True),
    "EAGLE-3 with layers": lambda path: make_eagle3(path, layer="layers.0."),
    "DFlash in FP8": quantised(make_draft, fp8_block(16, 16), FP8_BLOCK | {"weight_block_size": [16, 16]}),
}
BY_DAY = ["a text part", "FP8"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A checkpoint of each kind, made once."""
    found: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in found:
            made = (TARGETS | DRAFTERS)[kind](directory := tmp_path_factory.mktemp("made"))
            found[kind] = made if isinstance(made, Path) else directory
        return found[kind]

    return get


def copied(source: Path, directory: Path) -> Path:
    for name in ("config.json", "model.safetensors"):
        (directory / name).write_bytes((source / name).read_bytes())
    return directory


@pytest.mark.parametrize("kind", others_by_night(TARGETS, BY_DAY))
def test_a_target_is_the_same_with_and_without_each_prefix(kind: str, made: Any, tmp_path: Path) -> None:
    source = made(kind)
    expected = target_tensors(source)
    for number, prefix in enumerate(PREFIXES):
        directory = copied(source, tmp_path)
        # A head lies beside the decoder, or within what was wrapped.
        outer = prefix if number % 2 else ""
        own = {"lm_head": outer, "vision_tower": "model."}

        def named(name: str, prefix: str = prefix, own: dict[str, str] = own) -> str:
            return own.get(bare_name(name).partition(".")[0], prefix) + bare_name(name)

        rename(directory, named)
        assert_same(target_tensors(directory), expected)


@pytest.mark.parametrize("kind", others_by_night(DRAFTERS, ["DFlash of speculators", "EAGLE-3"]))
def test_a_drafter_is_the_same_with_and_without_each_prefix(kind: str, made: Any, tmp_path: Path) -> None:
    source = made(kind)
    expected, spec = draft_tensors(source), vars(read_draft(source))
    for prefix in PREFIXES:
        directory = copied(source, tmp_path)
        rename(directory, lambda name, prefix=prefix: prefix + name)
        assert vars(read_draft(directory)) | {"path": source} == spec
        assert_same(draft_tensors(directory), expected)


@pytest.mark.parametrize("kind", [by_night("untied"), "FP8"])
@pytest.mark.parametrize("reads_ahead", [False, True])
def test_so_are_shards_with_an_index_and_tensors_that_are_read_ahead(
    kind: str, reads_ahead: bool, made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_backend.checkpoints.weights.reads_ahead", lambda device: reads_ahead)
    expected = target_tensors(made(kind))
    directory = copied(made(kind), tmp_path)
    rename(directory, lambda name: f"module._orig_mod.{name}", files=3)
    assert_same(target_tensors(directory), expected)


def test_wrappers_within_a_name_count_no_more_than_before_it(made: Any, tmp_path: Path) -> None:
    directory = copied(made("tied"), tmp_path)
    rename(directory, lambda name: re.sub(r"layers\.(\d)\.", r"layers.\1._checkpoint_wrapped_module._orig_mod.", name))
    assert_same(target_tensors(directory), target_tensors(made("tied")))


def test_lists_of_a_quantisation_mean_a_projection_by_either_name(made: Any, tmp_path: Path) -> None:
    """By the name in the files, and by that of a model with a head."""
    expected = target_tensors(made("compressed-tensors"))
    for prefix in ("", "module.model."):
        directory = copied(made("compressed-tensors"), tmp_path)
        rename(directory, lambda name, prefix=prefix: prefix + bare_name(name))
        for meant in ("model.", prefix):
            config = json.loads((made("compressed-tensors") / "config.json").read_text())
            group = config["quantization_config"]["config_groups"]["group_0"]
            group["targets"] = [rf"re:{re.escape(meant)}layers\..*_proj"]
            (directory / "config.json").write_text(json.dumps(config))
            assert_same(target_tensors(directory), expected)


@pytest.mark.parametrize("make", [make_target, make_draft, make_eagle3])
def test_names_that_none_of_them_explains_are_shown(make: Callable[[Path], Any], tmp_path: Path) -> None:
    make(tmp_path)
    rename(tmp_path, lambda name: f"transformer.h.{bare_name(name)}")
    with pytest.raises(CheckpointError) as caught:
        (read_target if make is make_target else read_draft)(tmp_path)
    text = str(caught.value)
    assert text.startswith(f"{tmp_path}: no tensor named layers.0... in its safetensors files; the names begin with ")
    assert "'transformer.h.layers.'" in text or "'transformer.h.midlayer." in text
    assert "config.json" not in text
    assert all(f"{word}." in text for word in ("model", "module", "_orig_mod", "language_model"))


def test_two_names_of_one_tensor_are_refused(tmp_path: Path) -> None:
    make_target(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"module.model.norm.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    expected = (
        "tensors '(module.)?model.norm.weight' and '(module.)?model.norm.weight' are both 'model.norm.weight' once"
    )
    with pytest.raises(CheckpointError, match=expected):
        read_target(tmp_path)


def test_errors_name_a_tensor_as_its_file_does(tmp_path: Path) -> None:
    make_target(tmp_path)
    rename(tmp_path, lambda name: f"module.{name}")
    tensors = load_file(tmp_path / "model.safetensors")
    norm = tensors.pop("module.model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor 'module\.model\.norm\.weight' is missing"):
        inspect_target(read_target(tmp_path))
    save_file(tensors | {"module.model.norm.weight": norm[:-1].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor 'module\.model\.norm\.weight' has shape \[31\]"):
        inspect_target(read_target(tmp_path))
    save_file(tensors | {"module.model.norm.weight": norm * torch.nan}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"the tensor module\.model\.norm\.weight has values that are no numbers"):
        load_target(read_target(tmp_path), 8, torch.float32, CPU)
    extra = {"module.model.norm.weight": norm, "module.model.x": norm.clone()}
    save_file(tensors | extra, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor 'module\.model\.x' of shape \[32\] is not part of this model"):
        inspect_target(read_target(tmp_path))


def test_a_name_keeps_at_least_one_word() -> None:
    assert bare_name("model.norm.weight") == "norm.weight"
    assert bare_name("model") == "model"
    assert bare_name("module") == "module"
    assert bare_name("model.visual.blocks.0.norm") == "visual.blocks.0.norm"
    assert beginnings(["a.b", "h.0.x", "h.1.x", "c", "d"]) == "'h.', 'a.b', 'c' and 1 more"
