"""The playground as a person uses it, in words of its own."""

from __future__ import annotations

import json
import re
from typing import Any

TIMEOUT_MS = 30_000


class Playground:
    """The page in one profile of the browser. `faults` has what the page logged as errors, and uncaught exceptions."""

    def __init__(self, context: Any, url: str) -> None:
        self.context = context
        context.set_default_timeout(TIMEOUT_MS)
        self.page = context.new_page()
        self.faults: list[str] = []
        self._devtools: Any = None
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("console", self._log)
        self.page.goto(url)
        self.page.locator("#health[data-state]").wait_for()

    def _log(self, message: Any) -> None:
        # The browser logs each answer that is an error; what the page makes of it is what tests look at.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.faults.append(message.text)

    def send(self, text: str, wait: bool = True) -> None:
        self.page.fill("#prompt", text)
        self.page.keyboard.press("Enter")
        if wait:
            self.wait()

    def wait(self) -> None:
        """Until the page waits for a prompt."""
        self.page.locator("#send").wait_for()

    def answers(self) -> list[str]:
        """The text of each answer."""
        return [str(text) for text in self.page.locator(".answer .body").all_text_contents()]

    @property
    def answer(self) -> str:
        return self.answers()[-1]

    def runs(self) -> list[tuple[int, str]]:
        """The last answer's runs: step and text."""
        found = self.page.locator(".answer").last.locator(".body .run")
        return found.evaluate_all("runs => runs.map(run => [Number(run.dataset.step), run.textContent])")  # type: ignore[no-any-return]

    def figure(self, name: str) -> float:
        """A number of the live panel, as soon as it shows one."""
        text = self.page.locator(f"#f-{name}", has_text=re.compile(r"\d")).text_content()
        return float(re.sub(r"[^\d.]", "", text.partition("/")[0]))

    def cpu_s(self) -> float:
        """Seconds of processor time that the page's main thread has used."""
        if self._devtools is None:
            self._devtools = self.context.new_cdp_session(self.page)
            self._devtools.send("Performance.enable", {"timeDomain": "threadTicks"})
        metrics = self._devtools.send("Performance.getMetrics")["metrics"]
        return next(float(metric["value"]) for metric in metrics if metric["name"] == "TaskDuration")

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).last.text_content())

    def stored(self, storage: str = "sessionStorage") -> dict[str, Any]:
        """What the page has put into a storage of the browser."""
        items = self.page.evaluate(f"Object.entries({storage})")
        return {name: json.loads(value) for name, value in items}
