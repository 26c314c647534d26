"""Defects of reading GGUF."""

from __future__ import annotations

from tests.mutations.mutant import mutants_of

TESTS = ("tests/checkpoints/test_gguf.py",)
CHANGED_TESTS = ("tests/checkpoints/test_gguf_changed.py",)
GGUF_MUTANTS = (
    *mutants_of(
        "dflash_backend/checkpoints/gguf/parts.py",
        TESTS,
        (
            "rows of queries and keys stay in the order of neighbours",
            "= head * head_dim + 2 * (within % half) + within // half",
            "= rows",
        ),
    ),
    *mutants_of(
        "dflash_backend/checkpoints/gguf/convert.py",
        TESTS,
        ("a file that changes is not converted anew", "file.stat().st_size, file.stat().st_mtime_ns)", "0, 0)"),
        ("an expert is read from the beginning", "first, count = part.start //", "first, count = 0 * part.start //"),
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
        "dflash_backend/checkpoints/gguf/architectures.py",
        CHANGED_TESTS,
        ("a norm of a hybrid keeps its 1", "in architecture.centred:", "in ():"),
    ),
    *mutants_of(
        "dflash_backend/checkpoints/gguf/hybrids.py",
        CHANGED_TESTS,
        (
            "value heads stay in llama.cpp's order",
            "(within_group * key_heads + key) * size",
            "(key * group + within_group) * size",
        ),
        ("the decay stays an exponential", "= np.log(-numbers)", "= numbers"),
    ),
    *mutants_of(
        "dflash_backend/checkpoints/gguf/gpt_oss.py",
        CHANGED_TESTS,
        (
            "all gates are before all ups",
            "np.array([0, count * inner])).reshape(-1)",
            "np.array([0, count * inner])).T.reshape(-1)",
        ),
        (
            "down matrices are not turned over",
            "rows=np.arange(count * hidden), matrix_rows=hidden",
            "rows=np.arange(count * hidden)",
        ),
    ),
    *mutants_of(
        "dflash_backend/checkpoints/gguf/drafter.py",
        CHANGED_TESTS,
        ("boundary ids of GGUF are taken for layer ids", "[i - 1 for i in boundaries]", "[*boundaries]"),
    ),
    *mutants_of(
        "dflash_backend/checkpoints/gguf/tokenizer.py",
        TESTS,
        ("control tokens are text", "kind == CONTROL) for", "False) for"),
        ("scores do not order merges", "(-scores[i], -len(one)", "(scores[i], -len(one)"),
        ("a prompt has no first token", 'kind == "llama"), True', 'kind == "llama"), False'),
    ),
)
