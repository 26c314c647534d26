"""Schemathesis against the OpenAPI document that the front end serves: no request that it thinks of gives a 500.

`SCHEMATHESIS=/path/to/schemathesis python -m checks.openapi_fuzz`. Schemathesis (4.32 was tried) is installed in an
environment of its own, since its requirements differ. The model is the demo pair, whose answers have at most 64 tokens.
The exit status is 0 when no answer was a server error and the server is still up.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import httpx

from checks.front_end import HOST, running_front_end

SETTINGS = {"max_num_seqs": "8", "max_model_len": "64", "kv_cache_gb": "0.1"}
TIMEOUT_S = 1800.0


def main(arguments: list[str] | None = None) -> int:
    """Run it and print what Schemathesis says."""
    parser = argparse.ArgumentParser(description="Schemathesis against the OpenAI front end's OpenAPI document.")
    parser.add_argument("--examples", type=int, default=60, help="for each endpoint (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="%(default)s")
    parser.add_argument("--phases", default="coverage,fuzzing", help="of Schemathesis (%(default)s)")
    given = parser.parse_args(arguments)
    program = os.environ.get("SCHEMATHESIS", "schemathesis")
    with running_front_end(SETTINGS, ["--no-access-log"]) as front_end:
        url = f"http://{HOST}:{front_end.port}"
        command = [program, "run", f"{url}/openapi.json", "--checks", "not_a_server_error", "--workers", "1"]
        command += ["-n", str(given.examples), "--seed", str(given.seed), "--request-timeout", "120"]
        command += ["--phases", given.phases]
        status = subprocess.run(command, timeout=TIMEOUT_S, check=False).returncode
        is_up = httpx.get(f"{url}/health/live", timeout=60, trust_env=False).is_success
    print(f"schemathesis ended with status {status}; the front end {'is up' if is_up else 'is down'}")
    return 0 if status == 0 and is_up else 1


if __name__ == "__main__":
    sys.exit(main())
