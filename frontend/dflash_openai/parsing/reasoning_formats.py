"""How families of models write what they think before they answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """One way to write reasoning; `name` is vLLM's for it (`--reasoning-parser`).

    open, close: the marks around the reasoning. starts_open: the answer begins within the reasoning although neither
    the prompt nor the model has written the open mark. counted_to: the mark with which the tokens of the reasoning end,
    where that is not `close`, behind which grammars begin.
    """

    name: str
    open: str
    close: str
    starts_open: bool = False
    counted_to: str = ""

    def is_open_after(self, prompt: str) -> bool:
        """Whether a prompt's chat template has written the open mark, so that the answer begins within the
        reasoning."""
        return prompt.rstrip().endswith(self.open)

    def is_closed_after(self, prompt: str) -> bool:
        """Whether a prompt's chat template has written the reasoning, so that the answer has none."""
        return prompt.rstrip().endswith(self.close)


QWEN3 = ReasoningFormat("qwen3", "<think>", "</think>")
DEEPSEEK_R1 = ReasoningFormat("deepseek_r1", "<think>", "</think>", starts_open=True)
MISTRAL = ReasoningFormat("mistral", "[THINK]", "[/THINK]")

REASONING_FORMATS = {each.name: each for each in (QWEN3, DEEPSEEK_R1, MISTRAL)}
