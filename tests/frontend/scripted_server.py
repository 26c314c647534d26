"""The front end on a scripted model as a process of its own: `python -m tests.frontend.scripted_server PORT [options]`,
with the options of `dflash-triton openai` for security."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from dflash_backend.without_torch import leave_torch_out


def main() -> None:
    """Serve until a signal."""
    leave_torch_out()
    from checks.byte_tokenizer import write_byte_tokenizer
    from dflash_cli.commands.security_options import add_security_options, security_config
    from dflash_openai.app import create_app
    from dflash_openai.config import FrontendConfig
    from dflash_openai.server import serve
    from tests.frontend.scripted_pool import Script, ScriptedPool

    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--silent", type=float, default=0.0, help="seconds before each delta")
    add_security_options(parser)
    arguments = parser.parse_args()
    security = security_config(arguments, is_loopback=True)
    config = FrontendConfig(port=arguments.port, security=security, ping_interval_s=arguments.ping_interval)
    with tempfile.TemporaryDirectory() as directory:
        write_byte_tokenizer(Path(directory))
        pool = ScriptedPool(Path(directory))
        if arguments.silent:
            pool.script = Script(texts=("a",), wait_s=arguments.silent)
        serve(create_app(config, pool), config)


if __name__ == "__main__":
    main()
