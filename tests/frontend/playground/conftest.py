"""Headless Chromium on the page, which a stand-in server serves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.frontend.playground.chromium import chromium
from tests.frontend.playground.page import Playground
from tests.frontend.playground.standin import Control, K, running_standin


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A browser takes seconds: `make test-fast` does without."""
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


# Not of the session: while Playwright runs, its thread has a running event loop, and no other test can start one.
@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="session")
def shared_standin() -> Iterator[Control]:
    with running_standin() as server:
        yield server


@pytest.fixture
def standin(shared_standin: Control) -> Control:
    shared_standin.set(requests=[], num_left=0, api_key=None, num_busy=0, k=K)
    return shared_standin


@pytest.fixture
def open_page(browser: Any, standin: Control) -> Iterator[Any]:
    """Opens the page in a browser profile of its own; takes options such as `color_scheme` and `viewport`."""
    opened: list[Playground] = []

    def open_it(url: str = standin.url, **options: Any) -> Playground:
        opened.append(Playground(browser.new_context(**options), url))
        return opened[-1]

    yield open_it
    for page in opened:
        page.context.close()
        assert page.faults == []


@pytest.fixture
def page(open_page: Any) -> Playground:
    page: Playground = open_page(viewport={"width": 1280, "height": 800})
    return page
