"""Models from the hub: the revision that is asked for, and how a download is told of, by a hub of the test's own."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

from dflash_backend.checkpoints import CheckpointError
from dflash_backend.checkpoints import hub as hub_module
from dflash_backend.checkpoints.files import weight_files
from dflash_backend.checkpoints.hub import DownloadProgress
from dflash_backend.config import EngineConfig, asset_path
from dflash_backend.drafters.resolve import resolve_target_dir

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LOAD = """
import sys
from dflash_backend.checkpoints import CheckpointError
from dflash_backend.drafters.resolve import resolve_target_dir
from dflash_backend.config import EngineConfig
config = EngineConfig.from_values({"target_model": "some/model", "draft_model": "", "target_revision": sys.argv[1]})
try:
    print("found", resolve_target_dir(config, lambda text: print(text, flush=True)))
except CheckpointError as error:
    print("refused", error)
"""


class Hub(BaseHTTPRequestHandler):
    """What the hub's client asks a hub for, of one model, slowly. `files` are its contents by name."""

    protocol_version = "HTTP/1.1"
    files: dict[str, bytes]
    asked: list[str]

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, with_body: bool) -> None:
        self.asked.append(self.path)
        parts = self.path.partition("?")[0].split("/")
        if self.path.startswith("/some/model/resolve/") and parts[4] in (COMMIT, "v1"):
            return self._file(self.files["/".join(parts[5:])], with_body)
        if self.path.startswith("/api/models/some/model/tree/") and parts[6] in (COMMIT, "v1"):
            return self._json([self._entry(name) for name in self.files])
        if self.path.startswith("/api/models/some/model/revision/") and parts[6] in (COMMIT, "v1"):
            return self._json({"id": "some/model", "sha": COMMIT, "siblings": [{"rfilename": n} for n in self.files]})
        self.send_response(404)
        self.send_header("X-Error-Code", "RevisionNotFound")
        self.send_header("X-Error-Message", "no such revision")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _entry(self, name: str) -> dict[str, object]:
        content = self.files[name]
        return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def _json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _file(self, content: bytes, with_body: bool) -> None:
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if with_body:
            for start in range(0, len(content), 1 << 20):
                self.wfile.write(content[start : start + (1 << 20)])
                self.wfile.flush()
                time.sleep(0.25)


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str]]]:
    """The address of a hub with the demo target, and what it was asked for."""
    target = asset_path("demo", "pair", "target")
    files = {path.name: path.read_bytes() for path in target.iterdir()}
    # Large enough for more than one line: the hub's client writes 10 MB at a time.
    files["more.safetensors"] = bytes(24 << 20)
    with serving(files) as served:
        yield served


@contextlib.contextmanager
def serving(files: dict[str, bytes]) -> Iterator[tuple[str, list[str]]]:
    """The address of a hub that has these files, and what it is asked for."""
    handler = type("Demo", (Hub,), {"files": files, "asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", handler.asked  # type: ignore[attr-defined]
        server.shutdown()


def load(hub: str, revision: str, cache: Path, offline: bool = False) -> list[str]:
    """The lines of a process that looks for the model; the hub's client reads its environment once."""
    environ = os.environ | {"HF_ENDPOINT": hub, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}
    environ |= {"HF_HUB_OFFLINE": "1"} if offline else {}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, revision], env=environ, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_download_tells_how_much_is_here_and_takes_the_revision_that_is_asked_for(
    hub: tuple[str, list[str]], tmp_path: Path
) -> None:
    url, asked = hub
    *progress, found = load(url, "v1", tmp_path)
    assert found.startswith("found ")
    assert COMMIT in found
    assert progress
    assert all(
        line.startswith("downloading some/model: ") and line.partition(" of ")[2][:2] == "29" for line in progress
    )
    assert any("MB/s, about" in line for line in progress), progress
    assert not any("/main" in path for path in asked), asked
    # What is here already is not told of.
    assert load(url, "v1", tmp_path) == [found]


def test_a_revision_that_is_not_there_is_named(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    (line,) = load(hub[0], "v2", tmp_path)
    assert line.startswith(
        "refused target_model is 'some/model': no such directory, and the hub gave no model of that id"
    )
    assert "in revision 'v2'" in line


def test_files_that_are_not_read_are_not_fetched(tmp_path: Path) -> None:
    """The hub's patterns match files in folders, and some repositories have their weights twice."""
    read = ["config.json", "model.safetensors", "additional_chat_templates/tools.jinja"]
    unread = ["original/model.safetensors", "original/config.json", "consolidated.safetensors"]
    with serving(dict.fromkeys(read + unread, b"{}")) as (url, asked):
        *_, found = load(url, "v1", tmp_path)
    snapshot = Path(found.removeprefix("found "))
    assert sorted(str(path.relative_to(snapshot)) for path in snapshot.rglob("*.*")) == sorted(read)
    assert not any(name in path for path in asked for name in ("original/", "consolidated"))


def test_offline_a_cache_that_lacks_files_is_taken_as_it_is(tmp_path: Path) -> None:
    with serving(dict.fromkeys(("config.json", "model.safetensors", "notes.txt"), b"{}")) as (url, _):
        *_, found = load(url, "v1", tmp_path)
    Path(found.removeprefix("found "), "notes.txt").unlink()
    said, again = load(url, "v1", tmp_path, offline=True)
    assert again == found
    assert "has not all of it and HF_HUB_OFFLINE is set" in said
    assert "notes.txt" in said
    # Without that setting nothing says that a download was not interrupted.
    (refused,) = load(url, "v1", tmp_path)
    assert "the hub is not reached; HF_HUB_OFFLINE=1 takes the files that are there" in refused


def test_a_repository_with_pickled_weights_alone_is_refused_as_such(tmp_path: Path) -> None:
    with serving(dict.fromkeys(("config.json", "pytorch_model.bin", "code/optimizer.pt"), b"{}")) as (url, asked):
        *_, found = load(url, "v1", tmp_path)
    assert not any("pytorch_model.bin" in path for path in asked)
    with pytest.raises(CheckpointError, match=r"has pickled weights only \(pytorch_model.bin\)"):
        weight_files(Path(found.removeprefix("found ")))


HTTP_ERROR = HfHubHTTPError.__bases__[0]  # of the library that the hub's client uses: no OSError
LOST = [
    HTTP_ERROR("peer closed the connection"),
    RuntimeError("of hf_xet"),
    ConnectionResetError("reset"),
    TimeoutError(),
]


def breaking(monkeypatch: pytest.MonkeyPatch, *outcomes: Exception | str) -> list[str]:
    """Have each attempt at a download end in one of these, without pauses; returns the names that were asked for."""
    asked: list[str] = []

    def snapshot(name: str, **_: object) -> str:
        asked.append(name)
        outcome = outcomes[min(len(asked), len(outcomes)) - 1]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(hub_module, "PAUSES_S", (0.0, 0.0, 0.0))
    return asked


@pytest.mark.parametrize("error", LOST, ids=lambda error: type(error).__name__)
def test_a_download_that_breaks_off_is_tried_again(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = breaking(monkeypatch, error, LocalEntryNotFoundError("not reached"), error, "/snapshot")
    assert hub_module._fetch("some/model", "", (said := []).append, ()) == Path("/snapshot")
    assert len(asked) == 4
    assert len(said) == 3
    assert all(line.startswith("downloading some/model: it broke off (") for line in said)


@pytest.mark.parametrize(
    "last", [*LOST, LocalEntryNotFoundError("not reached")], ids=lambda error: type(error).__name__
)
def test_one_that_breaks_off_each_time_is_an_error_that_says_what_to_do(
    last: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = breaking(monkeypatch, HTTP_ERROR("peer closed the connection"), last)
    with pytest.raises(CheckpointError, match="target_model is 'some/model': its download broke off .*; start again"):
        hub_module.from_hub("some/model", "target_model")
    assert len(asked) == 4


@pytest.mark.parametrize(
    "error",
    [
        LocalEntryNotFoundError("not reached"),
        OfflineModeIsEnabled("offline"),
        OSError("the disk is full"),
        ValueError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_another_attempt_does_not_change_is_not_tried_again(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = breaking(monkeypatch, error)
    with pytest.raises(CheckpointError, match="the hub gave no model of that id"):
        hub_module.from_hub("some/model", "target_model")
    assert len(asked) == 1


def test_target_and_drafter_each_have_their_own_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def snapshot(name: str, revision: str | None, **patterns: list[str]) -> str:
        asked[name] = revision
        return str(asset_path("demo", "pair", name.partition("/")[2]))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    models = {"target_model": "some/target", "draft_model": "other/draft"}
    for revisions in ({"target_revision": "v1", "draft_revision": "v2"}, {}):
        resolve_target_dir(EngineConfig.from_values({**models, **revisions}))
        assert asked == {
            "some/target": revisions.get("target_revision"),
            "other/draft": revisions.get("draft_revision"),
        }


@pytest.mark.parametrize("setting", ["target", "draft"])
def test_a_directory_has_no_revision(setting: str, tmp_path: Path) -> None:
    for part in ("target", "draft"):
        shutil.copytree(asset_path("demo", "pair", part), tmp_path / part)
    models = {"target_model": tmp_path / "target", "draft_model": tmp_path / "draft"}
    config = EngineConfig.from_values({**models, f"{setting}_revision": "v1"})
    with pytest.raises(CheckpointError, match=rf"{setting}_model is .*, a directory, which has no revision 'v1'"):
        resolve_target_dir(config)


def test_the_rate_and_what_is_left_are_those_of_the_last_while() -> None:
    progress = DownloadProgress("some/model", 16_400_000_000)
    assert progress.line(0.0, 0) == "downloading some/model: 0.00 of 16.40 GB"
    assert progress.line(2.0, 200_000_000) == ("downloading some/model: 0.20 of 16.40 GB, 100.0 MB/s, about 3 min left")
    for second in range(4, 60, 2):
        line = progress.line(second, 200_000_000)
    assert line == "downloading some/model: 0.20 of 16.40 GB"
