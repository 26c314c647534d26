"""Training documents as packed rows of token ids with a loss weight for each token."""

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from demo.data import END_OF_TEXT, SPECIAL_TOKEN_IDS, Segment

PROMPT_WEIGHT = 0.01
"""Loss weight of a token outside answers; answers weigh 1. Prompts are mostly chance and would drown them."""


class PackedRows:
    """Endless packed rows of any length; documents follow each other after an end-of-text token.

    Documents in a row are not hidden from each other: a question after unrelated text is what a long shared
    prefix looks like. Each row starts with a whole document, so that starts at position 0 are common.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, documents: Iterator[list[Segment]]) -> None:
        self.tokenizer = tokenizer
        self.documents = documents
        self.end_of_text = SPECIAL_TOKEN_IDS[END_OF_TEXT]

    def _row(self, length: int) -> tuple[list[int], list[bool]]:
        ids: list[int] = []
        is_answer: list[bool] = []
        while len(ids) < length:
            if ids:
                ids.append(self.end_of_text)
                is_answer.append(False)
            for segment in next(self.documents):
                piece = self.tokenizer.encode(segment.text, add_special_tokens=False)
                ids += piece
                is_answer += [segment.is_answer] * len(piece)
        return ids[:length], is_answer[:length]

    def batch(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Token ids, int64 [rows, length], and whether each belongs to an answer, bool [rows, length]."""
        made = [self._row(length) for _ in range(rows)]
        return torch.tensor([ids for ids, _ in made]), torch.tensor([flags for _, flags in made])
