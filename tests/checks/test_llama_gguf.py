"""What the comparison of a pair in GGUF with llama.cpp takes for equal, on made-up answers."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checks import llama_gguf
from checks.exit_status import SKIPPED
from checks.smollm2 import Outcome

END = 9
OURS = [[1, 2, END, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("of_gguf", "counts", "theirs", "missed"),
    [
        (OURS, 1, [[1, 2, 8, 8], [4, 5, 6, 7]], []),  # llama.cpp bars the end
        (OURS, 1, [[1, 8, 8, 8], [4, 5, 6, 7]], ["answers of llama.cpp with"]),
        (OURS, 1, [[1, 2, END, 3], [4, 5, 6]], ["answers of llama.cpp with"]),
        ([[1, 2, END, 4], OURS[1]], 1, OURS, ["answers of 4 tokens"]),
        (OURS, 2, OURS, ["counts of drafts"]),
    ],
)
def test_texts_count_up_to_their_end(
    of_gguf: list[list[int]], counts: int, theirs: list[list[int]], missed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ours(target: Path, drafter: Path, *_: Any) -> Any:
        is_file = target.suffix == ".gguf"
        return of_gguf if is_file else OURS, SimpleNamespace(acceptance_length=1.0 * (counts if is_file else 1)), {END}

    stand_ins = {
        "our_answers": ours,
        "llama_answers": lambda context, pair, drafts, *_: theirs if drafts == llama_gguf.DFLASH else OURS,
        "prompts": lambda *_: [[0], [0]],
        "target_file": lambda *_: Path("t.gguf"),
        "drafter_file": lambda *_: Path("d.gguf"),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(llama_gguf, name, stand_in)
    outcome, pair = Outcome([], []), SimpleNamespace(target=Path("t"), drafter=Path("d"))
    llama_gguf.compare(SimpleNamespace(peers=Path(), folder=Path()), pair, 2, 4, outcome)  # type: ignore[arg-type]
    assert len(outcome.lines) == 4
    assert [miss[: len(words)] for miss, words in zip(outcome.misses, missed, strict=True)] == missed


def test_answers_come_in_one_piece(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """llama.cpp's streams leave out tokens that end within a character."""
    server = """
import http.server, json
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200); self.end_headers()
        tokens = [*asked["prompt"], asked["n_predict"]] if asked["return_tokens"] and not asked["stream"] else []
        self.wfile.write(json.dumps({"tokens": tokens}).encode())
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", PORT), Answers).serve_forever()
"""
    with socket.socket() as free:
        free.bind((llama_gguf.HOST, 0))
        port = free.getsockname()[1]
    settings = {
        "command": [sys.executable, "-c", server.replace("PORT", str(port))], "env": {}, "log": str(tmp_path / "log"),
        "port": port, "health": "/health", "path": "/completion", "api": "llama",
    }  # fmt: skip
    monkeypatch.setattr(llama_gguf, "LLAMA", SimpleNamespace(settings=lambda *_: settings))
    answers = llama_gguf.llama_answers(SimpleNamespace(), SimpleNamespace(), "", [[1, 2], [3]], 5)  # type: ignore[arg-type]
    assert answers == [[1, 2, 5], [3, 5]]


def test_without_llama_cpp_it_is_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.argv", ["llama_gguf", "--peers", str(tmp_path)])
    assert llama_gguf.main() == SKIPPED
    assert "skipped: llama.cpp is not installed: there is no" in capsys.readouterr().out
    server = tmp_path / "llama.cpp" / "amx" / "llama-server"
    server.parent.mkdir(parents=True)
    server.touch()
    monkeypatch.setattr(llama_gguf, "LLAMA", SimpleNamespace(missing=lambda *_: "the pair has no drafter"))
    assert llama_gguf.main() == 1
    assert "failed: the pair has no drafter" in capsys.readouterr().out
