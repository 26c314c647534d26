"""Builds responses, with the outputs of docs/clients.md, out of Triton's tensors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import msgspec
import numpy as np

from dflash_backend.messages import RequestStats
from dflash_backend.text.output import RequestState
from dflash_backend.text.request import VERBATIM_ERRORS
from dflash_backend.triton.responder import Response

# gRPC status names that Triton's `TritonError` has others for.
_ERROR_CODES = {"INVALID_ARGUMENT": "INVALID_ARG"}
Array = np.ndarray[Any, Any]
# Triton stores a text with its length before it.
LENGTH_BYTES = 4


class ResponseBuilder:
    """Makes `InferenceResponse` objects. `pb_utils` is Triton's module, which exists only inside its stub."""

    def __init__(self, pb_utils: ModuleType, report_cached_tokens: bool = False) -> None:
        """`report_cached_tokens`: report the cached tokens of a prompt also without a cache salt."""
        self._pb = pb_utils
        self._report_cached_tokens = report_cached_tokens
        self.final: int = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

    def output(self, state: RequestState, delta_batches: int | None = None) -> Response:
        """A response with the new output of a request: text, and the outputs that were asked for.

        delta_batches: how many batches its delta stream was sent before, where some of them had output of it.

        Outputs have an element for each of the n completions. Token counts and ids are those of the new tokens:
        `token_ids` holds the ids of all completions, concatenated; `num_output_tokens` has their lengths. Only the last
        response has `spec_stats`.
        """
        returns, completions = state.parsed.returns, state.completions
        outputs: dict[str, Array] = {"text_output": _texts(["".join(one.text) for one in completions])}
        if returns.finish_reason:
            outputs["finish_reason"] = _texts([str(one.finish_reason) for one in completions])
        if returns.stop_reason:
            outputs["stop_reason"] = _texts([json.dumps(one.stop_reason) for one in completions])
        if returns.cumulative_logprob:
            outputs["cumulative_logprob"] = np.array([one.cumulative_logprob for one in completions], dtype=np.float32)
        if returns.logprobs:
            asked = state.parsed.sampling.logprobs is not None
            outputs["logprobs"] = _texts(
                [f"[{', '.join(one.logprobs_json)}]" if asked else "null" for one in completions]
            )
        if state.prompt_logprobs is not None:
            outputs["prompt_logprobs"] = _texts([f"[{', '.join(state.prompt_logprobs.json)}]"])
        if returns.num_input_tokens:
            outputs["num_input_tokens"] = np.array([len(state.parsed.prompt_token_ids)], dtype=np.uint32)
        if returns.num_output_tokens:
            outputs["num_output_tokens"] = np.array([len(one.token_ids) for one in completions], dtype=np.uint32)
        if returns.token_ids:
            ids = [token_id for one in completions for token_id in one.token_ids]
            outputs["token_ids"] = np.array(ids, dtype=np.int32)
        if returns.steps:
            outputs["steps"] = _texts([json.dumps(one.steps) for one in completions])
        if returns.spec_stats and state.finished:
            report_cached = self._report_cached_tokens or bool(state.parsed.sampling.cache_salt)
            stats = [spec_stats_json(one.stats, report_cached) for one in completions if one.stats is not None]
            outputs["spec_stats"] = _texts(stats)
        if state.finished and (asked_for := state.parsed.sampling.kv_transfer_params) and asked_for.do_remote_decode:
            outputs["kv_transfer_params"] = _texts([msgspec.json.encode(state.kv_transfer_params).decode()])
        if delta_batches is not None:
            outputs["delta_batches"] = np.array([delta_batches], dtype=np.int64)
        tensors = [self._pb.Tensor(name, values) for name, values in outputs.items()]
        return Response(self._pb.InferenceResponse(tensors), sum(map(_num_bytes, outputs.values())))

    def description(self, text: str) -> Response:
        """A response with one text, which describes the model."""
        values = _texts([text])
        return Response(self._pb.InferenceResponse([self._pb.Tensor("text_output", values)]), _num_bytes(values))

    def error(self, status: str, message: str) -> Any:
        """A response that is an error. `status` is a gRPC status name.

        The text begins with the status: HTTP answers every error of a model with 400, and a gRPC stream carries only
        the text of an error. Texts that clients of Triton's vLLM backend compare as a whole are the same as there.
        """
        code = getattr(self._pb.TritonError, _ERROR_CODES.get(status, status))
        text = message if message in VERBATIM_ERRORS else f"{status}: {message}"
        return self._pb.InferenceResponse(error=self._pb.TritonError(text, code))


def _texts(texts: Sequence[str]) -> Array:
    return np.array([text.encode("utf-8") for text in texts], dtype=np.object_)


def _num_bytes(values: Array) -> int:
    """The bytes of an output as Triton stores it."""
    if values.dtype == np.object_:
        return sum(len(text) + LENGTH_BYTES for text in values)
    return int(values.nbytes)


def spec_stats_json(stats: RequestStats, report_cached_tokens: bool) -> str:
    """The `spec_stats` output: a request's counts of speculation, cached prompt tokens and preemptions.

    Without `report_cached_tokens` the number of cached prompt tokens is null: among requests that share the cache it
    would reveal what others have sent, token by token.
    """
    # Those of them that came from tiers of KV; without one there is no word of it.
    loaded = {"num_loaded_tokens": stats.num_loaded_tokens} if stats.num_loaded_tokens and report_cached_tokens else {}
    return json.dumps(
        {
            **msgspec.structs.asdict(stats.spec_decoding),
            "acceptance_length": round(stats.spec_decoding.acceptance_length, 4),
            "num_cached_tokens": stats.num_cached_tokens if report_cached_tokens else None,
            **loaded,
            "num_preemptions": stats.num_preemptions,
            "queue_time_s": round(stats.queue_time_s, 6),
        }
    )
