"""docs/clients.md: each table has what the code has. Its examples are run by `test_examples`."""

from __future__ import annotations

import re

from dflash_backend.config import asset_path
from dflash_backend.text.chat import OPTION_NAMES
from dflash_backend.text.sampling_params import PARAMETERS
from dflash_client.sampling import Sampling
from tests.docs.conftest import first_column, page

PAGE = "clients.md"


def test_the_tables_of_inputs_and_outputs_are_those_of_the_model() -> None:
    config = asset_path("model_repository", "dflash", "config.pbtxt").read_text(encoding="utf-8")
    inputs, _, outputs = config.partition("\noutput [")
    for heading, tensors in (("Inputs", inputs), ("Outputs", outputs.partition("]\ninstance")[0])):
        assert sorted(first_column(page(PAGE), heading)) == sorted(re.findall(r'\{ name: "(\w+)"', tensors))


def test_the_table_of_sampling_parameters_is_that_of_the_server_and_of_the_client() -> None:
    names = sorted(parameter.name for parameter in PARAMETERS)
    assert sorted(first_column(page(PAGE), "Sampling parameters")) == names
    assert sorted(Sampling.__annotations__) == sorted([*names, *OPTION_NAMES])
