"""NCCL's functions as they are called: a library of our own stands in for it, and checks what it is given."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from dflash_backend.config import ConfigError
from dflash_backend.parallel import nccl
from dflash_backend.parallel.nccl import MIN_VERSION, Communicator, Nccl, NcclError, load_nccl

# The declarations are those of nccl.h; a "sum over ranks" doubles float32, and a gather repeats.
SOURCE = r"""
#include <stddef.h>
#include <string.h>
typedef struct { char internal[128]; } ncclUniqueId;
typedef struct comm { int rank, size, aborted; } *ncclComm_t;
static struct comm made;
int ncclGetVersion(int *version) { *version = VERSION; return VERSION == 0 ? 4 : 0; }
const char *ncclGetErrorString(int status) { return status == 5 ? "remote process exited" : "invalid argument"; }
int ncclGetUniqueId(ncclUniqueId *id) { for (int i = 0; i < 128; i++) id->internal[i] = (char)(i - 60); return 0; }
int ncclCommInitRank(ncclComm_t *comm, int size, ncclUniqueId id, int rank) {
  for (int i = 0; i < 128; i++) if (id.internal[i] != (char)(i - 60)) return 4;
  made.rank = rank; made.size = size; made.aborted = 0;
  *comm = &made;
  return 0;
}
static int wrong(ncclComm_t comm, void *stream) {
  if (made.aborted) __builtin_trap();  // memory that was given back
  return comm != &made || stream != (void *)7;
}
int ncclAllReduce(const void *in, void *out, size_t n, int type, int op, ncclComm_t comm, void *stream) {
  if (wrong(comm, stream) || in != out || op != 0 || type != 7) return 4;
  for (size_t i = 0; i < n; i++) ((float *)out)[i] *= made.size;
  return 0;
}
int ncclBroadcast(const void *in, void *out, size_t n, int type, int root, ncclComm_t comm, void *stream) {
  if (wrong(comm, stream) || in != out || root != 0 || type != 1) return 4;
  memset(out, 9, n);
  return 0;
}
int ncclAllGather(const void *in, void *out, size_t n, int type, ncclComm_t comm, void *stream) {
  if (wrong(comm, stream) || type != 1) return 4;
  for (int r = 0; r < made.size; r++) memcpy((char *)out + r * n, in, n);
  return 0;
}
int ncclCommAbort(ncclComm_t comm) { if (comm != &made) return 4; made.aborted = 1; return 0; }
"""


def build(folder: Path, version: int) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    source, library = folder / "nccl.c", folder / nccl.LIBRARY
    source.write_text(SOURCE)
    command = [compiler, f"-DVERSION={version}", "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    return library


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nccl"), 22703)


def test_collectives_give_nccl_their_tensors_on_the_current_stream(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "current_stream", lambda: 7)
    found = Nccl(str(library))
    group = Communicator(found, found.unique_id(), 1, 3)
    x = torch.arange(4.0)
    group.sum(x)
    assert x.tolist() == [0, 3, 6, 9]
    out = torch.empty(3, 4)
    group.all_gather(x, out)
    assert out.tolist() == [[0, 3, 6, 9]] * 3
    group.broadcast(data := torch.zeros(5, dtype=torch.uint8))
    assert data.tolist() == [9] * 5
    monkeypatch.setattr(nccl, "current_stream", lambda: 8)
    with pytest.raises(NcclError, match="ncclAllReduce: invalid argument .*NCCL_DEBUG"):
        group.sum(x)
    monkeypatch.setattr(nccl, "current_stream", lambda: 7)
    group.abort()
    for ask in (lambda: group.broadcast(data), lambda: group.sum(x), lambda: group.all_gather(x, out)):
        with pytest.raises(NcclError, match="the ranks' group was ended"):
            ask()


def test_an_id_of_another_group_is_nccls_to_refuse(library: Path) -> None:
    with pytest.raises(NcclError, match="ncclCommInitRank"):
        Communicator(Nccl(str(library)), bytes(128), 0, 2)


def test_the_library_is_found_and_one_that_is_missing_or_old_is_named(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "_paths", lambda: ["/nowhere/libnccl.so.2", str(library)])
    assert load_nccl().version() == 22703
    monkeypatch.setattr(nccl, "_paths", lambda: ["/nowhere/libnccl.so.2"])
    with pytest.raises(ConfigError, match="install a build of torch for CUDA, .*/nowhere/libnccl.so.2"):
        load_nccl()
    (tmp_path / "broken").mkdir()
    broken = build(tmp_path / "broken", 0)
    monkeypatch.setattr(nccl, "_paths", lambda: [str(broken), str(library)])
    assert load_nccl().version() == 22703
    old = build(tmp_path, 21304)
    monkeypatch.setattr(nccl, "_paths", lambda: [str(old)])
    with pytest.raises(ConfigError, match=f"is of version 21304, and {MIN_VERSION} or later"):
        load_nccl()


def test_the_library_of_a_package_comes_behind_the_one_that_torch_has_loaded() -> None:
    first, *others = nccl._paths()
    assert first == nccl.LIBRARY
    assert all(Path(path).name == nccl.LIBRARY for path in others)
