"""`transformers` in a process: `python -m benchmarks.peers.sides.transformers_side SETTINGS`.

It has no queue: prompts go in batches of `streams`, padded on the left, and a batch ends with its last answer. Prompt
lookup is for one prompt at a time there.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from benchmarks.peers.sides.protocol import Clock, Prompts, Run, serve


class _Arrivals(transformers.StoppingCriteria):
    """Is asked after each step whether to stop, and never says so: it notes what has come."""

    def __init__(self, clock: Clock, first: int, width: int) -> None:
        self._clock, self._first, self._seen = clock, first, width

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        for row, tokens in enumerate(input_ids[:, self._seen :].tolist()):
            self._clock.arrived(self._first + row, tokens)
        self._seen = input_ids.shape[1]
        return torch.zeros(len(input_ids), dtype=torch.bool)


def load(settings: dict[str, Any]) -> tuple[str, Run]:
    """The target with these settings."""
    torch.set_num_threads(settings["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        settings["target"], dtype=getattr(torch, settings["dtype"])
    ).eval()
    lookup: dict[str, Any] = {}
    if settings["drafts"] == "ngram":
        lookup = {
            "prompt_lookup_num_tokens": settings["num_speculative_tokens"],
            "max_matching_ngram_size": settings["prompt_lookup_max"],
        }

    sampling = settings["sampling"]
    if sampling:
        # Without these it has filters of its own.
        lookup |= {"do_sample": True, "top_k": 0, "top_p": 1.0} | sampling

    def run(prompts: Prompts, streams: int, max_tokens: int) -> dict[str, Any]:
        clock = Clock(len(prompts))
        for first in range(0, len(prompts), streams):
            batch = prompts[first : first + streams]
            width = max(map(len, batch))
            ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
            for row in range(len(batch)):
                clock.sent(first + row)
            with torch.inference_mode():
                model.generate(
                    ids,
                    attention_mask=mask,
                    max_new_tokens=max_tokens,
                    eos_token_id=None,
                    pad_token_id=0,
                    stopping_criteria=[_Arrivals(clock, first, width)],
                    **({"do_sample": False} | lookup),
                )
        return clock.result()

    return str(transformers.__version__), run


if __name__ == "__main__":
    serve(load)
