"""Builds the image of a Dockerfile and runs it, with Linux's namespaces in place of a container engine.

The instructions run as they stand: COPY, RUN, ENV, USER, WORKDIR, VOLUME, ENTRYPOINT, CMD, HEALTHCHECK. What stands in:

- for NVIDIA's image: this machine's /usr, /bin, /lib and /etc, a fresh Python environment with all that `make setup`
  has installed but the project, so with pip, torch, the dependencies and the `tritonserver` 2.51 of nvidia-pytriton,
  and an `nvidia_entrypoint.sh` that only starts its command;
- for a package index: nothing. pip finds installed what it would fetch, or fails; the build system of the wheel is
  installed, so nothing is fetched for it either;
- for a container engine: mount, process and network namespaces and `chroot`, root in them being root outside. The
  server has no capability, can gain none, and cannot write but where the deploy files mount something.

Neither the checkout nor the home of who runs this is there. Needs root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.docker.dockerfile import Instruction, Stage
from tests.support.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc")
SITE = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
PYTHON = "/opt/python"
PACKAGES = "/opt/packages"
ENTRYPOINT = '#!/bin/sh\nexec "$@"\n'
PIP = f'#!/bin/sh\nexec {PYTHON}/bin/python -m pip "$@"\n'
# No index, and no build environment of its own, for which pip would fetch the build system (the variable says the
# opposite of its name).
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
# As compose.yaml and the chart have it.
CONFINED = ("--no-new-privs", "--bounding-set=-all", "--inh-caps=-all")
LOOPBACK_UP = """
import fcntl, socket, struct
with socket.socket() as any_socket:
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH14x", b"lo", 0x41))  # SIOCSIFFLAGS: up, running
"""


def can_run() -> bool:
    """Whether this machine lets us make namespaces and mount in them."""
    command = [
        "unshare",
        "--mount",
        "--pid",
        "--net",
        "--fork",
        "sh",
        "-c",
        "mount -t tmpfs none /mnt && chroot / true",
    ]
    return os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0


class Namespaces:
    """Mount, process and network namespaces, whose first process sleeps; all end with it."""

    def __init__(self, holder: subprocess.Popen[bytes]) -> None:
        self._holder = holder
        children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children")
        self.pid = eventually(lambda: int((children.read_text().split() or ["0"])[0]), "the first process")

    def path(self, inside: Path) -> Path:
        """The path by which this process reaches a file of theirs."""
        return Path(f"/proc/{self.pid}/root{inside}")

    def command(self, words: Sequence[str]) -> list[str]:
        """What runs `words` in them."""
        return ["nsenter", f"--target={self.pid}", "--mount", "--pid", "--net", *words]

    def run(self, *words: str) -> None:
        """Run it. Raises `AssertionError` with what it printed when it fails."""
        done = subprocess.run(self.command(words), capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}{done.stderr}"


@contextmanager
def namespaces() -> Iterator[Namespaces]:
    """New ones, with a loopback interface."""
    unshare = ["unshare", "--mount", "--pid", "--net", "--fork", "--kill-child", "--propagation=private"]
    holder = subprocess.Popen([*unshare, "sleep", "infinity"])
    try:
        made = Namespaces(holder)
        made.run(sys.executable, "-c", LOOPBACK_UP)
        yield made
    finally:
        holder.kill()
        holder.wait()


class Image:
    """The file system of one stage, at `root` inside the namespaces."""

    def __init__(self, inside: Namespaces, root: Path) -> None:
        self._inside, self.root = inside, root
        self.environ = {"PATH": f"{PYTHON}/bin:/usr/local/bin:/usr/bin:/bin", "HOME": "/root"}
        self.directory, self.user = "/", "0:0"
        self._base()

    def path(self, path: str) -> Path:
        """By which this process reaches a file of the image."""
        return self._inside.path(self.root / path.lstrip("/"))

    def _base(self) -> None:
        """What NVIDIA's image would bring."""
        run, root = self._inside.run, self.root
        run("mount", "-t", "tmpfs", "-o", "mode=755", "none", str(root))
        for name in SYSTEM:
            source = Path("/", name)
            if source.is_symlink():
                self.path(name).symlink_to(os.readlink(source))
            elif source.is_dir():
                self._bind(source, f"/{name}")
        for name in ("proc", "sys", "dev", "tmp"):
            self.path(name).mkdir()
        run("mount", "-t", "proc", "none", f"{root}/proc")
        run("mount", "--rbind", "/sys", f"{root}/sys")
        run("mount", "--rbind", "/dev", f"{root}/dev")
        run("mount", "-t", "tmpfs", "-o", "mode=1777,size=1g", "none", f"{root}/dev/shm")
        run("mount", "-t", "tmpfs", "-o", "mode=1777", "none", f"{root}/tmp")
        base = Path(sys.base_prefix)
        if not base.is_relative_to("/usr"):
            self._bind(base, str(base))
        self._program("/opt/nvidia/nvidia_entrypoint.sh", ENTRYPOINT)
        self._python(base / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}")

    def _python(self, base: Path) -> None:
        """An environment that has what ours has installed, but for the project."""
        self.run("/", [str(base), "-m", "venv", "--without-pip", PYTHON])
        packages = Path(sys.prefix) / SITE
        self._bind(packages, PACKAGES)
        for entry in packages.iterdir():
            ours = entry.name.startswith(("dflash_", "_dflash_"))
            if not ours and entry.suffix != ".pth" and entry.name != "__pycache__":
                self.path(f"{PYTHON}/{SITE}/{entry.name}").symlink_to(f"{PACKAGES}/{entry.name}")
        self._program(f"{PYTHON}/bin/pip3", PIP)

    def _program(self, path: str, text: str) -> None:
        file = self.path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)

    def _bind(self, source: Path, target: str, mode: str = "ro") -> None:
        self.path(target).mkdir(parents=True, exist_ok=True)
        self._inside.run("mount", "--bind", str(source), f"{self.root}{target}")
        self._inside.run("mount", "-o", f"remount,bind,{mode}", f"{self.root}{target}")

    def command(
        self, directory: str, words: Sequence[str], environ: dict[str, str], options: Sequence[str] = ()
    ) -> list[str]:
        """What runs `words` in it as its user."""
        variables = [f"{name}={value}" for name, value in environ.items()]
        user, _, group = self.user.partition(":")
        drop = ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", *options]
        into = ["chroot", str(self.root), "env", "--ignore-environment", f"--chdir={directory}", *variables]
        return self._inside.command([*into, *drop, *words])

    def run(self, directory: str, words: Sequence[str], environ: dict[str, str] | None = None) -> None:
        """Raises `AssertionError` with what it printed when it fails."""
        command = self.command(directory, words, environ or self.environ)
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"

    def build(self, stage: Stage, others: dict[str, Image]) -> None:
        """Carry out the instructions of a stage that change the file system or what comes after them."""
        arguments: dict[str, str] = {}
        for one in stage.instructions:
            if one.name == "ARG":
                arguments |= one.assignments
            elif one.name == "ENV":
                self.environ |= one.assignments
            elif one.name == "WORKDIR":
                self.directory = one.text
                self.path(one.text).mkdir(parents=True, exist_ok=True)
            elif one.name == "USER":
                self.user = one.text
            elif one.name == "COPY":
                self._copy(one)
            elif one.name == "RUN":
                with self._mounted(one, others):
                    self.run(self.directory, ["/bin/sh", "-c", one.text], self.environ | arguments | OFFLINE)
            elif one.name == "VOLUME":
                self._bind(self.root / one.text.lstrip("/"), one.text, "rw")

    def _copy(self, one: Instruction) -> None:
        """From the checkout, as .dockerignore lets it: whole folders but their bytecode."""
        *sources, target = one.words
        folder = self.path(f"{self.directory}/{target}" if not target.startswith("/") else target)
        for name in sources:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
            else:
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, folder)

    @contextmanager
    def _mounted(self, one: Instruction, others: dict[str, Image]) -> Iterator[None]:
        if "mount" not in one.flags:
            yield
            return
        mount = dict(part.split("=") for part in one.flags["mount"].split(","))
        assert mount["type"] == "bind"
        self._bind(others[mount["from"]].root / mount["source"].lstrip("/"), mount["target"])
        yield
        self._inside.run("umount", f"{self.root}{mount['target']}")
        self.path(mount["target"]).rmdir()

    def seal(self) -> None:
        """Make its root read-only; volumes, /tmp and /dev/shm are mounts of their own."""
        self._inside.run("mount", "-o", "remount,bind,ro", str(self.root))


class Container:
    """One run of the image, whose last stage is `stage`, with `arguments` in place of its CMD where they are given."""

    def __init__(self, image: Image, stage: Stage, log: Path, arguments: Sequence[str] | None = None) -> None:
        self._image = image
        self._check = stage.last("HEALTHCHECK").words
        words = [*stage.last("ENTRYPOINT").words, *(stage.last("CMD").words if arguments is None else arguments)]
        self.log = log
        with log.open("wb") as said:
            self._process = subprocess.Popen(self._command(words), stdout=said, stderr=said)

    def _command(self, words: Sequence[str]) -> list[str]:
        return self._image.command(self._image.directory, words, self._image.environ, CONFINED)

    def output(self, *words: str) -> str:
        """What a command in it prints, as `docker exec` would run it."""
        return subprocess.run(self._command(words), capture_output=True, text=True).stdout

    def health(self) -> int:
        """The exit status of the health check: 0 where it is healthy, else 1."""
        return subprocess.run(self._command(self._check), capture_output=True).returncode

    def status(self, path: str, port: int, scheme: str) -> int:
        """The status of a GET that the kubelet would send, 0 where nothing answers."""
        url = f"{scheme.lower()}://127.0.0.1:{port}{path}"
        curl = ("curl", "-s", "--insecure", "--output", "/dev/null", "--write-out", "%{http_code}", url)
        return int(self.output(*curl))

    def processes(self) -> list[psutil.Process]:
        """All of it, the first one first, with their numbers outside."""
        (first,) = psutil.Process(self._process.pid).children()
        return [first, *first.children(recursive=True)]

    def with_word(self, word: str) -> list[psutil.Process]:
        """Those whose command line has this word."""
        found = []
        for process in self.processes():
            with suppress(psutil.Error):
                found += [process] if any(word in argument for argument in process.cmdline()) else []
        return found

    def wait_until_healthy(self, within_s: float = 120) -> None:
        """Raises `AssertionError` with the last of its log when it ends or takes longer."""
        try:
            eventually(lambda: self._process.poll() is not None or self.health() == 0, "healthy", within_s)
            assert self._process.poll() is None, "it has ended"
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log.read_text(errors='replace')[-3000:]}") from None

    def stop(self) -> int:
        """Stop it as `docker stop` does; its exit status."""
        self.processes()[0].terminate()
        return self._process.wait(60)

    def kill(self) -> None:
        """End all of it at once, as the kernel does when a container is killed."""
        for process in self.processes():
            process.suspend()
        for process in self.processes():
            process.kill()
        # nsenter stops with its child.
        psutil.Process(self._process.pid).resume()
        self._process.wait(10)


def build(inside: Namespaces, stages: list[Stage], folder: Path) -> Image:
    """The image of the last stage, sealed. Raises `AssertionError` with what a step of it printed when it fails."""
    built: dict[str, Image] = {}
    for number, stage in enumerate(stages):
        root = folder / f"stage-{number}"
        root.mkdir()
        image = Image(inside, root)
        image.build(stage, built)
        built[stage.name or str(number)] = image
    image.seal()
    return image
