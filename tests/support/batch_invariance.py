"""Runs requests in engines of every shape and keeps the logits that each of their tokens was chosen from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dflash_backend.engine.build import BuiltEngine
from dflash_backend.worker.batch import ForwardBatch
from dflash_backend.worker.state import StateTensors
from tests.worker.engines import Outputs

MAX_TOKENS = 12


class KeptLogits:
    """The logits of a run: by request and position, those of the last step that computed it. At a position whose draft
    was rejected that is the step after."""

    def __init__(self, built: BuiltEngine) -> None:
        self.logits: dict[tuple[str, int], torch.Tensor] = {}
        self._runner = built.runner
        ops = built.runner.model.ops
        self._target_tokens = ops.target_tokens
        ops.target_tokens = self._keep  # type: ignore[method-assign]

    def _keep(self, step: ForwardBatch, state: StateTensors) -> torch.Tensor:
        if not isinstance(step.logits, torch.Tensor):
            return self._target_tokens(step, state)
        positions = step.positions
        if step.logits_token is not None:
            positions = positions[step.logits_token.long()]
        names = {record.index: name for name, record in self._runner.requests.records.items()}
        index = step.batch.req_idx[step.logits_row.clamp(min=0)].tolist()
        rows = zip(step.logits, index, positions.tolist(), step.logits_row.tolist(), strict=True)
        for row_logits, request, position, row in rows:
            if row >= 0 and request in names:
                self.logits[names[request], position] = row_logits.clone()
        return self._target_tokens(step, state)


def run(
    built: BuiltEngine, prompts: Sequence[list[int]], prefix: str = "", **sampling: Any
) -> tuple[dict[str, list[int]], dict[tuple[str, int], torch.Tensor]]:
    """Each prompt's tokens, by its index, and the logits they were chosen from, by index and position. The requests'
    names begin with `prefix`."""
    kept, outputs = KeptLogits(built), Outputs(built)
    own = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True, **sampling}
    for index, prompt in enumerate(prompts):
        outputs.add(f"{prefix}{index}", prompt, **own)
    tokens = {name.removeprefix(prefix): ids for name, ids in outputs.finish().items()}
    built.runner.model.ops.target_tokens = kept._target_tokens  # type: ignore[method-assign]
    logits = {
        (name.removeprefix(prefix), position): row
        for (name, position), row in kept.logits.items()
        if position < len(prompts[int(name.removeprefix(prefix))]) + own["max_tokens"] - 1
    }
    return tokens, logits


def random_prompts(count: int, vocab_size: int, longest: int = 120) -> list[list[int]]:
    """Of many lengths, the first of a few blocks."""
    generator = torch.Generator().manual_seed(17)
    lengths = [45, *torch.randint(3, longest, (count - 1,), generator=generator).tolist()]
    return [torch.randint(1, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def differing(
    one: dict[tuple[str, int], torch.Tensor], other: dict[tuple[str, int], torch.Tensor], name: str = "0"
) -> int:
    """At how many positions the logits of a request differ in any bit. Both have the same ones, at least one."""
    positions = {key for key in one if key[0] == name}
    assert positions
    assert positions == {key for key in other if key[0] == name}
    return sum(not torch.equal(one[key], other[key]) for key in positions)
