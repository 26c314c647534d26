"""Makes the pictures of docs/playground.md from a running server.

python -m tests.frontend.playground.screenshots http://localhost:9000/ docs/images
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.frontend.playground.chromium import chromium
from tests.frontend.playground.page import Playground

PROMPT = "Sam fills 4 bags with 6 marbles each and gives away 7 marbles. How many marbles does Sam keep?"
CODE = "Write a Python function named `long_titles` that returns a list of the titles that are longer than 4 letters."
WIDE: dict[str, Any] = {"viewport": {"width": 1360, "height": 860}}
PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "has_touch": True}


def main(url: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with chromium() as browser:
        for name, options in {
            "light": {**WIDE, "color_scheme": "light"},
            "dark": {**WIDE, "color_scheme": "dark"},
            "phone": {**PHONE, "color_scheme": "light"},
        }.items():
            page = Playground(browser.new_context(**options), url)
            page.page.locator("#health[data-state=ready]").wait_for()
            if name != "light":
                page.send(CODE if name == "dark" else PROMPT)
            if name != "phone":
                page.page.locator("label", has_text="Compare with drafts off").click()
                page.send(PROMPT)
            page.page.wait_for_timeout(500)
            page.page.screenshot(path=folder / f"playground-{name}.png")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
