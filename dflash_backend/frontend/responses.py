"""Builds the responses of the serving contract out of Triton's tensors. Used by `frontend.service`."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import numpy as np

from dflash_backend.frontend.request import ReturnFlags
from dflash_backend.messages import FinishReason, RequestStats

# gRPC status names, as Triton's `TritonError` calls them.
_ERROR_CODES = {
    "INVALID_ARGUMENT": "INVALID_ARG",
    "UNAVAILABLE": "UNAVAILABLE",
    "CANCELLED": "CANCELLED",
    "INTERNAL": "INTERNAL",
}


class ResponseBuilder:
    """Makes `InferenceResponse` objects. `pb_utils` is Triton's module, which exists only inside its stub."""

    def __init__(self, pb_utils: ModuleType) -> None:
        self._pb = pb_utils
        self.final: int = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

    def output(
        self,
        returns: ReturnFlags,
        text: str,
        token_ids: list[int],
        num_input_tokens: int,
        finish_reason: FinishReason | None,
        stats: RequestStats | None,
    ) -> Any:
        """A response with new text and the outputs that were asked for. `stats` belong to the last response; counts and
        ids of tokens are those new in this one."""
        tensors = [self._string("text_output", text)]
        if returns.finish_reason:
            tensors.append(self._string("finish_reason", str(finish_reason)))
        if returns.num_input_tokens:
            tensors.append(self._numbers("num_input_tokens", [num_input_tokens], np.uint32))
        if returns.num_output_tokens:
            tensors.append(self._numbers("num_output_tokens", [len(token_ids)], np.uint32))
        if returns.token_ids:
            tensors.append(self._numbers("token_ids", token_ids, np.int32))
        if returns.spec_stats and stats is not None:
            tensors.append(self._string("spec_stats", spec_stats_json(stats)))
        return self._pb.InferenceResponse(tensors)

    def error(self, status: str, message: str) -> Any:
        """A response that is an error. `status` is a gRPC status name."""
        code = getattr(self._pb.TritonError, _ERROR_CODES[status])
        return self._pb.InferenceResponse(error=self._pb.TritonError(message, code))

    def _string(self, name: str, text: str) -> Any:
        return self._pb.Tensor(name, np.array([text.encode("utf-8")], dtype=np.object_))

    def _numbers(self, name: str, values: list[int], dtype: type) -> Any:
        return self._pb.Tensor(name, np.array(values, dtype=dtype))


def spec_stats_json(stats: RequestStats) -> str:
    """The `spec_stats` output: what speculation, the prefix cache and preemption did for a request."""
    return json.dumps(
        {
            "num_drafts": stats.num_drafts,
            "num_draft_tokens": stats.num_draft_tokens,
            "num_accepted_tokens": stats.num_accepted_tokens,
            "num_accepted_tokens_per_pos": stats.num_accepted_tokens_per_pos,
            "acceptance_length": round(stats.acceptance_length, 4),
            "num_cached_tokens": stats.num_cached_tokens,
            "num_preemptions": stats.num_preemptions,
        }
    )
