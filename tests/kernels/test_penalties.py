"""The kernels of penalties equal their references, and these plain Python."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from dflash_kernels import cpu_ops
from dflash_kernels.penalties import (
    IN_PROMPT,
    NUMBERS,
    PenalisedRows,
    count_and_penalise,
    count_and_penalise_reference,
)
from tests.kernels.inputs import DEVICE

VOCAB, MAX_LEN, NUM_REQUESTS, TILE = 150, 1300, 5, 64
# Request, tokens of the prompt, position, drafts. Requests lie anywhere, and so do their entries in `positions`.
ROWS = [(3, 4, 9, 2), (0, 1100, 1100, 0), (4, 1, 1298, 5)]


def make() -> tuple[list[torch.Tensor], PenalisedRows, torch.Tensor]:
    """Counts, how many are counted, tokens and penalties; the rows; and their logits among others."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCAB, (NUM_REQUESTS, MAX_LEN), generator=generator)
    counts = torch.zeros(NUM_REQUESTS, VOCAB, dtype=torch.int32)
    penalties = torch.rand(NUM_REQUESTS, 3, generator=generator) + 0.5
    num_counted = torch.zeros(NUM_REQUESTS, dtype=torch.int32)
    numbers, first = torch.zeros(NUMBERS, len(ROWS), dtype=torch.int64), 1
    positions = torch.zeros(len(ROWS) + 1, dtype=torch.int64)
    for i, (index, prompt_len, position, num_draft) in enumerate(ROWS):
        entry = len(ROWS) - i
        numbers[:, i] = torch.tensor([index, entry, prompt_len, num_draft, first])
        positions[entry] = position
        first += num_draft + 2
    logits = torch.randn(first, VOCAB, generator=generator)
    logits[:, 7] = float("-inf")
    rows = PenalisedRows(numbers.to(DEVICE), positions.to(DEVICE), max(row[3] for row in ROWS))
    return [tensor.to(DEVICE) for tensor in (counts, num_counted, tokens, penalties)], rows, logits.to(DEVICE)


def on_host(rows: PenalisedRows) -> PenalisedRows:
    return PenalisedRows(rows.numbers.cpu(), rows.positions.cpu(), rows.most_draft)


@pytest.mark.skipif(not cpu_ops.HAS_CPU_OPS, reason="needs a C++ compiler")
def test_logits_and_counts_of_the_cpp_are_those_of_the_reference_by_any_threads_and_twice() -> None:
    threads = torch.get_num_threads()
    for count in (1, 3):
        state, rows, logits = make()
        own, others = ([each.cpu().clone() for each in (logits, *state)] for _ in range(2))
        torch.set_num_threads(count)
        for _ in range(2):
            cpu_ops.count_and_penalise(*own, on_host(rows))
            count_and_penalise_reference(*others, on_host(rows))
        torch.set_num_threads(threads)
        assert all(map(torch.equal, own, others))


def test_counts_are_those_of_plain_python_and_grow_from_where_they_were() -> None:
    (counts, num_counted, tokens, penalties), rows, logits = make()
    half = PenalisedRows(rows.numbers, rows.positions // 2, rows.most_draft)
    for each in (half, rows, rows):
        count_and_penalise(logits.clone(), counts, num_counted, tokens, penalties, each)
    plain = [torch.zeros_like(counts.cpu()), torch.zeros_like(num_counted.cpu())]
    count_and_penalise_reference(logits.cpu(), *plain, tokens.cpu(), penalties.cpu(), on_host(rows))
    assert torch.equal(counts.cpu(), plain[0])
    assert torch.equal(num_counted.cpu(), plain[1])
    for index, prompt_len, position, _ in ROWS:
        ids = tokens[index].tolist()
        output = Counter(ids[prompt_len:position])
        expected = [output[token] + IN_PROMPT * (token in ids[:prompt_len]) for token in range(VOCAB)]
        assert plain[0][index].tolist() == expected
    assert plain[0][[1, 2]].sum() == 0


@pytest.mark.parametrize("tile", [TILE, 256])
def test_penalised_logits_are_those_of_the_reference_and_of_plain_python(tile: int) -> None:
    (counts, num_counted, tokens, penalties), rows, logits = make()
    found, expected = logits.clone(), logits.cpu().clone()
    on_cpu = [tensor.cpu().clone() for tensor in (counts, num_counted, tokens, penalties)]
    count_and_penalise(found, counts, num_counted, tokens, penalties, rows, tile)
    count_and_penalise_reference(expected, *on_cpu, on_host(rows))
    assert torch.equal(found.cpu(), expected)
    touched = set()
    for (index, prompt_len, position, num_draft), first in zip(ROWS, rows.numbers[-1].tolist(), strict=True):
        ids, (repetition, frequency, presence) = tokens[index].tolist(), penalties[index].tolist()
        for number in range(num_draft + 1):
            touched.add(first + number)
            # The drafts of the longest row lie past the end of its tokens.
            drafts = [ids[min(position + j, MAX_LEN - 1)] for j in range(number)]
            output = Counter(ids[prompt_len:position] + drafts)
            for token, value in enumerate(logits[first + number].tolist()):
                if token in output or token in ids[:prompt_len]:
                    value = value / repetition if value > 0 else value * repetition
                value -= frequency * output[token] + presence * (token in output)
                assert expected[first + number, token].item() == pytest.approx(value, abs=1e-4)
    others = [line for line in range(len(logits)) if line not in touched]
    assert torch.equal(expected[others], logits.cpu()[others])
