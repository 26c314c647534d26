"""The image without a container engine: what its Dockerfile says is built, serves, and tells its health.

Its lines run as they stand, as user 1000, without the checkout, on a root that nobody can write to. What stands in for
NVIDIA's image, a package index and a container engine is in container.py: a real build has to show the rest.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
import yaml

from tests.cli.test_security_options import pkcs8
from tests.deploy.test_chart import PROBES, RUNTIME, probed
from tests.docker.container import ROOT, Container, Image, build, can_run, namespaces
from tests.docker.dockerfile import Stage, read_dockerfile

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.server,
    pytest.mark.skipif(not can_run(), reason="may not make namespaces"),
]

WITHIN_S = 1.0
QUESTION = "Sam fills 4 bags with 6 marbles each and gives away 7 marbles. How many marbles does Sam keep?"
ANSWER = "Answer: 17"
KEY = "an-example-key-of-32-characters-a"
ENGINE = "dflash_backend.engine.process"
FRONT_END = "--heartbeat-fd"
(RUNTIME_CONTAINER,) = yaml.safe_load(RUNTIME.read_text(encoding="utf-8"))["spec"]["containers"]
# What Kubernetes asks, as the files say it: path, port and scheme by probe.
ASKED = probed(RUNTIME_CONTAINER)


@pytest.fixture(scope="module")
def stage() -> Stage:
    """That of the image, the last one."""
    return read_dockerfile(ROOT / "docker" / "Dockerfile")[-1]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    with namespaces() as inside:
        stages = read_dockerfile(ROOT / "docker" / "Dockerfile")
        yield build(inside, stages, tmp_path_factory.mktemp("image"))


@pytest.fixture(scope="module")
def container(image: Image, stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    """One that serves with the image's own command."""
    container = Container(image, stage, tmp_path_factory.mktemp("container") / "log")
    assert container.health() == 1, "it loads"
    container.wait_until_healthy()
    yield container
    assert container.stop() == 0
    assert container.health() == 1
    assert container.output("sh", "-c", "ls -A /tmp /dev/shm").split() == ["/dev/shm:", "/tmp:"]


def clear(folder: Path) -> None:
    """Remove all that is in it."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def answer(container: Container, *options: str, scheme: str = "http") -> str:
    """What it says to `QUESTION` at the OpenAI API."""
    body = json.dumps({"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 96})
    url = f"{scheme}://127.0.0.1:9000/v1/chat/completions"
    said = container.output("curl", "-sS", "--insecure", "--max-time", "60", "--data", body, *options, url)
    return str(json.loads(said).get("choices", [{"message": {"content": said}}])[0]["message"]["content"])


def states(container: Container) -> dict[str, int]:
    """The status of each probe, and the exit status of the health check."""
    return {name: container.status(*ASKED[name]) for name in PROBES} | {"HEALTHCHECK": container.health()}


UP = {"startupProbe": 200, "readinessProbe": 200, "livenessProbe": 200, "HEALTHCHECK": 0}


def test_one_that_was_killed_is_healthy_when_it_runs_again(image: Image, stage: Stage, tmp_path: Path) -> None:
    """With what it left in /tmp, as Docker keeps it; here with keys and HTTPS, as compose.keys.yaml has it."""
    keys = yaml.safe_load((ROOT / "deploy" / "compose.keys.yaml").read_text(encoding="utf-8"))
    arguments = [re.sub(r"\$\{\w+:-(.*)\}", r"\1", word) for word in keys["services"]["dflash"]["command"]]
    arguments = [word.replace("/run/secrets/api_keys", "/cache/keys") for word in arguments]
    arguments += ["--tls-cert=/cache/cert.pem", "--tls-key=/cache/key.pem"]
    image.path("/cache/keys").write_text(f"team {KEY}\n")
    certificate = trustme.CA().issue_cert("llm.example")
    certificate.cert_chain_pems[0].write_to_path(image.path("/cache/cert.pem"))
    certificate.private_key_pem.write_to_path(image.path("/cache/key.pem"))
    pkcs8(image.path("/cache/key.pem"))
    first = Container(image, stage, tmp_path / "first", arguments)
    first.wait_until_healthy()
    first.kill()
    (left,) = image.path("/tmp").glob("dflash-triton-*")
    assert (left / "ready-url").read_text() == "https://127.0.0.1:9000/health/ready\n"
    assert first.health() == 1
    # Docker keeps /tmp, and gives each start a new /dev/shm.
    clear(image.path("/dev/shm"))
    second = Container(image, stage, tmp_path / "second", arguments)
    second.wait_until_healthy()
    assert not left.exists(), "the second has removed it"
    # The probes of the chart with openai.tlsSecretName; without a key.
    assert {second.status(path, port, "HTTPS") for path, port, _ in ASKED.values()} == {200}
    assert answer(second, "--header", f"Authorization: Bearer {KEY}", scheme="https").endswith(ANSWER)
    assert "API key" in answer(second, scheme="https")
    assert second.stop() == 0
    assert list(image.path("/tmp").iterdir()) == []


def test_the_images_command_serves_what_it_was_built_from(container: Container) -> None:
    assert answer(container).endswith(ANSWER)
    assert states(container) == UP


def test_no_process_is_roots_or_can_become_it(container: Container) -> None:
    processes = container.processes()
    assert len(processes) > 4
    for process in processes:
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert set(re.findall(r"^[UG]id:\t(.*)$", status, re.MULTILINE)) == {"\t".join(["1000"] * 4)}
        assert set(re.findall(r"^Cap(?:Inh|Prm|Eff|Bnd|Amb):\t(\w+)$", status, re.MULTILINE)) == {"0" * 16}
        assert re.findall(r"^NoNewPrivs:\t(\d)$", status, re.MULTILINE) == ["1"]


def test_its_root_cannot_be_written_and_the_checkout_is_not_there(image: Image, container: Container) -> None:
    for path in ("/file", "/opt/dflash/file", "/root/file", "/usr/file"):
        with pytest.raises(AssertionError, match="Read-only file system"):
            image.run("/", ["touch", path])
    assert container.output("sh", "-c", f"ls -d {ROOT} /wheels /build") == ""
    found = container.output("python3", "-c", "import dflash_backend, dflash_openai; print(dflash_backend.__file__)")
    assert found.startswith("/opt/python/lib/"), "what the wheel brought"


def test_without_an_engine_it_is_not_ready_within_a_second_and_lives(container: Container) -> None:
    container.wait_until_healthy()
    assert answer(container).endswith(ANSWER)
    killed_at = time.monotonic()
    while time.monotonic() < killed_at + 5:
        for process in container.with_word(ENGINE):
            process.kill()
        if time.monotonic() > killed_at + WITHIN_S:
            asked_at = time.monotonic()
            down = {"startupProbe": 503, "readinessProbe": 503, "livenessProbe": 200, "HEALTHCHECK": 1}
            assert states(container) == down, f"{asked_at - killed_at:.1f} s after the kill"
    container.wait_until_healthy()
    assert states(container) == UP
    assert answer(container).endswith(ANSWER)


def test_without_a_front_end_nothing_says_that_it_is_well(container: Container) -> None:
    container.wait_until_healthy()
    (front_end,) = [one for one in container.with_word(FRONT_END) if "openai" in one.cmdline()]
    front_end.suspend()
    front_end.kill()
    assert states(container) == dict.fromkeys(PROBES, 0) | {"HEALTHCHECK": 1}
    container.wait_until_healthy()
    assert states(container) == UP
