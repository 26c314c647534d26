"""Lines that are typed at a terminal, with the keys of a shell: arrows, history, Ctrl-R."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

HISTORY_LINES = 1000


def history_file() -> Path:
    """Where what was typed is kept: below `XDG_STATE_HOME`, else `~/.local/state`. Raises `RuntimeError` without a home
    directory."""
    state = os.environ.get("XDG_STATE_HOME", "")
    base = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return base / "dflash-triton" / "chat_history"


def typed_lines(prompt: str, keep_history: bool) -> Iterator[str]:
    """What is typed, line by line, until Ctrl-D. With `keep_history`, lines of earlier chats are there, and these stay
    for later ones, in a file that only its owner can read."""
    with _history(keep_history):
        while True:
            try:
                yield _line(prompt)
            except EOFError:
                print(file=sys.stderr)
                return


def _line(prompt: str) -> str:
    if sys.stdout.isatty():
        return input(prompt)
    # Answers go to a file or a pipe: the prompt must not go there too.
    print(prompt, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line


@contextlib.contextmanager
def _history(keep: bool) -> Iterator[None]:
    """Line editing, where this Python has it, and the history's file. A file that cannot be read or written only means
    that there is no history."""
    try:
        # `input` edits lines as soon as this is imported.
        import readline
    except ImportError:
        yield
        return
    readline.clear_history()
    readline.set_history_length(HISTORY_LINES)
    if not keep:
        yield
        return
    with contextlib.suppress(OSError, RuntimeError):
        readline.read_history_file(history_file())
    try:
        yield
    finally:
        with contextlib.suppress(OSError, RuntimeError):
            path = history_file()
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Made before anything is in it, so that no other user can read it at any time.
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
            path.chmod(0o600)
            readline.write_history_file(path)
            path.chmod(0o600)
