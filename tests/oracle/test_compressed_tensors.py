"""Our weights against those that compressed-tensors makes of what it writes. They lie in `golden/`, so that this needs
no package; where it is installed, it still computes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.oracle.compressed_tensors_library import FORMATS, config, golden_weight, results
from tests.oracle.write_golden import GOLDEN, golden_json
from tests.quantised_logits import weight_of
from tests.tiny_models import save_checkpoint

TENSORS = load_file(GOLDEN / "compressed_tensors.safetensors")


@pytest.mark.parametrize("name", FORMATS)
def test_our_weight_is_the_librarys(tmp_path: Path, name: str) -> None:
    assert list(FORMATS[name]) == golden_json("compressed_tensors")["formats"][name]
    parts = {key.removeprefix(f"{name}/"): tensor for key, tensor in TENSORS.items() if key.startswith(f"{name}/")}
    expected = parts.pop("expected")
    tensors = {f"proj.{part}": tensor for part, tensor in parts.items()}
    save_checkpoint(tmp_path, {"quantization_config": config(*FORMATS[name])}, tensors)
    found = weight_of(tmp_path, "proj", *expected.shape)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    assert (found - golden_weight()).abs().max() < 0.5, "about the weight that was quantised"


def test_the_library_computes_what_golden_holds(tmp_path: Path) -> None:
    tensors, data = results(tmp_path)
    assert data["formats"] == golden_json("compressed_tensors")["formats"]
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == TENSORS[name].dtype
        torch.testing.assert_close(tensor.float(), TENSORS[name].float(), atol=1e-6, rtol=1e-6)
