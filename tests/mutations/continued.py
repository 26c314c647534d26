"""Defects of answers that continue the last message: another beginning than the client gave, or text in the wrong
field."""

from __future__ import annotations

from tests.mutations.mutant import Mutant, mutants_of

FRONTEND = "frontend/dflash_openai"
CHAT = ("tests/text/test_chat.py",)

CONTINUED_MUTANTS = (
    *mutants_of(
        "dflash_backend/text/chat.py",
        CHAT,
        (
            "a message of the user is continued",
            'if last.get("role") != "assistant" or last.get("tool_calls") or not has_text:',
            'if last.get("tool_calls") or not has_text:',
        ),
        (
            "a message with tool calls is continued",
            'if last.get("role") != "assistant" or last.get("tool_calls") or not has_text:',
            'if last.get("role") != "assistant" or not has_text:',
        ),
    ),
    *mutants_of(
        "dflash_backend/text/tokenizer.py",
        CHAT,
        (
            "a continued message is followed by another turn",
            "        if continue_final_message:\n            end = ",
            "        if False:\n            end = ",
        ),
    ),
    *mutants_of(
        f"{FRONTEND}/parsing/selection.py",
        ("tests/frontend/test_tools.py",),
        (
            "what continues a message is looked at as reasoning",
            "return self.reasoning.open if in_reasoning else self.reasoning.close",
            "return self.reasoning.open",
        ),
        (
            "reasoning that a message began is taken for content",
            "return self.reasoning.open if in_reasoning else self.reasoning.close",
            "return self.reasoning.close",
        ),
    ),
    Mutant(
        "what continues a harmony message is looked at as the head of one",
        f"{FRONTEND}/parsing/selection.py",
        "return harmony.FINAL",
        'return ""',
        ("tests/frontend/test_harmony.py",),
    ),
    Mutant(
        "/tokenize continues no message",
        f"{FRONTEND}/tokenize.py",
        "if name in ChatRequest.__struct_fields__]",
        'if name in ChatRequest.__struct_fields__ and name != "continue_final_message"]',
        ("tests/frontend/test_chat.py",),
    ),
)
