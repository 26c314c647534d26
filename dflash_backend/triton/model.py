"""The Triton model: Triton's Python backend calls it, and it hands everything to the `TritonService`.

Imported inside Triton's stub only, by `model_repository/dflash/1/model.py` and `backends/vllm/model.py`.
"""

import json
import os
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from dflash_backend.checkpoints import CheckpointError
from dflash_backend.config import ConfigError, EngineConfig
from dflash_backend.engine_client.client import EngineError
from dflash_backend.heap import freeze_heap
from dflash_backend.triton.model_config import (
    check_model_config,
    complete_model_config,
    num_instances,
    read_model_json,
    use_gpus_of_model,
)
from dflash_backend.triton.service import TritonService
from dflash_backend.without_torch import leave_torch_out


class TritonPythonModel:
    """Decoupled: `execute` queues requests and returns at once, responses are sent as the engine yields tokens."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Add the inputs, outputs and transaction policy that a config.pbtxt leaves out."""
        complete_model_config(config)
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Load the models that config.pbtxt, a model.json as of Triton's vLLM backend and the environment name."""
        leave_torch_out()
        model_config = json.loads(args["model_config"])
        values = {name: value["string_value"] for name, value in model_config.get("parameters", {}).items()}
        version = Path(args["model_repository"]) / args["model_version"]
        try:
            check_model_config(model_config)
            use_gpus_of_model(args, values, os.environ)
            config = EngineConfig.load(values, os.environ, model_json=read_model_json(version / "model.json"))
            self._service = TritonService(
                config,
                args["model_name"],
                pb_utils,
                instance=args["model_instance_name"],
                version=args["model_version"],
                server_pid=os.getppid(),
                as_vllm=model_config.get("backend") == "vllm",
                num_instances=num_instances(model_config),
            )
        except (ConfigError, CheckpointError, EngineError) as error:
            raise pb_utils.TritonModelException(str(error)) from None
        freeze_heap()

    def execute(self, requests: list[Any]) -> None:
        """Queue the requests."""
        for request in requests:
            self._service.submit(request)

    def is_ready(self) -> bool:
        """Whether the engine takes requests, for Triton's readiness end points (python_backend pull request 430, 2026).
        An older Triton reports ready for as long as the stub lives; there the metric `dflash:engine_ready` is right."""
        return self._service.ready

    def finalize(self) -> None:
        """Finish what runs and end the engine process."""
        self._service.close()
