"""What to write in place of an option that a command does not have: people bring those of other servers with them."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence

from dflash_client.sampling import Sampling

SETTINGS_COMMANDS = ("serve", "eval", "train")
REQUEST_COMMANDS = ("generate", "chat")
ADAPTERS = "LoRA adapters are given with --lora-modules NAME=FOLDER, and all of them are in memory"
ENDPOINT = "the server is given with --url HOST:PORT"
# By command, then by option as others call it. "" stands for a word that is no option.
KNOWN: dict[str, dict[str, str]] = {
    "serve": {
        "": "the model comes first, its drafter with --draft; options of tritonserver go behind --",
        "--model": "the model itself is the argument, as in: serve MODEL; its drafter is given with --draft",
        "--model-path": "the model itself is the argument, as in: serve MODEL; its drafter is given with --draft",
        "--block-size": "a setting is given with --set kv_block_size=N",
        "--tokenizer": "the tokenizer is that of the target",
        "--speculative-model": "the drafter is given with --draft",
        "--speculative-config": "the drafter is given with --draft, k with --set num_speculative_tokens=N",
        "-tp": "a setting is given with --set tensor_parallel_size=N",
        "-dp": "a setting is given with --set data_parallel_size=N",
        "-pp": "layers are not split into stages; --set tensor_parallel_size=N shares each layer among GPUs",
        "--pipeline-parallel-size": "layers are not split into stages; --set tensor_parallel_size=N shares each layer "
        "among GPUs",
        "--enable-auto-tool-choice": "tools are always there; --tool-call-parser says how the model writes calls",
        "--chat-template-content-format": "the chat template says whether content is text or parts",
        "--enable-reasoning": "reasoning is always told apart; --reasoning-parser says how the model writes it",
        **dict.fromkeys(("--enable-lora", "--max-loras", "--max-lora-rank", "--max-cpu-loras"), ADAPTERS),
        "--trust-remote-code": "code of a checkpoint is never run; leave it out",
        "--enforce-eager": "a setting is given with --set enable_cuda_graphs=false",
        "--no-enable-prefix-caching": "a setting is given with --set enable_prefix_caching=false",
        "--enable-chunked-prefill": "long prompts are always cut into chunks; leave it out",
        "--disable-log-requests": "requests are not logged with their text; --no-access-log leaves their lines out",
        "--enable-log-requests": "prompts are never logged; each request has a line without its text",
    },
    "openai": {
        "": "the servers are given with --triton grpc://HOST:PORT",
        "--url": "the servers are given with --triton grpc://HOST:PORT",
        "--model": "the model is that of the server that --triton names",
    },
    "generate": {
        "": "the prompt is one argument: put it in quotes",
        "--host": ENDPOINT,
        "--port": ENDPOINT,
        "--stream": "the text streams by itself",
    },
    "chat": {"": "messages are typed, or piped in", "--host": ENDPOINT, "--port": ENDPOINT},
    "swap-drafter": {
        "--retries": "a swap is sent once, since an engine may die of a drafter; see whether it did, first"
    },
    "eval": {"--host": ENDPOINT, "--port": ENDPOINT, "--model": "the model is given with --target"},
}


def hint(command: str, parser: argparse.ArgumentParser, unknown: Sequence[str]) -> str:
    """`; ` and what to write instead of the first of the `unknown` arguments, or nothing."""
    words = next((word for word in unknown if word.startswith("--")), unknown[0])
    option, _, value = words.partition("=")
    place = list(unknown).index(words)
    if not value and place + 1 < len(unknown) and not unknown[place + 1].startswith("--"):
        value = unknown[place + 1]
    known = KNOWN.get(command, {}).get(option if option.startswith("-") else "")
    if known is not None:
        return f"; {known}"
    name = option.lstrip("-").replace("-", "_")
    if command in SETTINGS_COMMANDS and name in _settings():
        return f"; a setting is given with --set {name}={value or 'VALUE'}"
    if command in REQUEST_COMMANDS and name in Sampling.__annotations__:
        return f"; a sampling parameter is given with --set-param {name}={value or 'VALUE'}"
    close = difflib.get_close_matches(option, re.findall(r"--[a-z][a-z-]*", parser.format_help()), n=1, cutoff=0.75)
    return f"; did you mean {close[0]}?" if close else f"; dflash-triton {command} --help lists the options"


def _settings() -> frozenset[str]:
    """The names of the engine's settings, where its package is there."""
    try:
        from dflash_backend.config import SETTINGS
    except ImportError:
        return frozenset()
    return frozenset(setting.name for setting in SETTINGS)
