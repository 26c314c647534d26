"""Starting an engine loads no package that it does not use: `torch._dynamo` and what it imports take a second."""

import subprocess
import sys

CODE = """
import sys
from dflash_backend import LLM
LLM().generate(["What is 3 + 4?"], max_tokens=4)
print([name for name in ("torch._dynamo", "sympy", "scipy", "matplotlib") if name in sys.modules])
"""


def test_an_engine_starts_and_answers_without_torchs_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
