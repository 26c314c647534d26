"""Prompts and answers that are written down: what comes back, what the bound leaves, and what a full disk, a lost file
or a killed server costs."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dflash_backend import traffic
from dflash_backend.traffic import Row, TrafficError, TrafficWriter, read_traffic, target_digest
from tests.support.waiting import eventually

Counts = Counter[tuple[str, str]]
Make = Callable[..., tuple[TrafficWriter, Counts, list[str]]]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text('{"model": 1}')
    (folder / "model.safetensors").write_bytes(bytes(3 << 20))
    return folder


@pytest.fixture
def make(target: Path, tmp_path: Path) -> Make:
    """Makes a writer, which says what it counts and warns of. Its folder is `traffic`."""

    def make(max_bytes: int = 1_000_000, rate: float = 1.0, **names: Path) -> tuple[TrafficWriter, Counts, list[str]]:
        counts: Counts = Counter()
        said: list[str] = []

        def count(name: str, amount: float, label: str) -> None:
            counts[name, label] += int(amount)

        folder = names.get("folder", tmp_path / "traffic")
        return TrafficWriter(folder, target, rate, max_bytes, count, said.append), counts, said

    return make


def row(number: int, length: int = 10) -> Row:
    return Row([number] * length, [number, 2], 0.5)


def numbers(folder: Path, target: Path) -> list[int]:
    return [prompt[0] for prompt, _ in read_traffic(folder, target)]


def test_rows_come_back_and_only_their_owner_reads_them(make: Make, target: Path, tmp_path: Path) -> None:
    writer, counts, said = make()
    for number in (1, 2):
        writer.offer(row(number, 2))
    writer.close()
    (file,) = (tmp_path / "traffic").iterdir()
    assert read_traffic(tmp_path / "traffic", target) == [((1, 1), (1, 2)), ((2, 2), (2, 2))]
    assert [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "traffic", file)] == [0o700, 0o600]
    assert [line["temperature"] for line in map(msgspec.json.decode, file.read_bytes().splitlines()[1:])] == [0.5, 0.5]
    header = file.read_bytes().index(b"\n") + 1
    assert counts == {(traffic.RECORDED, ""): 2, (traffic.RECORDED_BYTES, ""): file.stat().st_size - header}
    assert said == []


def test_the_rate_is_the_share_that_is_wanted(make: Make) -> None:
    writer, _, _ = make(rate=0.25)
    writer._random.seed(0)
    assert sum(writer.wants() for _ in range(4000)) == pytest.approx(1000, abs=100)
    writer.close()


def test_the_oldest_files_go_for_the_bound(make: Make, target: Path, tmp_path: Path) -> None:
    folder, most = tmp_path / "traffic", 20_000
    folder.mkdir()
    (folder / "traffic-20000101-000000-1-0-000001.jsonl").write_bytes(b"x" * 15_000)  # another server's
    (folder / "notes.txt").write_bytes(b"x" * 50_000)
    writer, counts, _ = make(max_bytes=most)
    for number in range(500):
        writer._write(row(number))
        if number % 50 == 0:
            assert sum(path.stat().st_size for path in folder.glob("*.jsonl")) <= most
    writer._write(row(5, 20_000))  # more than all files may have
    writer.close()
    files = sorted(folder.glob("*.jsonl"))
    assert 10 <= len(files) <= 20
    left = numbers(folder, target)
    assert left == list(range(500 - len(left), 500))
    assert sum(path.stat().st_size for path in files) > 0.8 * most
    assert (folder / "notes.txt").exists()
    assert counts[traffic.RECORDED, ""] == 500
    assert counts[traffic.DROPPED, traffic.LARGE] == 1


def test_a_full_disk_costs_rows_and_leaves_no_half_line(
    make: Make, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, counts, said = make()
    now, full, real = [100.0], [False], os.write
    monkeypatch.setattr(traffic.time, "monotonic", lambda: now[0])

    def write(file: int, data: bytes) -> int:
        if not full[0]:
            return real(file, data)
        real(file, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(traffic.os, "write", write)
    writer._write(row(1))
    full[0] = True
    for number in (2, 3):  # the second is not tried
        writer._write(row(number))
    now[0] += traffic.RETRY_S
    writer._write(row(4))
    full[0] = False
    writer._write(row(5))
    now[0] += traffic.RETRY_S
    writer._write(row(6))
    writer.close()
    folder = tmp_path / "traffic"
    assert all(path.read_bytes().endswith(b"}\n") for path in folder.iterdir())
    assert numbers(folder, target) == [1, 6]
    assert counts[traffic.DROPPED, traffic.DISK] == 4
    assert len(said) == 2
    assert "cannot be written: No space left on device; answers are not written down meanwhile" in said[0]
    assert said[1] == "record_traffic: answers are written down again"


def test_a_folder_that_cannot_be_written_is_refused(make: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    inside = tmp_path / "file" / "in it"
    for folder, why in (
        (tmp_path / "file", "is a file; name a folder"),
        (
            inside,
            "cannot be written: Not a directory; name a folder that the server may write to, or leave it empty",
        ),
    ):
        with pytest.raises(TrafficError) as error:
            make(folder=folder)
        assert str(error.value) == f"{folder} {why}"


def test_a_file_that_was_taken_away_is_followed_by_another(make: Make, target: Path, tmp_path: Path) -> None:
    writer, _, said = make()
    writer._write(row(1))
    (file,) = (tmp_path / "traffic").iterdir()
    file.unlink()
    writer._write(row(2))
    writer.close()
    assert numbers(tmp_path / "traffic", target) == [2]
    assert said == []


def test_an_offer_never_waits_for_the_disk(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, counts, _ = make()
    go, inside = threading.Event(), threading.Event()

    def append(line: bytes) -> bool:
        inside.set()
        return go.wait(30)

    monkeypatch.setattr(writer, "_append", append)
    writer.offer(row(0))
    assert inside.wait(30)
    for number in range(traffic.MAX_WAITING + 7):
        writer.offer(row(number))
    assert counts == {(traffic.DROPPED, traffic.BUSY): 7}
    go.set()
    writer.close()
    assert counts[traffic.RECORDED, ""] == traffic.MAX_WAITING + 1


def test_a_server_that_is_killed_leaves_whole_rows(target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "traffic"
    code = (
        "import sys; from pathlib import Path; from dflash_backend.traffic import Row, TrafficWriter\n"
        "writer = TrafficWriter(Path(sys.argv[1]), Path(sys.argv[2]), 1.0, 10**9, lambda *_: None, print)\n"
        "while True: writer._write(Row([7] * 5000, [7, 2], 0.0))"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(folder), str(target)]) as process:
        eventually(lambda: sum(path.stat().st_size for path in folder.glob("*.jsonl")) > 100_000)
        process.send_signal(signal.SIGKILL)
    (file,) = folder.iterdir()
    with file.open("ab") as opened:  # what a machine may leave
        opened.write(b'{"prompt":[7,7')
    num_rows = file.read_bytes().count(b"\n") - 1
    assert num_rows > 5
    assert read_traffic(folder, target) == [((7,) * 5000, (7, 2))] * num_rows


def test_answers_are_those_of_the_very_target(make: Make, target: Path, tmp_path: Path) -> None:
    writer, _, _ = make()
    writer._write(row(1, 2))
    writer.close()
    folder = tmp_path / "traffic"
    before = target_digest(target)
    with (target / "model.safetensors").open("r+b") as weights:  # as a fine-tune differs
        weights.seek(1_500_000)
        weights.write(b"\1" * 100_000)
    assert target_digest(target) != before
    assert read_traffic(folder, target) == [((1, 1), ())]
    (target / "tokenizer.json").write_text('{"model": 2}')
    with pytest.raises(TrafficError, match=r"no prompt of this target's tokenizer; 1 files are of another one"):
        read_traffic(folder, target)


def test_what_is_no_traffic_is_said(make: Make, target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "traffic"
    with pytest.raises(TrafficError, match=r"traffic is no folder; name the one of a server's setting record_traffic"):
        read_traffic(folder, target)
    writer, _, _ = make()
    with pytest.raises(TrafficError, match=r"holds no prompt; a server writes there with record_traffic="):
        read_traffic(folder, target)
    writer._write(row(1))
    writer.close()
    (file,) = folder.iterdir()
    os.mkfifo(folder / "traffic-pipe.jsonl")  # is no file of ours, and nobody waits for it
    nested = b'{"other":' + b"[" * 100_000
    for line in (b'{"prompt":[1,"x"],"answer":[2],"temperature":0}', b"{", b"", nested):
        damaged = file.read_bytes() + line + b"\n"
        copy = folder / "traffic-damaged.jsonl"
        copy.write_bytes(damaged)
        with pytest.raises(TrafficError) as error:
            read_traffic(folder, target)
        assert f"{copy}, line 3, is damaged (" in str(error.value)


def test_a_gguf_file_is_a_target_too(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    before: Any = target_digest(file)
    moved = file.rename(tmp_path / "renamed.gguf")
    assert target_digest(moved) == before
    moved.write_bytes(b"GGUF" + bytes(99) + b"\1")
    assert target_digest(moved) != before


def test_a_converted_gguf_file_is_the_same_target_wherever_it_lay(tmp_path: Path) -> None:
    """As it is served: the folder that it was converted to."""
    folder = tmp_path / "converted"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(100))

    def digest(file: str, **fields: Any) -> str:
        config = {"model_type": "llama", **fields, "gguf": {"file": file, "notes": []}}
        (folder / "config.json").write_text(json.dumps(config))
        return target_digest(folder)

    assert digest("/models/x.gguf") == digest("/home/me/x.gguf")
    assert digest("/models/x.gguf") != digest("/models/x.gguf", num_hidden_layers=3)
