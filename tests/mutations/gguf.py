"""Defects of reading GGUF."""

from __future__ import annotations

from tests.mutations.mutant import mutants_of

TESTS = ("tests/checkpoints/test_gguf.py",)
GGUF_MUTANTS = (
    *mutants_of(
        "dflash_backend/checkpoints/gguf/convert.py",
        TESTS,
        (
            "rows of queries and keys stay in the order of neighbours",
            "= head * head_dim + 2 * (within % half) + within // half",
            "= rows",
        ),
        ("a file that changes is not converted anew", "file.stat().st_size, file.stat().st_mtime_ns)", "0, 0)"),
        ("an expert is read from the beginning", "tensor.offset + part.start //", "tensor.offset + 0 * part.start //"),
        ("a full disk is found at its end", "if size + SPARE_BYTES > free:", "if False:"),
    ),
    *mutants_of(
        "dflash_backend/checkpoints/gguf/reader.py",
        TESTS,
        ("a count is believed", "if count > most:", "if False:"),
        ("tensors of other files are left out", "for file in files[1:]:", "for file in files[:0]:"),
    ),
    *mutants_of(
        "dflash_backend/checkpoints/gguf/architectures.py",
        TESTS,
        ("scaling of Llama 3.1 is not read", "    if factors is not None:", "    if False:"),
        ("a window is not seen", 'fields.integer("attention.sliding_window", default=0, low=0)', "0"),
        ("all heads are tied", '"output.weight" not in model.tensors,', "True,"),
    ),
    *mutants_of(
        "dflash_backend/checkpoints/gguf/tokenizer.py",
        TESTS,
        ("control tokens are text", "kind == CONTROL) for", "False) for"),
        ("scores do not order merges", "(-scores[i], -len(one)", "(scores[i], -len(one)"),
        ("a prompt has no first token", "return tokenizer, True", "return tokenizer, False"),
    ),
)
