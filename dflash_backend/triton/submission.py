"""Reads one Triton request: the queue is checked first, then inputs and parameters are validated and tokenised."""

from __future__ import annotations

import dataclasses
from typing import Any

from dflash_backend.engine_client.client import EngineClient
from dflash_backend.messages import TENANTS_IN_QUEUE, EngineReady, SamplingParams
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


class RequestReader:
    """Turns Triton requests into `ParsedRequest`s. Any thread may use it."""

    def __init__(self, tokenizer: Tokenizer, rules: RequestRules, max_queue_size: int, log: Log) -> None:
        self._tokenizer = tokenizer
        self._rules = rules
        self._max_queue_size = max_queue_size
        self._log = log

    def read(self, request: Any, engine: EngineClient, ready: EngineReady) -> ParsedRequest:
        """Check and tokenise a request. Raises `Refused`."""
        # Before any work: an overloaded server must refuse at next to no cost.
        self._check_queue(engine, 1)
        try:
            return self._parse(request, engine, ready)
        except Refused:
            raise
        except (InputError, PromptError, ParameterError) as error:
            raise Refused("INVALID_ARGUMENT", str(error)) from None
        except Exception as error:
            # Triton could not hand over its inputs: this request alone ends.
            self._log.error(f"a request could not be read: {one_line(error)}")
            raise Refused("INTERNAL", f"the request could not be read: {one_line(error)}") from error

    def _parse(self, request: Any, engine: EngineClient, ready: EngineReady) -> ParsedRequest:
        def check_queue(sampling: SamplingParams) -> None:
            self._check_queue(engine, sampling.n, sampling.tenant)

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
        return parse_request(inputs, parameters, self._tokenizer, ready, rules, check_queue)

    def _check_queue(self, engine: EngineClient, num_completions: int, tenant: str | None = None) -> None:
        """Raise `Refused` when the queue has no place for a request; a `tenant` of None is not known yet.

        The engine would refuse it too, but a step later, and each completion by itself.
        """
        limit = self._max_queue_size
        all_waiting, waiting, num_free_rows = engine.queue_load(tenant)
        num_more = num_completions - num_free_rows
        is_full = all_waiting + num_more > TENANTS_IN_QUEUE * limit
        if tenant is not None and all_waiting + num_more > 0:
            is_full = is_full or waiting + num_more > limit
        if is_full:
            raise Refused(
                "UNAVAILABLE",
                f"{waiting} requests wait already, this one has {num_completions}, and max_queue_size is {limit}; try "
                "again later",
            )
