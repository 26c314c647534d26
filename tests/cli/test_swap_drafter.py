"""`dflash-triton swap-drafter`: what is sent, and what is refused before anything is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_cli.commands import swap_drafter
from dflash_cli.main import main
from dflash_client.errors import InvalidArgument


class Server:
    """A client that keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.error: Exception | None = None

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None: ...

    def swap_drafter(self, draft_model: str, admin_key: str, **options: Any) -> dict[str, Any]:
        self.asked.append((draft_model, admin_key, options))
        if self.error is not None:
            raise self.error
        return {"message": "it drafts now"}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    found = Server()
    monkeypatch.setattr(swap_drafter, "client_of", lambda arguments: found)
    monkeypatch.delenv("DFLASH_CLIENT_ADMIN_KEY", raising=False)
    return found


def test_a_folder_is_sent_whole_and_options_only_where_they_are_given(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "key").write_text(" k\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["swap-drafter", "d", "--admin-key-file", "key"]) == 0
    assert server.asked == [(str(tmp_path / "d"), "k", {"timeout_s": 600.0})]
    assert "it drafts now" in capsys.readouterr().err
    monkeypatch.setenv("DFLASH_CLIENT_ADMIN_KEY", "of the environment")
    options = ["--revision", "v2", "--window", "0", "--max-loss", "0.25", "--timeout", "9"]
    assert main(["swap-drafter", "org/name", *options]) == 0
    expected = {"draft_revision": "v2", "window": 0, "max_loss": 0.25, "timeout_s": 9.0}
    assert server.asked[1] == ("org/name", "of the environment", expected)
    (tmp_path / "d.gguf").write_text("GGUF", encoding="utf-8")
    assert main(["swap-drafter", "d.gguf"]) == 0
    assert server.asked[2][0] == str(tmp_path / "d.gguf")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --admin-key-file FILE, or set DFLASH_CLIENT_ADMIN_KEY"),
        (["--admin-key-file", "/none"], "--admin-key-file /none cannot be read"),
        (["--admin-key-file", "KEY", "--max-loss", "1.5"], "--max-loss is 1.5; allowed: a number from 0 to 1"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_sent(
    server: Server, tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "key").write_text("k", encoding="utf-8")
    given = [str(tmp_path / "key") if each == "KEY" else each for each in arguments]
    assert main(["swap-drafter", "d", *given]) == 2
    assert message in capsys.readouterr().err
    assert not server.asked


def test_the_servers_reason_is_shown(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DFLASH_CLIENT_ADMIN_KEY", "k")
    server.error = InvalidArgument("admin_key is not the one")
    assert main(["swap-drafter", "d"]) == 1
    assert "admin_key is not the one" in capsys.readouterr().err
