"""Stands in for Triton's `triton_python_backend_utils`, which exists only inside its stub process."""

from __future__ import annotations

import queue
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

FINAL = 1
WAIT_S = 20.0


class Tensor:
    def __init__(self, name: str, array: Any) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        return self._array


class TritonError:
    INVALID_ARG, UNAVAILABLE, INTERNAL, CANCELLED = "INVALID_ARG", "UNAVAILABLE", "INTERNAL", "CANCELLED"

    def __init__(self, message: str, code: str) -> None:
        self.message, self.code = message, code


class InferenceResponse:
    def __init__(self, output_tensors: list[Tensor] | None = None, error: TritonError | None = None) -> None:
        self.outputs = {tensor.name(): _value(tensor.as_numpy()) for tensor in output_tensors or []}
        self.error = error


def _value(array: Any) -> Any:
    """A list of numbers; a single text as it is, several as a list."""
    if array.dtype != np.object_:
        return array.tolist()
    texts = [element.decode() for element in array]
    return texts[0] if len(texts) == 1 else texts


class TritonModelException(Exception):
    """What Triton's module raises."""


class Sender:
    """Keeps the responses of one request, and fails where Triton does: at a response after the last.

    `failures` is how many of the next sends raise, as when the shared memory is full; like Triton's own, a last
    response that fails counts as sent. `misuse` has what the caller should not have done.
    """

    def __init__(self) -> None:
        self.cancelled = False
        self.failures = 0
        self.unreachable = False
        self.misuse: list[str] = []
        # Called before the last response is sent.
        self.before_last: Callable[[], None] = lambda: None
        self._ended = False
        self._responses: queue.Queue[tuple[InferenceResponse | None, int]] = queue.Queue()

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if self._ended:
            self.misuse.append("a response after the last one")
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        self._ended = bool(flags & FINAL)
        if self._ended:
            self.before_last()
        if self.failures:
            self.failures -= 1
            raise TritonModelException(
                "Failed to increase the shared memory pool size for key 'dflash_1_ab' to 4 bytes"
            )
        self._responses.put((response, flags))

    @property
    def answered(self) -> bool:
        """Whether the last response was sent."""
        return self._ended

    def is_cancelled(self) -> bool:
        if self._ended:
            self.misuse.append("asked about a request that has ended")
        if self.unreachable:
            raise TritonModelException("no shared memory is left to ask with")
        return self.cancelled

    def next(self) -> InferenceResponse:
        """Wait for one response."""
        response = self._responses.get(timeout=WAIT_S)[0]
        assert response is not None, self.misuse
        return response

    def all(self) -> list[InferenceResponse]:
        """Wait for the last response; all of them."""
        responses = []
        while True:
            response, flags = self._responses.get(timeout=WAIT_S)
            if response is not None:
                responses.append(response)
            if flags & FINAL:
                assert not self.misuse, self.misuse
                return responses


class Request:
    """A Triton request. Texts become STRING inputs, booleans BOOL and lists INT64 ones."""

    def __init__(self, parameters: str = "{}", **inputs: Any) -> None:
        self.sender = Sender()
        # In microseconds, of Triton's own protocol; 0 is none.
        self.timeout_us = 0
        self._parameters = parameters
        self._inputs = [Tensor(name, as_input(value)) for name, value in inputs.items()]

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def parameters(self) -> str:
        return self._parameters

    def timeout(self) -> int:
        return self.timeout_us

    def get_response_sender(self) -> Sender:
        return self.sender


def as_input(value: Any) -> Any:
    """The array that Triton makes of an input."""
    if isinstance(value, bool):
        return np.array([value])
    if isinstance(value, str | bytes):
        return np.array([value.encode() if isinstance(value, str) else value], dtype=np.object_)
    return np.array(value, dtype=np.int64) if isinstance(value, list) else value


class FakeTriton:
    """The module. `values` are those of the metrics by name and labels, without model and version; `lines` is the
    log. An old Triton has no histograms of its own."""

    def __init__(self, native_histograms: bool = True) -> None:
        self.lines: list[str] = []
        # The histograms of Triton's own that were given an observation.
        self.observations: list[str] = []
        self.labels: list[dict[str, str]] = []
        self.values: dict[tuple[str, ...], float] = defaultdict(float)
        self.Tensor, self.InferenceResponse, self.TritonError = Tensor, InferenceResponse, TritonError
        self.TritonModelException = TritonModelException
        self.metrics_fail = False
        self.TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL
        write = self.lines.append
        self.Logger = SimpleNamespace(log_info=write, log_warn=write, log_error=write)
        fake = self

        class MetricFamily:
            COUNTER, GAUGE = "counter", "gauge"

            def __init__(self, name: str, description: str, kind: str) -> None:
                self.name, self.kind = name, kind

            def Metric(self, labels: dict[str, str], buckets: list[float] | None = None) -> Any:
                assert (buckets is not None) == (self.kind == "histogram")
                fake.labels.append(labels)
                others = [labels[name] for name in labels if name not in ("model", "version")]
                key = (self.name, *others)
                if buckets is not None:
                    return fake.histogram(key, buckets)
                fake.values[key] += 0

                def change(new: float) -> None:
                    if fake.metrics_fail:
                        raise TritonModelException("no shared memory is left for a metric")
                    fake.values[key] = new

                return SimpleNamespace(increment=lambda v: change(fake.values[key] + v), set=change)

        if native_histograms:
            MetricFamily.HISTOGRAM = "histogram"  # type: ignore[attr-defined]
        self.MetricFamily = MetricFamily

    def histogram(self, key: tuple[str, ...], buckets: list[float]) -> Any:
        """Triton's own histogram, which the page shows under these names."""
        name, *labels = key
        bounds = [*(f"{bound:.15g}" for bound in buckets), "+Inf"]
        counts = [(f"{name}_bucket", *labels, bound) for bound in bounds]
        for each in (*counts, (f"{name}_sum", *labels), (f"{name}_count", *labels)):
            self.values[each] += 0

        def observe(value: float) -> None:
            if self.metrics_fail:
                raise TritonModelException("no shared memory is left for a metric")
            self.observations.append(name)
            for each in counts:
                self.values[each] += value <= float(each[-1])
            self.values[f"{name}_sum", *labels] += value
            self.values[f"{name}_count", *labels] += 1

        return SimpleNamespace(observe=observe)

    def observed(self, name: str, *labels: str) -> tuple[float, float]:
        """How many observations a histogram has, and their sum."""
        count, total = (self.values[(f"{name}_{part}", *labels)] for part in ("count", "sum"))
        return count, total

    def buckets(self, name: str) -> dict[str, float]:
        """A histogram's observations up to each of its bounds."""
        return {key[1]: value for key, value in self.values.items() if key[0] == f"{name}_bucket"}

    def bounds(self, name: str) -> list[float]:
        """A histogram's bounds, the last one infinite."""
        return sorted({float(key[-1]) for key in self.values if key[0] == f"{name}_bucket"})
