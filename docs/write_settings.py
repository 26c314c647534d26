"""Writes docs/settings.md and the parameters of the model's config.pbtxt from `dflash_backend.config`.

Run by `make docs`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from dflash_backend.config import SETTINGS, asset_path
from dflash_backend.settings import Setting, as_text

PAGE = Path(__file__).resolve().parent / "settings.md"
CONFIG = asset_path("model_repository", "dflash", "config.pbtxt")
MARK = (
    "# Settings with their defaults. Change the values here; a new setting is a field of EngineConfig in "
    "dflash_backend/config.py, and `make docs` writes all lines below again.\n"
)

TEXT = """# Settings

<!-- Written by `make docs` from dflash_backend/config.py; edit the declarations there, not this page. -->

A setting can be given in four ways, the later winning:

1. `parameters` in the model's `config.pbtxt`, each a `string_value`;
2. the `model.json` of a model of Triton's vLLM backend, by vLLM's names;
3. the environment of the server: `DFLASH_` and the name in capitals, as in `DFLASH_KV_BLOCK_SIZE=32`;
4. the command line: `dflash-triton serve --set kv_block_size=32`.

An unknown name or a value that is not allowed stops the load, with a message that says what is allowed.

{table}
"""


def settings_table(settings: Sequence[Setting]) -> str:
    """The settings as a Markdown table."""
    rows = ["| name | default | allowed | meaning |", "| --- | --- | --- | --- |"]
    for setting in settings:
        default = as_text(setting.default) or "empty"
        rows.append(f"| `{setting.name}` | {default} | {setting.allowed} | {setting.help} |")
    return "\n".join(rows)


def config_parameters(settings: Sequence[Setting]) -> str:
    """The settings as `parameters` of a config.pbtxt, each with its default and a comment."""
    lines = []
    for setting in settings:
        lines.append(f"# {setting.help}. Allowed: {setting.allowed}")
        value = json.dumps(as_text(setting.default))
        lines.append(f'parameters {{ key: "{setting.name}" value {{ string_value: {value} }} }}')
    return "\n".join(lines)


def page() -> str:
    """The whole page."""
    return TEXT.format(table=settings_table(SETTINGS))


def model_config() -> str:
    """The whole config.pbtxt."""
    return CONFIG.read_text(encoding="utf-8").partition(MARK)[0] + MARK + config_parameters(SETTINGS) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    CONFIG.write_text(model_config(), encoding="utf-8")
