"""Models from the hub: a snapshot of the files that we read, and how its download goes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dflash_backend.checkpoints.files import READ_PATTERNS, UNREAD_PATTERNS, part_of_bytes
from dflash_backend.checkpoints.spec import CheckpointError
from dflash_backend.error_text import first_line

# Seconds between two reports on a download.
REPORT_S = 2.0
# Seconds before each further attempt at a download that broke off.
PAUSES_S = (1.0, 4.0, 16.0)
INCOMPLETE = ".incomplete"

Report = Callable[[str], None]


def from_hub(
    name: str,
    setting: str,
    revision: str = "",
    report: Report | None = None,
    patterns: tuple[str, ...] = READ_PATTERNS,
) -> Path:
    """The snapshot of a model, fetched or, without the network, what the local cache has. `revision` is a branch, a tag
    or a commit, by default the main branch. `report` gets a line every few seconds while files are fetched. patterns:
    of the names of the files. A download that breaks off is tried again a few times. Raises `CheckpointError`."""
    try:
        with _reported(name, revision, report, patterns):
            return _fetch(name, revision, report or (lambda text: None), patterns)
    except _hub_errors() as error:
        of = f" in revision '{revision}'" if revision else ""
        if _broke_off(error):
            raise CheckpointError(
                f"{setting} is '{name}': its download{of} broke off ({first_line(error)}); start again to go on: files "
                "that are complete are kept"
            ) from None
        raise CheckpointError(
            f"{setting} is '{name}': no such directory, and the hub gave no model of that id{of} "
            f"({_reason(error)}); check the name, or download the model and give its directory or file"
        ) from None


def _fetch(name: str, revision: str, report: Report, patterns: tuple[str, ...]) -> Path:
    """Download what the cache lacks; with `HF_HUB_OFFLINE` take what it has, which those who read the files check."""
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import LocalEntryNotFoundError

    broken: Exception | None = None
    for pause in (*PAUSES_S, None):
        try:
            return Path(_snapshot(name, revision, patterns))
        except LocalEntryNotFoundError as error:
            found = _incomplete_snapshot(error)
            if HF_HUB_OFFLINE and found is not None:
                report(f"{name}: the local cache has not all of it and HF_HUB_OFFLINE is set: {first_line(error)}")
                return found
            # Once a connection is lost, the hub may be out of reach for a while.
            if broken is None:
                raise
            if pause is None:
                raise broken from None
        except _hub_errors() as error:
            if pause is None or not _broke_off(error):
                raise
            broken = error
        report(f"downloading {name}: it broke off ({first_line(broken)}); trying again in {pause:.0f} s")
        time.sleep(pause)
    raise AssertionError  # the last attempt returns or raises


def _snapshot(name: str, revision: str, patterns: tuple[str, ...], **options: Any) -> Any:
    from huggingface_hub import snapshot_download

    return snapshot_download(
        name,
        revision=revision or None,
        allow_patterns=list(patterns),
        ignore_patterns=list(UNREAD_PATTERNS),
        **options,
    )


def _hub_errors() -> tuple[type[Exception], ...]:
    """What a download raises: `ValueError` for a name that is no id, `RuntimeError` by hf_xet, and the errors of the
    HTTP library that the hub's client uses, which are bases of its own error."""
    from huggingface_hub.errors import HfHubHTTPError

    bases = tuple(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception))
    return (OSError, ValueError, RuntimeError, *bases)


def _broke_off(error: Exception) -> bool:
    """Whether another attempt may do: an error of a connection, thus of the HTTP library and no answer of the hub's, or
    one of hf_xet."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    if isinstance(error, OSError):
        return isinstance(error, ConnectionError | TimeoutError) and not isinstance(error, OfflineModeIsEnabled)
    return not isinstance(error, ValueError)


def _incomplete_snapshot(error: Exception) -> Path | None:
    """What the cache has of a model of which it lacks files, which only newer libraries say."""
    found = getattr(error, "snapshot_path", None)
    return None if found is None else Path(found)


def _reason(error: Exception) -> str:
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import LocalEntryNotFoundError

    if not isinstance(error, LocalEntryNotFoundError):
        return first_line(error)
    cause = "HF_HUB_OFFLINE is set" if HF_HUB_OFFLINE else "the hub is not reached"
    instead = "" if _incomplete_snapshot(error) is None else "; HF_HUB_OFFLINE=1 takes the files that are there"
    return f"the local cache has not all of it, and {cause}{instead}"


class DownloadProgress:
    """Turns bytes that have arrived into lines. The rate is that of the last half minute or so."""

    def __init__(self, name: str, total: int) -> None:
        """`total`: bytes of all files."""
        self._name, self._total = name, total
        self._seen: list[tuple[float, int]] = []

    def line(self, now: float, have: int) -> str:
        """What to say at `now` (seconds of a clock that only grows), with `have` bytes here."""
        self._seen = [*self._seen[-15:], (now, have)]
        then, had = self._seen[0]
        rate = (have - had) / (now - then) if now > then else 0.0
        text = f"downloading {self._name}: {part_of_bytes(have, self._total)}"
        if rate <= 0:
            return text
        return f"{text}, {rate / 1e6:.1f} MB/s, about {_duration((self._total - have) / rate)} left"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextlib.contextmanager
def _reported(name: str, revision: str, report: Report | None, patterns: tuple[str, ...]) -> Iterator[None]:
    """While the block runs, a thread reports how much has arrived."""
    if report is None:
        yield
        return
    ended = threading.Event()
    arguments = (name, revision, report, ended, patterns)
    thread = threading.Thread(target=_follow, args=arguments, name="hub-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        # Not joined: it may be waiting for the hub, and reports nothing any more.
        ended.set()


def _follow(name: str, revision: str, report: Report, ended: threading.Event, patterns: tuple[str, ...]) -> None:
    total = _bytes_to_fetch(name, revision, patterns)
    before = _bytes_here(name, whole_files_only=True)
    if not total:
        return
    progress = DownloadProgress(name, total)
    while not ended.is_set():
        report(progress.line(time.monotonic(), min(_bytes_here(name) - before, total)))
        ended.wait(REPORT_S)


def _bytes_to_fetch(name: str, revision: str, patterns: tuple[str, ...]) -> int:
    """What the cache lacks; 0 also when the hub does not answer, since the download then fails with the reason."""
    errors: tuple[type[Exception], ...] = (TypeError, *_hub_errors())  # TypeError: an older library
    try:
        files = _snapshot(name, revision, patterns, dry_run=True)
    except errors:
        return 0
    return sum(int(file.file_size or 0) for file in files if file.will_download)


def _bytes_here(name: str, whole_files_only: bool = False) -> int:
    """Bytes of a model's files in the cache, those of parts too."""
    from huggingface_hub.constants import HF_HUB_CACHE

    blobs = Path(HF_HUB_CACHE).expanduser() / f"models--{name.replace('/', '--')}" / "blobs"
    have = 0
    for path in blobs.glob("*"):
        with contextlib.suppress(OSError):
            stat = path.stat()
            if path.suffix != INCOMPLETE:
                have += stat.st_size
            elif not whole_files_only:
                # The file may have its full size long before its bytes are here.
                have += min(stat.st_size, stat.st_blocks * 512)
    return have
