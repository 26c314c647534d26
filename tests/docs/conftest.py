"""One real server for the examples of the docs, and the fenced blocks of a page."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import pytest

from dflash_cli.launcher.frontend import FrontendProcess
from dflash_cli.launcher.server import TritonServer
from tests.server.conftest import new_server
from tests.support.frontends import local_frontend

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FENCED = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block of a page: its language, its text, the line that it begins at, and the lines of the `text` block
    that follows it, which show its output."""

    language: str
    text: str
    line: int
    output: tuple[str, ...] = ()

    @property
    def quiet(self) -> bool:
        """Whether it prints nothing, because it only sets up a shell."""
        return self.text.startswith(". .venv/bin/activate")

    def __str__(self) -> str:
        return f"{self.language}-line-{self.line}"


def page(name: str) -> str:
    """The text of a page, by its path from the root or its name in docs/."""
    path = ROOT / name
    return (path if path.is_file() else DOCS / name).read_text(encoding="utf-8")


def blocks(name: str) -> list[Block]:
    """The fenced blocks of a page, in its order."""
    text = page(name)
    found = list(FENCED.finditer(text))
    made = []
    for match, after in zip_longest(found, found[1:]):
        shown = after is not None and after[1] == "text" and not text[match.end() : after.start()].strip()
        # "..." stands for lines that are left out.
        lines = [line.strip() for line in after[2].splitlines() if line.strip() not in ("", "...")] if shown else []
        made.append(Block(match[1], textwrap.dedent(match[2]), text.count("\n", 0, match.start()) + 1, tuple(lines)))
    return made


def first_column(text: str, heading: str) -> list[str]:
    """What is in backticks in the first column of the tables under a heading."""
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def addressed(text: str, server: TritonServer, frontend: FrontendProcess) -> str:
    """An example with the addresses of a running server and front end, and where its key is; nothing else is
    changed."""
    addresses = {
        "/tmp/dflash-triton-*/api-key": str(server.folder / "api-key"),
        "http://localhost:9000": frontend.url,
        "localhost:8000": server.http_url,
        "localhost:8001": server.grpc_url,
        "localhost:8002": server.metrics_url,
    }
    for written, actual in addresses.items():
        text = text.replace(written, actual)
    return text


@pytest.fixture(scope="session")
def server() -> Iterator[TritonServer]:
    """The server that the examples talk to; some load and unload its model."""
    with new_server(explicit=True) as running:
        yield running


@pytest.fixture(scope="session")
def frontend(server: TritonServer) -> Iterator[FrontendProcess]:
    """The front end that the examples talk to."""
    with local_frontend(server) as running:
        yield running
