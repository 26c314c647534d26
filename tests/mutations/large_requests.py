"""Defects by which one request, or one setting, would keep a server from all others."""

from __future__ import annotations

from tests.mutations.mutant import mutants_of

TEXT = "dflash_backend/text"

LARGE_REQUEST_MUTANTS = (
    *mutants_of(
        f"{TEXT}/client_json.py",
        ("tests/text/test_client_json.py",),
        ("values of a client's JSON are not counted", "if commas > max_commas:", "if commas < 0:"),
        (
            "a quotation mark in a string ends it",
            r"""text.replace("\\\\", "").replace('\\"', "")""",
            r"""text.replace("\\\\", "")""",
        ),
        ("each number is measured by a function", "_short_int if _TOO_MANY_DIGITS in", "_short_int if b'' in"),
        ("a number may have any number of digits", "_short_int if _TOO_MANY_DIGITS in", "None if b'' in"),
    ),
    *mutants_of(
        f"{TEXT}/chat.py",
        ("tests/text/test_chat.py",),
        ("the beginning of a special token ends no text", 'if "" in texts:', "if not texts:"),
        (
            "each special token is compared with each character",
            "return branches[0] if len(branches) == 1 else",
            "return '|'.join(sorted(map(re.escape, texts), key=len, reverse=True)) if len(texts) > 1 else",
        ),
    ),
    *mutants_of(
        f"{TEXT}/tools.py",
        ("tests/text/test_tools.py",),
        ("arguments of calls are counted one by one", "parts += sum(", "parts = sum("),
    ),
    *mutants_of(
        f"{TEXT}/request.py",
        ("tests/text/test_request.py",),
        (
            "a grammar is looked for in parameters of any size",
            "if len(text) > max_chars:\n        raise InputError",
            "if not max_chars:\n        raise InputError",
        ),
    ),
    *mutants_of(
        f"{TEXT}/structured_outputs.py",
        ("tests/text/test_structured_outputs.py",),
        (
            "another value like a grammar is taken out",
            "begin = _address(raw) - _address(data)",
            "begin = data.find(value)",
        ),
    ),
    *mutants_of(
        f"{TEXT}/detokenizer.py",
        ("tests/text/test_detokenizer.py",),
        (
            "characters before one that is cut off stay in the window",
            "if held_back and len(token_ids) > 1:",
            "if held_back and len(token_ids) > 1000:",
        ),
        (
            "skipped tokens stay in the window behind a part of a character",
            "if not finished and (held_back or not delta):",
            "if not finished and not held_back and not delta:",
        ),
        (
            "part of a character is taken for a skipped token",
            "return not tokenizer.decode([token_id, token_id], skip_special_tokens)",
            "return token_id > 127",
        ),
    ),
    *mutants_of(
        "dflash_backend/settings.py",
        ("tests/engine/test_config.py",),
        ("a number may be as large as a float can", "self.low < value <= self.high or", "self.low < value or"),
    ),
)
