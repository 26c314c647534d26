"""Defects of reading GGUF."""

from __future__ import annotations

from tests.mutations.mutant import mutants_of

TESTS = ("tests/checkpoints/test_gguf.py",)
HEADER_TESTS = ("tests/checkpoints/test_gguf_header.py",)
TOKEN_TESTS = ("tests/checkpoints/test_gguf_tokens.py",)
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
        ("a file that changes meanwhile is kept", "if _key(files) != key:", "if False:"),
    ),
    *mutants_of(
        "dflash_backend/checkpoints/gguf/convert.py",
        CHANGED_TESTS,
        ("numbers of MXFP4 take twice the bytes", 'EXACT.get(kind, "F32")', '"F32"'),
        ("numbers in BF16 that change are halved", '(numbers.astype("<u4") << 16)', '(numbers.astype("<u4") << 15)'),
        (
            "rows of a large tensor are read as one run",
            "np.flatnonzero(np.diff(wanted) != 1) + 1",
            "np.flatnonzero(np.diff(wanted) != 1)[:0] + 1",
        ),
    ),
    *mutants_of(
        "dflash_backend/checkpoints/gguf/reader.py",
        HEADER_TESTS,
        ("tensors begin at multiples of 32", 'metadata.get("general.alignment", ALIGNMENT)', "ALIGNMENT"),
        ("bytes have no sign", '"u1", "i1", "<u2"', '"u1", "u1", "<u2"'),
        ("a tensor may lie in another", "if tensor.offset < end:", "if False:"),
        ("values are counted by field", "self._items += count", "self._items = count"),
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
        ("the decay stays an exponential", "np.log(-decay)", "decay"),
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
            "codes of MXFP4 stay in ggml's order",
            "codes[..., 0::2] | codes[..., 1::2] << 4",
            "octets",
        ),
        ("scales of MXFP4 are other bytes", "rows[:, ::BLOCK_BYTES]", "rows[:, 1::BLOCK_BYTES]"),
        ("experts in MXFP4 become numbers", "if kinds == {GGML_MXFP4} else", "if False else"),
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
        TOKEN_TESTS,
        ("unused tokens are read from texts", "if types[i] != UNUSED}", "if True}"),
        ("tokens of users are split", "if kind in (CONTROL, USER_DEFINED)", "if kind in (CONTROL,)"),
        ("add_bos_token is not read", "if fields.boolean(field, default=default) else", "if default else"),
        ("what is a token is merged all the same", "ignore_merges=split.whole", "ignore_merges=False"),
        ("an answer ends at eos alone", 'ENDS = ("eos", "eot", "eom")', 'ENDS = ("eos",)'),
        ("control tokens are text", "kind == CONTROL) for", "False) for"),
        ("scores do not order merges", "(-scores[i], -len(one)", "(scores[i], -len(one)"),
        ("a prompt has no first token", 'kind == "llama"), True', 'kind == "llama"), False'),
    ),
)
