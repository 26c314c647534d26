"""Every block of the pages for users: commands and programs run as they stand, against one real server, and what a page
shows as their output is what comes.

`bash` and `python` blocks run; only the server's addresses are changed. A `text` block after one is part of its output.
A `console` block is not run, and stands in `NOT_RUN` with the reason; there are no others.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_cli.launcher.server import TritonServer
from tests.docs.conftest import ROOT, Block, addressed, blocks

PAGES = (
    "README.md",
    "docs/clients.md",
    "docs/quickstart.md",
    "docs/operators.md",
    "docs/evaluation.md",
    "docs/checkpoints.md",
    "docs/load-testing.md",
)
EXAMPLES = [
    pytest.param(block, id=f"{page}:{block.line}")
    for page in PAGES
    for block in blocks(page)
    if block.language in ("bash", "python")
]
INSTALLS = "installs or runs for minutes; that the make target exists is checked"
PLACEHOLDER = "has a placeholder for what only the reader knows"
NETWORK = "needs a package index"
# The first line of each block that is not run, by page, and why.
NOT_RUN = {
    (
        "README.md",
        "make serve    # installs into .venv, then starts a server with the demo models; Ctrl-C stops it",
    ): INSTALLS,
    (
        "README.md",
        ".venv/bin/dflash-triton serve DIR_OR_HUB_ID --draft DIR_OR_HUB_ID --set max_num_seqs=32",
    ): PLACEHOLDER,
    ("README.md", "make bench"): INSTALLS,
    ("docs/clients.md", "python3 -m venv ~/dflash"): NETWORK,
    ("docs/quickstart.md", "make serve"): INSTALLS,
    ("docs/operators.md", "dflash-triton serve DIR_OR_HUB_ID --draft DIR_OR_HUB_ID --set max_num_seqs=32"): PLACEHOLDER,
    ("docs/operators.md", "dflash-triton inspect DIR_OR_HUB_ID"): PLACEHOLDER,
    ("docs/operators.md", "model_repository/"): "a listing of files",
    ("docs/evaluation.md", ".venv/bin/dflash-triton eval"): "takes minutes; the next block has the same with a limit",
    ("docs/evaluation.md", '.venv/bin/python -m pip install "datasets>=4" "pyarrow<26"'): NETWORK,
    ("docs/evaluation.md", "make oracle"): INSTALLS,
    (
        "docs/evaluation.md",
        "DFLASH_REAL_WEIGHTS_TARGET=DIR_OR_HUB_ID DFLASH_REAL_WEIGHTS_DRAFT=DIR_OR_HUB_ID "
        ".venv/bin/pytest tests/test_real_weights.py -s",
    ): PLACEHOLDER,
    ("docs/load-testing.md", "make load                                        # lists the scenarios"): INSTALLS,
    ("docs/load-testing.md", "make load SCENARIO=shared-prefix COMPARE=enable_prefix_caching=false"): INSTALLS,
    ("docs/load-testing.md", 'make load SCENARIO=chat DURATION=20 SETTINGS="trace_dir=/tmp/trace"'): INSTALLS,
    (
        "docs/load-testing.md",
        ".venv/bin/dflash-triton serve --set max_num_seqs=32",
    ): "a minute of load; tests/load_tests has it",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What an example sees of a checkout: its files, and this environment as `.venv`."""
    for name in ("demo", "load_tests", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


@pytest.mark.server
@pytest.mark.parametrize("block", EXAMPLES)
def test_an_example_runs_and_shows_what_the_page_shows(
    block: Block, server: TritonServer, checkout: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = (
        run_python(block, server, checkout, capfd) if block.language == "python" else run_shell(block, server, checkout)
    )
    assert block.quiet or out.strip()
    assert '{"error"' not in out
    where = 0
    for line in block.output:
        found = out.find(line, where)
        assert found >= 0, f"{line!r} is not in what came, after what stands before it on the page:\n{out}"
        where = found + len(line)


def run_python(block: Block, server: TritonServer, checkout: Path, capfd: pytest.CaptureFixture[str]) -> str:
    script = checkout / "example.py"
    script.write_text(addressed(block.text, server), encoding="utf-8")
    runpy.run_path(str(script), run_name="__main__")
    return capfd.readouterr().out


def run_shell(block: Block, server: TritonServer, checkout: Path) -> str:
    programs = checkout / "bin"
    programs.mkdir()
    if shutil.which("grpcurl") is None:
        stand_in = programs / "grpcurl"
        stand_in.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("grpcurl.py")} "$@"\n')
        stand_in.chmod(0o755)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DFLASH_")}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", addressed(block.text, server)],
        env=environ | {"PATH": path, "DFLASH_URL": server.grpc_url},
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_is_not_run_is_listed_with_a_reason() -> None:
    shown = [
        (page, block.text.splitlines()[0]) for page in PAGES for block in blocks(page) if block.language == "console"
    ]
    assert sorted(shown) == sorted(NOT_RUN)
    assert len(NOT_RUN) == 16
    assert len(EXAMPLES) > 30


def test_every_block_says_what_it_is() -> None:
    for page in PAGES:
        assert {block.language for block in blocks(page)} <= {"bash", "python", "text", "console"}, page
        fences = re.findall(r"^ *```.*$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
        assert len(blocks(page)) * 2 == len(fences), page


def test_make_targets_that_pages_name_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page in PAGES:
        for target in re.findall(
            r"^make ([a-z-]+)|`make ([a-z-]+)", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE
        ):
            assert re.search(rf"^{''.join(target)}:", makefile, re.MULTILINE), (page, target)


def test_the_versions_of_python_are_the_same_everywhere() -> None:
    def text(name: str) -> str:
        return (ROOT / name).read_text(encoding="utf-8")

    assert 'requires-python = ">=3.11"' in text("pyproject.toml")
    assert "Python 3.11 or 3.12" in text("README.md")
    assert "Python 3.11 or 3.12" in text("docs/deployment.md")
    assert "on Python 3.11 or 3.12" in text("constraints-cpu.txt")
    assert "((3, 11), (3, 12))" in text("Makefile")
    for name in ("README.md", "docs/deployment.md", "docs/clients.md", "pyproject.toml"):
        assert "3.10" not in text(name), name


def test_nobody_is_told_to_install_from_a_package_index() -> None:
    files = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    files += [
        path
        for folder in ("client", "dflash_backend", "load_tests", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
    ]
    for path in files:
        said = re.findall(r"install [^\n]*?dflash-triton\[", path.read_text(encoding="utf-8"))
        assert not said, path
