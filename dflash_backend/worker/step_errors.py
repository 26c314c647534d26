"""Which errors of a step the engine survives."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dflash_backend.core.plan import StepFailed, StepOutOfMemory, StepPlan
from dflash_backend.worker.write_guard import KVWriteError

_log = logging.getLogger(__name__)


@contextmanager
def step_errors(plan: StepPlan, device: torch.device) -> Iterator[None]:
    """Turn an error within the block, which runs `plan`, into `StepFailed`.

    Three kinds pass unchanged: `StepOutOfMemory`, which the core answers otherwise; `KVWriteError`, since other
    requests' KV may be damaged; and the error of a GPU whose context is lost, which `torch.cuda.synchronize` raises.
    """
    try:
        yield
    except (StepOutOfMemory, KVWriteError):
        raise
    except Exception as error:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        _log.exception("step %d with the requests %s failed", plan.step_id, [row.request_id for row in plan.rows])
        raise StepFailed(f"{type(error).__name__}: {error}") from error
