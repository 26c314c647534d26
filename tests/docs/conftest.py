"""One real server for the examples of the docs, and the fenced blocks of a page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from dflash_client.launcher import TritonServer
from tests.server.conftest import new_server

DOCS = Path(__file__).resolve().parents[2] / "docs"
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block of a page: its language, its text, and the line that it begins at."""

    language: str
    text: str
    line: int

    def __str__(self) -> str:
        return f"{self.language}-line-{self.line}"


def page(name: str) -> str:
    """The text of a page."""
    return (DOCS / name).read_text(encoding="utf-8")


def blocks(name: str) -> list[Block]:
    """The fenced blocks of a page, in its order."""
    text = page(name)
    return [Block(m.group(1), m.group(2), text.count("\n", 0, m.start()) + 1) for m in FENCED.finditer(text)]


def first_column(text: str, heading: str) -> list[str]:
    """What is in backticks in the first column of the tables under a heading."""
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def addressed(text: str, server: TritonServer) -> str:
    """An example with the addresses of a running server, which is all that is changed."""
    addresses = {
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
