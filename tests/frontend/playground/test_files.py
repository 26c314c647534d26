"""The page's files and their headers, without a browser."""

from __future__ import annotations

import re
from importlib import resources

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from dflash_openai.playground import playground_routes

STATIC = resources.files("dflash_openai") / "static"
FILES = sorted(entry.name for entry in STATIC.iterdir())


@pytest.fixture(scope="module")
def http() -> TestClient:
    return TestClient(Starlette(routes=playground_routes()))


@pytest.mark.parametrize("path", ["/", *(f"/static/{name}" for name in FILES)])
def test_each_file_is_served_under_the_policy_and_asked_about_again(http: TestClient, path: str) -> None:
    response = http.get(path)
    assert response.status_code == 200
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cache-control"] == "no-cache"
    again = http.get(path, headers={"if-none-match": response.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert http.get(path, headers={"if-none-match": '"other"'}).status_code == 200


@pytest.mark.parametrize("name", ["missing.js", "..%2Fplayground.py", "%2e%2e/playground.py"])
def test_nothing_else_is_served(http: TestClient, name: str) -> None:
    assert http.get(f"/static/{name}").status_code == 404


@pytest.mark.parametrize("name", FILES)
def test_the_page_asks_no_other_host_and_has_no_markup_from_text(name: str) -> None:
    text = (STATIC / name).read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|//[a-z]+\.", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
    assert not re.search(r"<script(?! type=\"module\" src=)|\son\w+=|style=\"", text)


def test_all_names_that_the_page_and_its_modules_use_are_files() -> None:
    named = {
        found
        for name in FILES
        for found in re.findall(r"""(?:static/|from "\./)([\w.]+)""", (STATIC / name).read_text(encoding="utf-8"))
    }
    assert named <= set(FILES)
    assert set(FILES) - named == {"index.html"}


def test_icons_are_in_the_page_itself_and_each_id_is_there_once() -> None:
    """What is made while the server is gone can load none."""
    ids = re.findall(r' id="([^"]+)"', (STATIC / "index.html").read_text(encoding="utf-8"))
    assert len(set(ids)) == len(ids)
    modules = {name: (STATIC / name).read_text(encoding="utf-8") for name in FILES if name.endswith((".js", ".html"))}
    used = {found for text in modules.values() for found in re.findall(r'<use href="([^"]+)"', text)}
    made = re.findall(
        r'(?:\bicon|button\("[^"]*",|button\([^"]*"[^"]*" : "[^"]*",) ?\(?"(\w+)"', "".join(modules.values())
    )
    assert {"retry", "copy", "edit"} <= set(made)
    assert used | {f"#icon-{name}" for name in made} <= {f"#{name}" for name in ids}


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".js")])
def test_modules_are_short_and_say_what_they_are_for(name: str) -> None:
    lines = (STATIC / name).read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("// ")
    assert len(lines) <= 400
