"""Rows whose requests change the logits by what they have generated, or want log-probabilities. Used by the device
runner.

`worker.logits` does this from what the host knows of a request. The core plans such a row only when nothing of its
request is in flight, so the host knows where it starts. Log-probabilities go to the host within the step, which waits.
"""

from __future__ import annotations

import numpy as np
import torch

from dflash_backend.core.plan import ScheduledRequest
from dflash_backend.messages import TokenLogprobs
from dflash_backend.worker.batch import spans
from dflash_backend.worker.device_layout import HostRows
from dflash_backend.worker.device_requests import DeviceRequests
from dflash_backend.worker.logits import JudgedRows, adjust, token_logprobs


class SpecialRows:
    """The special ones among a step's rows: `which` of the plan's, int64 `[n]`, at least one."""

    def __init__(
        self, plan_rows: list[ScheduledRequest], rows: HostRows, requests: DeviceRequests, which: np.ndarray
    ) -> None:
        self.which = which
        self._requests = requests
        sizes = np.where(rows.sample, rows.num_draft + 1, 0)
        first = np.cumsum(sizes) - sizes
        # The distributions of these rows among those of the step, int64 `[sum(num_draft + 1)]`.
        _, self._flat = spans(first[which], sizes[which])
        self._raw: torch.Tensor | None = None
        ids = [plan_rows[i].request_id for i in which.tolist()]
        position = rows.start[which] + rows.num_new[which]
        self._judged = JudgedRows(ids, rows.table[which], position, rows.num_draft[which])

    @classmethod
    def of(cls, plan_rows: list[ScheduledRequest], rows: HostRows, requests: DeviceRequests) -> SpecialRows | None:
        """The special ones of `rows`, which are `plan_rows`; None where there are none.

        Raises `RuntimeError` for one whose start is not certain.
        """
        table = rows.table
        # 0 for a request without `min_tokens`. The lowest start may then be below 0: an upper bound is cut at the
        # request's end, and the number of drafts in flight is not.
        min_end = requests.min_end[table]
        hides = (min_end > 0) & (min_end > rows.start + rows.num_new - rows.uncertain)
        special = hides | requests.biased[table] | requests.penalised[table] | (requests.num_logprobs[table] >= 0)
        which = (rows.sample & special).nonzero()[0]
        if len(which) == 0:
            return None
        if rows.uncertain[which].any():
            names = [plan_rows[i].request_id for i in which.tolist()]
            raise RuntimeError(
                f"rows of {names} were planned with a step of theirs in flight, though their logits or their results "
                "need the host; this is a defect of the scheduler"
            )
        return cls(plan_rows, rows, requests, which)

    @property
    def any_logprobs(self) -> bool:
        """Whether `logprobs` has anything to give."""
        return bool((self._requests.num_logprobs[self._judged.table] >= 0).any())

    def adjust(self, logits: torch.Tensor) -> torch.Tensor:
        """See `device_step.Hooks.adjust`."""
        flat = torch.from_numpy(self._flat).to(logits.device)
        self._raw = logits.index_select(0, flat)
        adjusted = adjust(self._raw, self._judged, self._requests)
        if adjusted is self._raw:
            return logits
        return logits.float().index_copy(0, flat, adjusted)

    def logprobs(self, counts: np.ndarray, tokens: np.ndarray) -> dict[int, list[TokenLogprobs]]:
        """What the rows that asked get, by their place in the plan, once the step has decided.

        counts: int32 `[rows of the step]`. tokens: int64 `[rows of the step, k + 1]`.
        """
        assert self._raw is not None
        new = [tokens[i, : counts[i] + 1].tolist() for i in self.which.tolist()]
        entries = token_logprobs(self._raw, self._judged, self._requests, new)
        return {row: entry for row, entry in zip(self.which.tolist(), entries, strict=True) if entry is not None}
