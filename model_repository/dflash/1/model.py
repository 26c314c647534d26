"""The Triton model `dflash`: Triton's Python backend calls it, and it hands everything to the frontend service."""

import json
import os
from typing import Any

import triton_python_backend_utils as pb_utils

from dflash_backend.checkpoints import CheckpointError
from dflash_backend.config import ConfigError, EngineConfig
from dflash_backend.frontend.engine_client import EngineError
from dflash_backend.frontend.model_config import check_decoupled
from dflash_backend.frontend.service import FrontendService
from dflash_backend.heap import freeze_heap


class TritonPythonModel:
    """Decoupled: `execute` queues requests and returns at once, responses are sent as the engine yields tokens."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the models that the parameters of config.pbtxt and the environment name."""
        model_config = json.loads(args["model_config"])
        values = {name: value["string_value"] for name, value in model_config["parameters"].items()}
        try:
            check_decoupled(model_config)
            config = EngineConfig.load(values, os.environ)
            self._service = FrontendService(
                config, args["model_name"], pb_utils, instance=args["model_instance_name"], server_pid=os.getppid()
            )
        except (ConfigError, CheckpointError, EngineError) as error:
            raise pb_utils.TritonModelException(str(error)) from None
        freeze_heap()

    def execute(self, requests: list[Any]) -> None:
        """Queue the requests."""
        for request in requests:
            self._service.submit(request)

    def is_ready(self) -> bool:
        """Whether the engine takes requests. Asked by Triton's readiness end points since its Python backend knows this
        method (python_backend pull request 430, 2026); an older Triton reports ready for as long as the stub lives, and
        `dflash:engine_ready` on its metrics page is what tells."""
        return self._service.ready

    def finalize(self) -> None:
        """Finish what runs and end the engine process."""
        self._service.close()
