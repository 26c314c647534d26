"""The two ways to number layers name the same features one apart, and nothing else converts them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash_backend.checkpoints import CheckpointError, read_draft
from dflash_backend.checkpoints.layer_ids import default_layer_ids, to_boundary_ids, to_layer_ids
from tests.checkpoints.drafts import make_speculators, put
from tests.tiny_models import TARGET_LAYERS, make_draft, make_target


def test_boundary_ids_are_the_hidden_states_of_transformers_and_layer_ids_the_layers_outputs(tmp_path: Path) -> None:
    model = make_target(tmp_path)
    outputs = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, args, output: outputs.append(output))
    states = model(torch.tensor([[1, 2, 3]]), output_hidden_states=True).hidden_states
    # The last of the hidden states has been through the final norm, and is no layer's output.
    for layer_id in range(TARGET_LAYERS - 1):
        (boundary_id,) = to_boundary_ids([layer_id])
        torch.testing.assert_close(states[boundary_id], outputs[layer_id], rtol=0, atol=0)
        assert to_layer_ids([boundary_id]) == (layer_id,)
        assert not torch.equal(states[boundary_id - 1], outputs[layer_id])


def test_both_formats_of_one_drafter_name_the_same_layers(tmp_path: Path) -> None:
    make_draft(tmp_path / "z")
    make_speculators(tmp_path / "s")
    put(tmp_path / "s" / "config.json", aux_hidden_state_layer_ids=[2, 4])
    assert read_draft(tmp_path / "z").target_layer_ids == read_draft(tmp_path / "s").target_layer_ids == (1, 3)


def test_there_and_back_is_where_one_began() -> None:
    assert to_layer_ids(to_boundary_ids([0, 1, 35])) == (0, 1, 35)
    assert to_boundary_ids([0, 35]) == (1, 36)


def test_default_layer_ids_are_those_of_the_method() -> None:
    assert default_layer_ids(36, 5) == (1, 9, 17, 25, 33)
    assert default_layer_ids(36, 1) == (18,)
    assert default_layer_ids(4, 2) == (1, 1)
    with pytest.raises(CheckpointError, match="no default for a target of 3 layers"):
        default_layer_ids(3, 2)


def test_no_other_file_of_the_package_converts_layer_ids() -> None:
    package = Path(__file__).parents[2] / "dflash_backend"
    users = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if "boundary_id" in path.read_text() or "aux_hidden_state_layer_ids" in path.read_text()
    }
    readers = {"layer_ids.py", "speculators.py", "pairing.py", "describe.py"}
    assert {user for user in users if user.startswith("checkpoints/")} == {f"checkpoints/{name}" for name in readers}
    assert all(user.startswith("checkpoints/") for user in users)
