"""Defects of text on its way in and out, and of what OpenAI's clients send and get."""

from __future__ import annotations

from tests.mutations.mutant import Mutant, mutants_of

TEXT = "dflash_backend/text"
FRONTEND = "frontend/dflash_openai"
CONTEXT = ("tests/text/test_prompt_context.py",)
TOKENIZER = ("tests/text/test_tokenizer.py",)
COMPLETIONS = ("tests/frontend/test_completions.py",)
PARAMETERS = ("tests/frontend/test_parameters.py",)
TOOLS = ("tests/frontend/test_tools.py",)

TEXT_MUTANTS = (
    *mutants_of(
        f"{TEXT}/json_schema.py",
        ("tests/text/test_json_schema.py",),
        (
            "schemas that stand beside one another are written out",
            "if _num_chars(found, sizes) > MAX_CHARS:",
            "if False:",
        ),
    ),
    *mutants_of(
        f"{TEXT}/chat.py",
        ("tests/text/test_chat.py",),
        ("a picture is let pass", "_MEDIA.search(kind)", "False"),
    ),
    *mutants_of(
        f"{TEXT}/request.py",
        ("tests/text/test_request.py",),
        ("a token that the target does not know is looked up", "    check_known(token_ids, ready)\n", ""),
    ),
    *mutants_of(
        f"{TEXT}/output.py",
        CONTEXT,
        ("an answer loses the first space that its prompt's text leaves it", "context_of(tokenizer, prompt)", "[]"),
        (
            "the tokens of a prompt have the texts that they have alone",
            "text = detokenizer.would_add(own, self._num_left == 0)",
            "text = self._tokenizer.decode([own], False)",
        ),
    ),
    *mutants_of(
        f"{TEXT}/time_limit.py",
        TOKENIZER,
        (
            "each block takes back what was not sent",
            "            self._blocks.discard(block)\n\n",
            "            self._blocks.discard(block)\n        _raise_in(block.thread, ctypes.py_object())\n\n",
        ),
    ),
    Mutant(
        "the end of a grammar's answer is text where ends are ignored",
        "dflash_backend/messages.py",
        "return () if self.ignore_eos and self.structured_outputs is None else eos_token_ids",
        "return () if self.ignore_eos else eos_token_ids",
        ("tests/text/test_detokenizer.py",),
    ),
    *mutants_of(
        f"{TEXT}/detokenizer.py",
        CONTEXT,
        ("a text goes on over a special token", "tail = tail[place + 1 :]", "pass"),
        (
            "a context begins within a run of bytes",
            "if REPLACEMENT not in tokenizer.decode(tail[-length:]):",
            "if tail:",
        ),
        (
            "the end of a sequence is told as what stopped an answer",
            "self._stop_token_ids - self._eos_token_ids",
            "self._stop_token_ids",
        ),
    ),
    *mutants_of(
        f"{TEXT}/tokenizer.py",
        TOKENIZER,
        ("a tokenizer makes the config of its model's family", "config=_bare_config(directory), ", ""),
        (
            "a tokenizer that names no class has no config to be told by",
            'if "auto_map" in tokenizer or',
            "if False and",
        ),
    ),
    *mutants_of(
        f"{TEXT}/tokenizer.py",
        TOKENIZER,
        (
            "a panic of the tokenizer is no error of the request",
            'raise _failed("turn this text into tokens", error) from None',
            "raise",
        ),
        ("a template without an end is rendered for ever", "    OutOfTime,\n", ""),
    ),
    *mutants_of(
        f"{TEXT}/prompt_size.py",
        TOKENIZER,
        (
            "a prompt may be of the longest token alone",
            "min(max_model_len * tokenizer.max_token_chars, FREE_CHARS + max_model_len * CHARS_PER_TOKEN)",
            "max_model_len * tokenizer.max_token_chars",
        ),
    ),
    *mutants_of(
        f"{TEXT}/parameter_values.py",
        PARAMETERS,
        ("a number past 64 bits is an integer", " and -(2**63) <= value < 2**64", ""),
        ("half a number is an integer", "type(value) is float and value.is_integer()", "type(value) is float"),
    ),
    *mutants_of(
        f"{FRONTEND}/logprobs.py",
        COMPLETIONS,
        (
            "the bytes of a token are those of the text that it completed",
            "return own if fits and (is_part or begun or text) else text.encode()",
            "return text.encode()",
        ),
        ("of two tokens with one text one is lost", "if text in texts else text]", "if not text else text]"),
    ),
    *mutants_of(
        f"{FRONTEND}/parsing/parser.py",
        TOOLS,
        ("a forced call that is cut is content", "        if not self._forced:\n", "        if True:\n"),
    ),
    *mutants_of(
        f"{FRONTEND}/chat.py",
        TOOLS,
        (
            "a stream of calls alone has content",
            'content = "" if deltas and "content" in deltas[0] else None',
            'content = ""',
        ),
    ),
    *mutants_of(
        "dflash_backend/core/spec_counts.py",
        ("tests/core/test_spec_stats.py",),
        (
            "the accepted drafts are not the sum of those by position",
            "reported.num_accepted_tokens = sum(reported.num_accepted_tokens_per_pos)",
            "pass",
        ),
        (
            "drafts past a stop string count by position",
            "self._removed_drafts_per_pos[position] += 1",
            "pass",
        ),
    ),
    *mutants_of(
        "dflash_backend/checkpoints/weights.py",
        ("tests/checkpoints/test_weights.py",),
        ("weights that are no numbers load", "        files.check_numbers()\n", ""),
    ),
)
