"""The same weights for llama.cpp: its own converter, run on the same directories.

The benchmark sends token ids, so the vocabulary is only carried along; the converter knows tokenizers by their hash,
and takes that of Qwen2 for the one that it does not know.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

from benchmarks.peers.pairs import Pair, whole_vocabulary

OUT_TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
# Runs convert_hf_to_gguf.py with the name that a text's split has in the file, and without SentencePiece, which it
# looks for first.
RUN = """
import runpy, sys
sys.path.insert(0, sys.argv[1])
from conversion.base import TextModel
def missing(self, *given):
    raise FileNotFoundError
TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
TextModel._set_vocab_sentencepiece = TextModel._set_vocab_llama_hf = missing
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def target_file(installed: Path, pair: Pair) -> Path:
    """The target as GGUF, in its own dtype. installed: llama.cpp's folder. Raises `RuntimeError`."""
    return _converted(installed, pair, pair.target, [])


def drafter_file(installed: Path, pair: Pair, folder: Path) -> Path:
    """The drafter as GGUF, in the target's dtype. folder: for files of this run. Raises `RuntimeError`."""
    assert pair.drafter is not None
    drafter = whole_vocabulary(pair.drafter, folder)
    return _converted(installed, pair, drafter, ["--target-model-dir", str(pair.target)])


def _converted(installed: Path, pair: Pair, source: Path, options: list[str]) -> Path:
    outtype = OUT_TYPES[pair.dtype]
    stamps = [(str(path), path.stat().st_mtime_ns) for path in sorted(source.glob("*"))]
    key = hashlib.sha256(json.dumps([outtype, stamps]).encode()).hexdigest()[:12]
    file = installed / "models" / f"{pair.name}-{outtype}-{key}.gguf"
    if file.is_file():
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    folder = installed / "source"
    partial = file.with_suffix(".partial.gguf")
    command = [sys.executable, "-c", RUN, str(folder), str(folder / "convert_hf_to_gguf.py"), str(source)]
    command += ["--outtype", outtype, "--outfile", str(partial), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"llama.cpp's converter failed on {source}: {done.stderr.strip()[-600:]}")
    partial.rename(file)
    return file
