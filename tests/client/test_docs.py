"""Generated pages are current."""

import runpy
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_settings_page_is_what_the_schema_says() -> None:
    writer = runpy.run_path(str(DOCS / "write_settings.py"))
    assert (DOCS / "settings.md").read_text(encoding="utf-8") == writer["page"](), "run `make docs`"
