"""What pages say is what the code has: settings, options, parameters, metrics, log lines, files, and quoted output.

Their examples are run by `test_examples`.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import runpy
import subprocess

import pytest

from dflash_backend.checkpoints import TARGET_ARCHITECTURES
from dflash_backend.config import SETTINGS, asset_path
from dflash_backend.evaluation.datasets import EMBEDDED_SETS
from dflash_backend.evaluation.hub_sets import HUB_SETS
from dflash_backend.spec_stats import SpecDecodingStats
from dflash_backend.text.chat import OPTION_NAMES
from dflash_backend.text.sampling_params import FORMATS, PARAMETERS, TAKEN_BEFORE
from dflash_backend.triton.metric_specs import METRICS
from dflash_cli.main import main, parser
from dflash_client.sampling import Sampling
from dflash_openai.metrics import FrontendMetrics, merged
from tests.docs.conftest import DOCS, ROOT, first_column, page

CLIENTS, OPERATORS = page("clients.md"), page("operators.md")
OF_THE_SOURCE = (
    "README.md",
    "architecture.md",
    "dflash.md",
    "contributing.md",
    "scheduling.md",
    "gpu.md",
    "batch-invariance.md",
    "checkpoints.md",
    "training.md",
)
REFERENCE = re.compile(r"`([\w/]+\.py)(?::([\w.]+))?`")


def test_make_help_lists_every_target_that_says_what_it_does() -> None:
    described = re.findall(r"^([\w-]+):.*## ", page("Makefile"), re.MULTILINE)
    environ = {**os.environ, "MAKEFLAGS": ""}
    command = ["make", "--no-print-directory", "help"]  # within `make test` it would say where it is
    ended = subprocess.run(command, cwd=ROOT, env=environ, check=True, capture_output=True, text=True)
    assert [line.split()[1] for line in ended.stdout.splitlines()] == described
    assert "smollm2" in described


def test_every_thread_is_in_the_table_of_threads() -> None:
    table = page("architecture.md").split("\n## Processes and threads\n")[1].split("\n## ")[0]
    package = ROOT / "dflash_backend"
    files = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(r"\b(threading\.Thread|ThreadPoolExecutor)\(", path.read_text(encoding="utf-8"))
    }
    assert len(files) > 10
    assert {file for file in files if f"`{file}" not in table} == set()


def test_the_settings_page_is_what_the_schema_says() -> None:
    writer = runpy.run_path(str(DOCS / "write_settings.py"))
    assert page("settings.md") == writer["page"](), "run `make docs`"


def test_the_table_of_published_drafters_is_what_the_code_says() -> None:
    writer = runpy.run_path(str(DOCS / "write_published_drafters.py"))
    assert page("checkpoints.md") == writer["page"](), "run `make docs`"
    assert "| `Qwen/Qwen3-8B` | `z-lab/Qwen3-8B-DFlash-b16` | DFlash | z-lab | yes |" in page("checkpoints.md")


def test_the_evaluation_page_names_every_option_figure_and_set() -> None:
    commands = next(action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    options = [option for action in commands.choices["eval"]._actions for option in action.option_strings]
    derived = [name for name in SpecDecodingStats().as_dict() if not name.endswith("_per_pos")]
    for name in [*options, *derived, *EMBEDDED_SETS, *HUB_SETS]:
        assert name in ("-h", "--help") or name in page("evaluation.md"), name


def test_the_help_of_eval_names_every_set_and_what_its_options_take(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["eval", "--help"])
    # Lines are broken at hyphens too.
    printed = re.sub(r"\s+", " ", re.sub(r"-\n +", "-", capsys.readouterr().out))
    sets = printed.partition("--dataset NAME|FILE ")[2].partition("or a JSONL file")[0]
    assert sets.strip(" ,").split(", ") == [*EMBEDDED_SETS, *HUB_SETS]
    (shown,) = re.findall(r"variables of the chat template \(({[^}]*})", printed)
    assert json.loads(shown) == {"enable_thinking": False}


def test_the_training_page_names_every_option() -> None:
    commands = next(action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    options = [option for action in commands.choices["train"]._actions for option in action.option_strings]
    missing = [option for option in options if f"`{option}" not in page("training.md")]
    assert missing == ["-h", "--help"]


def test_the_checkpoints_page_names_every_architecture() -> None:
    assert all(f"`{architecture}`" in page("checkpoints.md") for architecture in TARGET_ARCHITECTURES)


def test_the_checkpoints_page_quotes_inspect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quoted = page("checkpoints.md").partition("drafter demo/pair/draft\n")[2].partition("```")[0].splitlines()
    monkeypatch.chdir(ROOT)
    assert main(["inspect", "demo/pair/draft"]) == 0
    printed = capsys.readouterr().out.splitlines()
    # Which backends there are, and what for, depends on the machine.
    expected = [line for line in quoted if line != "  ..." and not line.startswith("  backend ")]
    assert len(expected) > 10
    assert [line for line in printed if line in expected] == expected


def test_the_tables_of_inputs_and_outputs_are_those_of_the_model() -> None:
    config = asset_path("model_repository", "dflash", "config.pbtxt").read_text(encoding="utf-8")
    inputs, _, outputs = config.partition("\noutput [")
    for heading, tensors in (("Inputs", inputs), ("Outputs", outputs.partition("]\ninstance")[0])):
        assert sorted(first_column(CLIENTS, heading)) == sorted(re.findall(r'\{ name: "(\w+)"', tensors))


def test_the_table_of_sampling_parameters_is_that_of_the_server_and_of_the_client() -> None:
    names = sorted([*(parameter.name for parameter in PARAMETERS), *FORMATS, *TAKEN_BEFORE])
    assert sorted(first_column(CLIENTS, "Sampling parameters")) == names
    assert sorted(Sampling.__annotations__) == sorted([*names, *OPTION_NAMES, "return_steps"])


def test_the_table_of_metrics_and_their_labels_is_that_of_the_server() -> None:
    assert first_column(OPERATORS, "Metrics") == [metric.name for metric in METRICS]
    assert set(re.findall(r"`(dflash:\w+)`", OPERATORS)) == {metric.name for metric in METRICS}
    for metric in METRICS:
        (kind,) = re.findall(rf"^\| `{metric.name}` \| ([^|]*) \|", OPERATORS, re.MULTILINE)
        assert kind == metric.kind + (f", by `{metric.label}`" if metric.label else "")


def test_the_table_of_the_front_ends_metrics_is_what_it_shows() -> None:
    metrics = FrontendMetrics(["/v1/completions"])
    metrics.finished("/v1/completions", 200, 0.1)
    metrics.first_event("/v1/completions", 0.1)
    shown = [*metrics.lines(), *merged({"triton:8002": ""})]
    kinds = dict(line.split()[2:] for line in shown if line.startswith("# TYPE "))
    rows = dict(re.findall(r"^\| `(dflash_openai:\w+)` \| (\w+)[^|]* \|", page("openai.md"), re.MULTILINE))
    assert rows == kinds
    for name, words in re.findall(r"^\| `(dflash_openai:\w+)` \| \w+([^|]*) \|", page("openai.md"), re.MULTILINE):
        sample = next(line for line in shown if line.startswith((f"{name} ", f"{name}{{", f"{name}_count")))
        assert re.findall(r'(\w+)="', sample) == re.findall(r"`(\w+)`", words), name


@pytest.mark.parametrize("words", [name for name in first_column(OPERATORS, "Log") if " " in name])
def test_log_lines_are_the_servers(words: str) -> None:
    stem = words.split(" 70%")[0].rstrip(": ")
    assert any(stem in path.read_text(encoding="utf-8") for path in (ROOT / "dflash_backend").rglob("*.py"))


def test_settings_that_the_operators_page_assigns_exist() -> None:
    known = {setting.name for setting in SETTINGS}
    assert set(re.findall(r"`(\w+_\w+)=", OPERATORS)) <= known
    assert {name.lower() for name in re.findall(r"DFLASH_([A-Z_]*[A-Z])", OPERATORS)} <= known


def test_files_and_functions_that_the_pages_name_exist() -> None:
    references = {match for name in OF_THE_SOURCE for match in REFERENCE.findall(page(name))}
    assert len(references) > 50
    missing = sorted(f"{file}:{name}" for file, name in references if not _is_defined(file, name))
    assert not missing


def _is_defined(file: str, name: str) -> bool:
    for folder in (ROOT, ROOT / "dflash_backend"):
        path = folder / file
        if path.is_file():
            tree = ast.parse(path.read_text(encoding="utf-8"))
            defined = {each for node in ast.walk(tree) for each in _names(node)}
            return not name or defined.issuperset(name.split("."))
    return False


def _names(node: ast.AST) -> list[str]:
    """What a definition or an assignment names."""
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [target.id for target in targets if isinstance(target, ast.Name)]
    return [node.name] if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) else []


def test_the_speeds_of_the_readme_are_those_of_the_last_results() -> None:
    rows: dict[tuple[str, str], list[str]] = {}
    for line in (ROOT / "benchmarks/results/bench.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) > 4:
            rows[cells[0], cells[1]] = cells[2:]
    with_drafts, without, triton = "engine, DFlash", "engine, k = 0", "Triton, DFlash"
    rates = [(int(rows[triton, n][0]), int(rows[with_drafts, n][0])) for n in ("1", "8", "32")]
    lost = [100 - 100 * through / alone for through, alone in rates]
    one, many = ([rows[system, n][2].removesuffix(" ms") for system in (with_drafts, without)] for n in ("1", "32"))
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"({one[0]} ms against {one[1]} at one stream, {many[0]} against {many[1]} at 32)" in readme
    assert f"there are {min(lost):.0f} to {max(lost):.0f} % fewer tokens per second" in readme
