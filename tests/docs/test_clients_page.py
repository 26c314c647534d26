"""docs/clients.md: each example runs as it stands, against a real server, and each table has what the code has."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_backend.config import asset_path
from dflash_backend.sampling_params import PARAMETERS
from dflash_client.launcher import TritonServer
from dflash_client.sampling import Sampling
from tests.docs.conftest import Block, addressed, blocks, first_column, page

PAGE = "clients.md"
BLOCKS = blocks(PAGE)


@pytest.mark.server
@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "python"], ids=str)
def test_a_python_example_runs(
    block: Block, server: TritonServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "example.py"
    script.write_text(addressed(block.text, server), encoding="utf-8")
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.strip()


@pytest.mark.server
@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "bash"], ids=str)
def test_a_shell_example_runs(block: Block, server: TritonServer, tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    if shutil.which("grpcurl") is None:
        stand_in = programs / "grpcurl"
        stand_in.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("grpcurl.py")} "$@"\n')
        stand_in.chmod(0o755)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", addressed(block.text, server)],
        env=os.environ | {"PATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert '"error' not in done.stdout
    if "grpcurl" in block.text:
        assert re.search(r'"ready": true.*"rawOutputContents"', done.stdout, re.DOTALL)


def test_every_block_is_run() -> None:
    assert {block.language for block in BLOCKS} == {"python", "bash"}
    assert len(BLOCKS) == page(PAGE).count("\n```") // 2


def test_the_tables_of_inputs_and_outputs_are_those_of_the_model() -> None:
    config = asset_path("model_repository", "dflash", "config.pbtxt").read_text(encoding="utf-8")
    inputs, _, outputs = config.partition("\noutput [")
    for heading, tensors in (("Inputs", inputs), ("Outputs", outputs.partition("]\ninstance")[0])):
        assert sorted(first_column(page(PAGE), heading)) == sorted(re.findall(r'\{ name: "(\w+)"', tensors))


def test_the_table_of_sampling_parameters_is_that_of_the_server_and_of_the_client() -> None:
    names = sorted(parameter.name for parameter in PARAMETERS)
    assert sorted(first_column(page(PAGE), "Sampling parameters")) == names
    assert sorted(Sampling.__annotations__) == names
