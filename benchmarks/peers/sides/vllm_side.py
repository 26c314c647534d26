"""vLLM in a process, by the interpreter that has it: `python -m benchmarks.peers.sides.vllm_side SETTINGS`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.peers.sides.protocol import SEED, Prompts, Run, closed_loop, serve

DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens"


def load(settings: dict[str, Any]) -> tuple[str, Run]:
    """The engine with these settings."""
    import vllm
    from vllm.sampling_params import RequestOutputKind

    llm = vllm.LLM(
        model=settings["target"],
        dtype=settings["dtype"],
        max_model_len=settings["max_model_len"],
        max_num_seqs=settings["max_num_seqs"],
        speculative_config=settings["speculative_config"],
        enable_prefix_caching=False,
        disable_log_stats=False,
    )
    engine = llm.llm_engine

    def counts() -> tuple[int, int]:
        metrics = llm.get_metrics()
        drafts, accepted = (sum(m.value for m in metrics if m.name == name) for name in (DRAFTS, ACCEPTED))
        return drafts, accepted

    def run(prompts: Prompts, streams: int, max_tokens: int) -> dict[str, Any]:
        parameters = settings["sampling"] and {"seed": SEED} | settings["sampling"]
        sampling = vllm.SamplingParams(
            **({"temperature": 0} | parameters),
            max_tokens=max_tokens,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )

        def step() -> Iterator[tuple[int, list[int], bool]]:
            for output in engine.step():
                yield int(output.request_id), list(output.outputs[0].token_ids), output.finished

        before = counts()
        clock = closed_loop(
            prompts,
            streams,
            lambda index, prompt: engine.add_request(str(index), {"prompt_token_ids": prompt}, sampling),
            step,
        )
        drafts, accepted = counts()
        return clock.result((drafts - before[0], accepted - before[1]))

    return str(vllm.__version__), run


if __name__ == "__main__":
    serve(load)
