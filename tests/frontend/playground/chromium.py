"""Finds and starts a headless Chromium."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextmanager
def chromium() -> Iterator[Any]:
    """Playwright's browser: the program that $CHROMIUM names, else one that is installed. Skips where there is none."""
    program = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip("needs Chromium: install it (apt-get install chromium) or name one in $CHROMIUM")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.skip("needs Chromium and the package that drives it: pip install playwright")
    with sync_playwright() as playwright:
        # Without a sandbox: as root, and in most containers, Chromium cannot make one. It loads nothing but this page.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()
