"""This engine in a process: `python -m benchmarks.peers.sides.ours_side SETTINGS`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from benchmarks.peers.sides.protocol import SEED, Prompts, Run, closed_loop, serve
from dflash_backend import LLM
from dflash_backend.messages import GenerationRequest, SamplingParams
from dflash_backend.text.detokenizer import Detokenizer


def load(settings: dict[str, Any]) -> tuple[str, Run]:
    """The engine with these settings."""
    llm = LLM(
        target=settings["target"],
        draft=settings["draft"],
        device="cpu",
        dtype=settings["dtype"],
        max_num_seqs=settings["max_num_seqs"],
        max_model_len=settings["max_model_len"],
        enable_prefix_caching=False,
    )
    core = llm.engine.core

    def run(prompts: Prompts, streams: int, max_tokens: int) -> dict[str, Any]:
        parameters = {"temperature": 0.0, "seed": SEED} | settings["sampling"]
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **parameters)
        texts = [Detokenizer(llm.tokenizer, sampling) for _ in prompts]

        def step() -> Iterator[tuple[int, list[int], bool]]:
            for delta in core.step().deltas:
                index, ended = int(delta.request_id), delta.finish_reason is not None
                texts[index].append(delta.token_ids, ended)
                yield index, list(delta.token_ids), ended

        before = core.stats().spec_decoding
        clock = closed_loop(
            prompts,
            streams,
            lambda index, prompt: core.add_request(GenerationRequest(str(index), prompt, sampling, ())),
            step,
        )
        counts = core.stats().spec_decoding - before
        return clock.result((counts.num_drafts, counts.num_accepted_tokens))

    return version("dflash-triton"), run


if __name__ == "__main__":
    serve(load)
