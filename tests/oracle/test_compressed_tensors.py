"""Our weights against those that compressed-tensors makes of what it writes. They lie in `golden/`, so that this needs
no package; where it is installed, it still computes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflash_kernels.fp8_activations import quantise_activations_reference
from tests.oracle.compressed_tensors_library import FORMATS, NOT_INSTALLED, config, golden_weight, results
from tests.oracle.write_golden import GOLDEN, golden_json
from tests.support.quantised_logits import weight_of
from tests.support.tiny_models import save_checkpoint

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


@pytest.mark.parametrize("columns", [144, 36])
def test_our_activations_are_the_librarys(columns: int) -> None:
    """Its dynamic scales, of tokens and of groups of a token."""
    pytest.importorskip("compressed_tensors", reason=NOT_INSTALLED)
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    strategy = {"strategy": "token"} if columns == 144 else {"strategy": "group", "group_size": columns}
    scheme = QuantizationArgs(num_bits=8, type="float", dynamic=True, symmetric=True, **strategy)
    x = torch.randn(5, 144, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.01, 50, 5)[:, None]
    expected = fake_quantize(x[None], *compute_dynamic_scales_and_zp(x[None], scheme, torch.nn.Linear(1, 1)), scheme)
    codes, scales = quantise_activations_reference(x, columns, torch.float32)
    torch.testing.assert_close(codes * scales.t().repeat_interleave(columns, dim=1), expected[0], atol=0, rtol=1e-6)
