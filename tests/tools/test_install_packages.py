"""`tools/install_packages.py`: uv is told what pip is set to, and pip installs what uv does not; and `make setup`."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tools import install_packages
from tools.install_packages import UV, main, pip_options, uv_environ

ROOT = Path(__file__).resolve().parents[2]
LISTING = """\
:env:.find-links='/wheels /more'
global.index-url='https://example.org/simple'
global.extra-index-url='file:///one file:///two'
global.find-links='/old'
install.constraint='/etc/constraints.txt'
list.format='columns'
"""


class Commands:
    """Stands in for processes: notes each, and ends it with the status of the first word that it has."""

    def __init__(self, **statuses: int) -> None:
        self.statuses = statuses
        self.commands: list[list[str]] = []
        self.environ: dict[str, str] = {}

    def run(self, command: Sequence[str], env: dict[str, str] | None = None, **_: Any) -> SimpleNamespace:
        self.commands.append(list(command))
        self.environ = env or self.environ
        name = "get_uv" if UV in command else "uv" if Path(command[0]).name == "uv" else "pip"
        return SimpleNamespace(returncode=self.statuses.get(name, 0), stdout=LISTING if "config" in command else "")


@pytest.fixture
def python(tmp_path: Path) -> str:
    return str(tmp_path / "python")


def installing(commands: Commands) -> list[list[str]]:
    return [command for command in commands.commands if "config" not in command]


def test_what_pip_is_set_to_is_what_uv_is_told() -> None:
    options = pip_options(LISTING)
    environ = uv_environ(options, {"HOME": "/root", "UV_CONSTRAINT": "/mine.txt"})
    assert environ == {
        "UV_DEFAULT_INDEX": "https://example.org/simple",
        "UV_INDEX": "file:///one file:///two",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_CONSTRAINT": "/mine.txt",
        "HOME": "/root",
    }
    assert uv_environ(options, {})["UV_CONSTRAINT"] == "/etc/constraints.txt"
    certified = "global.cert='/ca.pem'\nglobal.trusted-host='one two'"
    assert uv_environ(pip_options(certified), {}) == {"SSL_CERT_FILE": "/ca.pem", "UV_INSECURE_HOST": "one two"}
    assert uv_environ(pip_options("global.no-index='true'"), {})["UV_NO_INDEX"] == "1"
    assert uv_environ(pip_options(""), {}) == {}


def test_uv_installs_alone_where_it_can(python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = Commands(pip=1)
    monkeypatch.setattr(install_packages, "subprocess", commands)
    assert main(python, ["-c", "pins.txt", "numpy"]) == 0
    get_uv, by_uv = installing(commands)
    assert get_uv[0] == python
    assert UV in get_uv
    assert by_uv[0] == str(Path(python).with_name("uv"))
    assert by_uv[-5:] == ["--python", python, "-c", "pins.txt", "numpy"]
    assert commands.environ["UV_INDEX"] == "file:///one file:///two"
    Path(python).with_name("uv").touch()
    assert main(python, ["numpy"]) == 0
    assert len(installing(commands)) == 3, "it is there already"


@pytest.mark.parametrize(("statuses", "count"), [({"get_uv": 1}, 2), ({"uv": 2}, 3)])
@pytest.mark.parametrize("status", [0, 1])
def test_pip_installs_what_uv_does_not(
    statuses: dict[str, int], count: int, status: int, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = Commands(**statuses, pip=status)
    monkeypatch.setattr(install_packages, "subprocess", commands)
    assert main(python, ["--no-deps", "numpy"]) == status
    assert len(installing(commands)) == count
    last = installing(commands)[-1]
    assert last[0] == python
    assert last[-4:] == ["-q", "--no-compile", "--no-deps", "numpy"]


def test_without_arguments_it_says_what_it_is_for() -> None:
    script = install_packages.__file__
    done = subprocess.run(["python3", script], capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 1
    assert "PYTHON ARGUMENT" in done.stderr


# Stands in for Python: an environment that it makes has no pip while the file `no-venv` is there, an installation is a
# line of `installed`, and torch's CPU build fails with what the file `failure` says.
PYTHON = """#!/bin/sh
case "$*" in
  "-m venv"*)
    mkdir -p .venv/bin
    cp "$0" .venv/bin/python
    test ! -e no-venv || { echo "ensurepip is not available" >&2; exit 1; }
    touch .venv/pip ;;
  "-m pip --version") test -e .venv/pip ;;
  *install_packages.py*)
    echo "$*" >> installed
    case "$*" in *+cpu) test ! -e failure || { cat failure >&2; exit 1; } ;; esac ;;
esac
"""
NO_SUCH_VERSION = "cause: Because there is no version of torch==2.13.0+cpu and you require torch==2.13.0+cpu"
CONFLICT = "ERROR: Cannot install torch==2.13.0+cpu because these package versions have conflicting dependencies."


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("pyproject.toml", "constraints-cpu.txt"):
        (tmp_path / name).touch()
    for name, text in (("python", PYTHON), ("nvidia-smi", "#!/bin/sh\nexit 1\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def make_setup(checkout: Path) -> subprocess.CompletedProcess[str]:
    """`make setup` with the Python and without the GPU of the folder `checkout`."""
    environ = os.environ | {"PATH": f"{checkout}:{os.environ['PATH']}", "MAKEFLAGS": ""}
    command = ["make", "-f", str(ROOT / "Makefile"), "setup", "PYTHON=./python", "TORCH_INDEX="]
    return subprocess.run(command, cwd=checkout, env=environ, capture_output=True, text=True, check=False)


def test_an_environment_without_pip_is_made_anew(checkout: Path) -> None:
    (checkout / "no-venv").touch()
    for _ in range(2):
        done = make_setup(checkout)
        assert done.returncode != 0
        assert "ensurepip is not available" in done.stderr
    assert not (checkout / "installed").exists()
    (checkout / "no-venv").unlink()
    assert make_setup(checkout).returncode == 0
    assert "torch==2.13.0+cpu" in (checkout / "installed").read_text()


@pytest.mark.parametrize(
    ("failure", "is_absent"),
    [
        (NO_SUCH_VERSION, True),
        (CONFLICT, True),
        ("error: Failed to fetch: `torch`\n" + CONFLICT, False),
        ("WARNING: Retrying (Retry(total=4))\n" + CONFLICT, False),
        ("ERROR: No space left on device", False),
        ("/usr/bin/python3: No module named pip", False),
    ],
)
def test_setup_takes_another_build_of_torch_only_where_the_index_has_no_cpu_build(
    failure: str, is_absent: bool, checkout: Path
) -> None:
    (checkout / "failure").write_text(failure)
    done = make_setup(checkout)
    assert (done.returncode == 0) == is_absent
    assert ("The package index has no CPU build" in done.stdout) == is_absent
    assert (failure in done.stderr) != is_absent
    assert ("torch==2.13.0\n" in (checkout / "installed").read_text()) == is_absent
