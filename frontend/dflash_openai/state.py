"""What the endpoints of one front end share: the servers, their model's description and its tokenizer."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dflash_backend.checkpoints import CheckpointError
from dflash_backend.checkpoints.find import find_model
from dflash_backend.error_text import first_line
from dflash_backend.heap import freeze_heap
from dflash_backend.text.tokenizer import Tokenizer
from dflash_client.errors import ClientError
from dflash_openai.config import FrontendConfig
from dflash_openai.errors import ApiError, unavailable
from dflash_openai.notices import log_once
from dflash_openai.parsing import OutputFormat, select_output_format
from dflash_openai.prompts import PromptBuilder
from dflash_openai.readiness import Readiness
from dflash_openai.triton_pool import ModelDescription, TritonPool

if TYPE_CHECKING:
    from dflash_openai.generation import Generation

_LOG = logging.getLogger("dflash_openai")
PROBE_TIMEOUT_S = 5.0
# Between two attempts to reach a model that has not described itself yet, and between looks at one that has.
RETRY_S = 0.5
REFRESH_S = 5.0
# As those of `freeze_heap`, but that the collector looks at 50,000 objects at a time and not at 200,000: all requests
# wait for it. At everything it looks when no large answer is there, or after this many of them.
GC_THRESHOLDS = (10_000, 5, 10_000)
LOOKS_AT_YOUNG = 20
LARGE_ANSWER_BYTES = 2**20
# Large bodies and answers are read and written in threads, which the event loop waits for as long as each of them keeps
# the interpreter lock, one after the other: this many threads, and 1 ms for Python's 5.
NUM_THREADS = 2
SWITCH_S = 0.001


class Model:
    """A model that can take requests."""

    def __init__(
        self, names: tuple[str, ...], description: ModelDescription, prompts: PromptBuilder, output_format: OutputFormat
    ) -> None:
        """names: of the model, its id first, then of its LoRA adapters. output_format: how the model writes reasoning
        and tool calls."""
        self.names, self.description, self.prompts = names, description, prompts
        self.output_format = output_format
        self.created = int(time.time())

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer."""
        return self.prompts.tokenizer


class Frontend:
    """One front end. `connect` runs beside the requests; until it has found the model they get 503."""

    def __init__(self, config: FrontendConfig, pool: TritonPool | None = None) -> None:
        self.config = config
        self.pool = pool or TritonPool(config)
        self.readiness = Readiness(self.pool)
        self._model: Model | None = None
        self._why_not = "the front end has not reached its server yet"
        self._stopping = False
        # Those that are not closed yet.
        self.running: set[Generation] = set()

    def model(self, name: str | None = None) -> Model:
        """The model, if `name` is one of its names, or none. Raises `ApiError`: 503 before it is known, else 404."""
        if self._stopping:
            raise unavailable("this front end is shutting down; try again later")
        if self._model is None:
            raise unavailable(f"the model is not ready: {self._why_not}; try again later")
        if name and name not in self._model.names:
            raise ApiError(
                404,
                f"the model '{name}' does not exist; this server has '{self._model.names[0]}'",
                code="model_not_found",
                param="model",
            )
        return self._model

    async def connect(self) -> None:
        """Ask the servers for the model's description, again and again, and load the tokenizer that it names. It ends
        when it is cancelled."""
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(NUM_THREADS, "dflash-large"))
        while True:
            try:
                description = await self.pool.describe(PROBE_TIMEOUT_S)
                if self._model is None or self._model.description != description:
                    await self._use(description)
                await self.pool.look(PROBE_TIMEOUT_S)
            except (ClientError, CheckpointError, msgspec.ValidationError) as error:
                self._why_not = str(error)
            except Exception as error:  # noqa: BLE001 - the front end would never be ready, and nothing would say why
                self._why_not = f"its description or tokenizer cannot be read ({first_line(error)})"
                _LOG.exception("the front end cannot take its model; it will try again")
            if self._model is None:
                log_once("not ready", lambda: f"the model is not ready: {self._why_not}; its servers are asked again")
            self.collect_garbage()
            await asyncio.sleep(RETRY_S if self._model is None else REFRESH_S)

    def collect_garbage(self) -> None:
        """Look at everything, where there was much since the last time and little is there now."""
        is_due = gc.get_count()[2] > LOOKS_AT_YOUNG
        if is_due and all(generation.num_bytes < LARGE_ANSWER_BYTES for generation in self.running):
            gc.collect()

    def stop_taking_requests(self) -> None:
        """Refuse requests from now on; those that run go on."""
        self._stopping = True

    def end_requests(self) -> None:
        """End those that still run, with an error that their clients get."""
        for generation in list(self.running):
            generation.stop()

    async def close(self) -> None:
        """Close the connections; requests that still run are cancelled."""
        self.readiness.close()
        await self.pool.close()
        if self._model is not None:
            self._model.prompts.close()

    async def _use(self, description: ModelDescription) -> None:
        """Take a new description and its tokenizer."""
        directory = self._tokenizer_dir(description)
        tokenizer = await asyncio.to_thread(Tokenizer.load, directory, description.trust_messages)
        config = self.config
        if config.chat_template is not None:
            tokenizer.use_chat_template(config.chat_template)
        prompts = PromptBuilder(
            tokenizer,
            description.max_model_len,
            description.vocab_size,
            config.security.max_prompt_tokens,
            # Requests that have begun with the description before this one still need them.
            None if self._model is None else self._model.prompts.threads,
        )
        output = select_output_format(
            tokenizer.chat_template, tokenizer.special_token_ids, config.tool_call_parser, config.reasoning_parser
        )
        self._model = Model(self._names(description), description, prompts, output)
        # A request with many small objects would make the collector look at all of this over and over.
        freeze_heap()
        sys.setswitchinterval(SWITCH_S)
        gc.set_threshold(*GC_THRESHOLDS)

    def _tokenizer_dir(self, description: ModelDescription) -> Path:
        if self.config.tokenizer is not None:
            return find_model(self.config.tokenizer, "--tokenizer")
        path = Path(description.tokenizer)
        if not path.is_dir():
            raise CheckpointError(
                f"the tokenizer of the model is in {path}, which is not on this machine; give a directory that has it "
                "as --tokenizer"
            )
        return path

    def _names(self, description: ModelDescription) -> tuple[str, ...]:
        given, adapters = self.config.served_model_names, description.lora_names
        own = given or tuple(dict.fromkeys(filter(None, (description.target_model, self.config.model_name))))
        if both := [name for name in own if name in adapters]:
            raise CheckpointError(
                f"'{both[0]}' is the model's name and that of a LoRA adapter; give it another one with "
                "--served-model-name, or the adapter in lora_modules"
            )
        return (*own, *adapters)
