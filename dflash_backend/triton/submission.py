"""Reads one Triton request: the queue is checked first, then inputs and parameters are validated and tokenised."""

from __future__ import annotations

import dataclasses
from typing import Any

from dflash_backend.engine_client.client import QueueLoad
from dflash_backend.engine_client.engines import Engines
from dflash_backend.messages import TENANTS_IN_QUEUE, SamplingParams
from dflash_backend.text.parameter_values import INT64_MAX
from dflash_backend.text.request import InputError, ParsedRequest, PromptError, RequestRules, parse_request
from dflash_backend.text.sampling_params import ParameterError
from dflash_backend.text.tokenizer import Tokenizer
from dflash_backend.triton.log import Log
from dflash_backend.triton.responder import one_line


class Refused(Exception):
    """A request cannot be taken. `status` is a gRPC status name; the message is for the client."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status


def input_text(tensor: Any) -> str:
    """The text of an input, a tensor of Triton's. Raises `Refused` where it is none."""
    values = tensor.as_numpy().reshape(-1).tolist()
    try:
        return values[0].decode() if isinstance(values[0], bytes) else str(values[0])
    except (UnicodeDecodeError, IndexError):
        raise Refused("INVALID_ARGUMENT", f"the input {tensor.name()} is no text; it is one text in UTF-8") from None


class RequestReader:
    """Turns Triton requests into `ParsedRequest`s. Any thread may use it."""

    def __init__(self, tokenizer: Tokenizer, rules: RequestRules, max_queue_size: int, log: Log) -> None:
        self._tokenizer = tokenizer
        self._rules = rules
        self._max_queue_size = max_queue_size
        self._log = log

    def read(self, request: Any, engines: Engines) -> tuple[ParsedRequest, set[int]]:
        """Check and tokenise a request; the numbers of the engines whose queues have no place for it come with it.
        Raises `Refused`, also where that is so of all engines."""
        # Before any work: an overloaded server must refuse at next to no cost.
        self._full(engines, 1)
        try:
            return self._parse(request, engines)
        except Refused:
            raise
        except (InputError, PromptError, ParameterError) as error:
            raise Refused("INVALID_ARGUMENT", str(error)) from None
        except Exception as error:
            # Triton could not hand over its inputs: this request alone ends.
            self._log.error(f"a request could not be read: {one_line(error)}")
            raise Refused("INTERNAL", f"the request could not be read: {one_line(error)}") from error

    def _parse(self, request: Any, engines: Engines) -> tuple[ParsedRequest, set[int]]:
        full: set[int] = set()

        def check_queue(sampling: SamplingParams) -> None:
            full.update(self._full(engines, sampling.n, sampling.tenant))

        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        try:
            parameters = request.parameters()
        except UnicodeDecodeError:
            # Triton lets half a surrogate pair of HTTP's JSON pass.
            raise InputError("the request's parameters are not UTF-8 text") from None
        rules = self._rules
        if timeout_us := request.timeout():
            # Triton does not leave the one of its own protocol among the parameters.
            defaults = {**rules.sampling_defaults, "timeout": min(timeout_us, INT64_MAX)}
            rules = dataclasses.replace(rules, sampling_defaults=defaults)
        return parse_request(inputs, parameters, self._tokenizer, engines.ready, rules, check_queue), full

    def _full(self, engines: Engines, num_completions: int, tenant: str | None = None) -> set[int]:
        """The engines whose queues have no place for a request; a `tenant` of None is not known yet. Raises `Refused`
        when all of them are full.

        The engine would refuse it too, but a step later, and each completion by itself.
        """
        loads = engines.queue_loads(tenant)
        full = {index for index, load in loads.items() if self._is_full(load, num_completions, tenant)}
        if full and len(full) == len(loads):
            least = min(load.of_tenant for load in loads.values())
            each = f" for each of {len(loads)} engines" if len(loads) > 1 else ""
            raise Refused(
                "UNAVAILABLE",
                f"{least} requests wait already{each}, this one has {num_completions}, and max_queue_size is "
                f"{self._max_queue_size}; try again later",
            )
        return full

    def _is_full(self, load: QueueLoad, num_completions: int, tenant: str | None) -> bool:
        limit, most = self._max_queue_size, TENANTS_IN_QUEUE * self._max_queue_size
        num_more = num_completions - load.num_free_rows
        if load.all_tenants + num_more > most:
            return True
        if tenant is None or load.all_tenants + num_more <= 0:
            return False
        # As the engine does (`core/admission.py:check_queue`): else what it will refuse fills the queue until its next
        # step, and nothing is left for a tenant that has nothing there.
        left = most - (load.all_tenants - load.num_free_rows)
        return load.of_tenant + num_more > (min(limit, left) if load.of_tenant else limit)
