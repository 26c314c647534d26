"""docs/operators.md: what it names exists. Its examples are run by `test_examples`."""

from __future__ import annotations

import re

import pytest

from dflash_backend.config import SETTINGS
from dflash_backend.triton.metrics import METRICS
from tests.docs.conftest import DOCS, first_column, page

PAGE = "operators.md"
SOURCES = DOCS.parent / "dflash_backend"


def test_the_table_of_metrics_is_that_of_the_server() -> None:
    assert first_column(page(PAGE), "Metrics") == [metric.name for metric in METRICS]
    assert set(re.findall(r"`(dflash:\w+)`", page(PAGE))) == {metric.name for metric in METRICS}


def test_labels_of_metrics_are_those_of_the_server() -> None:
    for metric in METRICS:
        (kind,) = re.findall(rf"^\| `{metric.name}` \| ([^|]*) \|", page(PAGE), re.MULTILINE)
        assert kind == metric.kind + (f", by `{metric.label}`" if metric.label else "")


@pytest.mark.parametrize("words", [name for name in first_column(page(PAGE), "Log") if " " in name])
def test_log_lines_are_the_servers(words: str) -> None:
    stem = words.split(" 70%")[0].rstrip(": ")
    assert any(stem in path.read_text(encoding="utf-8") for path in SOURCES.rglob("*.py"))


def test_settings_that_the_page_assigns_exist() -> None:
    known = {setting.name for setting in SETTINGS}
    assert set(re.findall(r"`(\w+_\w+)=", page(PAGE))) <= known
    assert {name.lower() for name in re.findall(r"DFLASH_([A-Z_]*[A-Z])", page(PAGE))} <= known
