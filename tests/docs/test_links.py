"""Links between the pages lead somewhere, headings included."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.conftest import DOCS, FENCED, ROOT

PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md"), *(ROOT / "demo").glob("*.md")])
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    for match in LINK.finditer(text):
        target = match[1] or match[2]
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        file = page if not path else (page.parent / path)
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file), target
