"""The two ways to number layers name the same features one apart, and nothing else converts them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from dflash_backend.checkpoints import CheckpointError
from dflash_backend.drafters.dflash.config import default_layer_ids
from dflash_backend.drafters.layer_ids import to_boundary_ids, to_layer_ids
from dflash_backend.drafters.registry import read_draft
from tests.drafters.drafts import edit, make_speculators, put
from tests.support.tiny_models import TARGET_LAYERS, make_draft, make_target


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
    readers = {"layer_ids.py", "pairing.py", "describe.py", "dflash/config.py", "eagle3/config.py"}
    writers = {"training/formats.py"}
    assert users == {f"drafters/{name}" for name in readers} | writers


# Each name under which configs are published, with its convention; the ids given name the layers 1 and 3.
NAMES: dict[str, tuple[str, list[int]]] = {
    "eagle_aux_hidden_state_layer_ids": ("", [2, 4]),
    "dflash_config.target_layer_ids": ("dflash_config", [1, 3]),
    "target_layer_ids": ("", [1, 3]),
    "dflash_config.layer_ids": ("dflash_config", [2, 4]),
    "eagle_config.layer_ids": ("eagle_config", [2, 4]),
    "aux_hidden_state_layer_ids": ("", [2, 4]),
}


def name_layers(directory: Path, *names: str, shift: int = 0) -> None:
    """Write a z-lab drafter whose layers are named in these fields, each field after the first moved by `shift`."""
    make_draft(directory, dflash_config={"mask_token_id": 96})
    for i, name in enumerate(names):
        holder, ids = NAMES[name]
        ids, field = [id_ + (shift if i else 0) for id_ in ids], name.rpartition(".")[2]
        edit(
            directory / "config.json",
            lambda data, holder=holder, field=field, ids=ids: (data.setdefault(holder, {}) if holder else data).update(
                {field: ids}
            ),
        )


@pytest.mark.parametrize("name", NAMES)
def test_every_published_name_of_the_layers_is_read_by_its_own_convention(name: str, tmp_path: Path) -> None:
    name_layers(tmp_path, name)
    draft = read_draft(tmp_path)
    assert draft.target_layer_ids == (1, 3)
    assert draft.notes == ()


@pytest.mark.parametrize(("first", "second"), list(itertools.pairwise(NAMES)))
def test_the_order_of_the_names_is_vllms_and_a_contradiction_is_said(first: str, second: str, tmp_path: Path) -> None:
    name_layers(tmp_path, first, second, shift=-1)
    draft = read_draft(tmp_path)
    assert draft.target_layer_ids == (1, 3)
    assert draft.notes == (f"{first} names the target layers [1, 3] and is used; {second} names [0, 2] (layer ids)",)


def test_names_that_agree_need_no_word(tmp_path: Path) -> None:
    name_layers(tmp_path, *NAMES)
    assert read_draft(tmp_path).notes == ()


def test_ids_of_another_type_are_refused_even_where_another_field_decides(tmp_path: Path) -> None:
    name_layers(tmp_path, "eagle_aux_hidden_state_layer_ids")
    put(tmp_path / "config.json", target_layer_ids="1,3")
    with pytest.raises(CheckpointError, match="'target_layer_ids' is '1,3'; expected a list of integers"):
        read_draft(tmp_path)
