"""A Triton model that echoes: each byte of the prompt is a token, each delta one character of it.

Special prompts: `error STATUS` answers with that error, `break STATUS` sends one delta and then that error,
`forever` streams until it is cancelled and then appends a line to the file named by TOY_CANCEL_LOG. TOY_FAIL in the
environment fails the load with its text, TOY_HANG keeps it from ending, TOY_CHILD leaves a child process running.
"""

import json
import os
import subprocess
import sys
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """The class that Triton's Python backend looks for."""

    def initialize(self, args):
        """Say two progress lines; fail or hang if the test asks for it."""
        print("dflash: loading weights 50%", file=sys.stderr, flush=True)
        pb_utils.Logger.log_info("dflash: loading cache 100%")
        if os.environ.get("TOY_CHILD"):
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        if os.environ.get("TOY_FAIL"):
            raise ValueError(os.environ["TOY_FAIL"])
        if os.environ.get("TOY_HANG"):
            threading.Event().wait()
        self.instance = args["model_instance_name"]

    def execute(self, requests):
        """Answer each request in a thread of its own; decoupled, so nothing is returned."""
        for request in requests:
            threading.Thread(target=self._answer, args=(request, request.get_response_sender()), daemon=True).start()

    def _answer(self, request, sender):
        def text_of(name):
            tensor = pb_utils.get_input_tensor_by_name(request, name)
            return None if tensor is None else tensor.as_numpy()[0].decode()

        def flag(name):
            tensor = pb_utils.get_input_tensor_by_name(request, name)
            return tensor is not None and bool(tensor.as_numpy()[0])

        prompt = text_of("text_input")
        if prompt is None and (messages := text_of("messages")) is not None:
            prompt = "".join(f"<{m['role']}>{m['content']}" for m in json.loads(messages))
        if prompt is None:
            ids = pb_utils.get_input_tensor_by_name(request, "input_ids").as_numpy()
            prompt = bytes(ids.astype(np.uint8).tolist()).decode()
        word, _, status = prompt.partition(" ")
        if word == "forever":
            self._stream_until_cancelled(sender)
        elif word in ("error", "break"):
            if word == "break":
                sender.send(self._response("partial", len(prompt), last=False, stats=None))
            code = getattr(pb_utils.TritonError, status)
            error = pb_utils.TritonError(f"toy says {status}", code)
            sender.send(pb_utils.InferenceResponse(error=error), flags=FINAL)
        else:
            self._echo(sender, prompt, json.loads(text_of("sampling_parameters") or "{}"), flag)

    def _echo(self, sender, prompt, sampling, flag):
        text = prompt[: int(sampling.get("max_tokens", 16))]
        pieces = list(text) if flag("stream") else [text]
        if not flag("stream") and not flag("exclude_input_in_output"):
            pieces = [prompt + text]
        stats = {"num_drafts": 2, "num_accepted_tokens": 3, "acceptance_length": 2.5, "sampling": sampling}
        for i, piece in enumerate(pieces):
            last = i == len(pieces) - 1
            response = self._response(piece, len(prompt), last, json.dumps(stats) if last else None)
            sender.send(response, flags=FINAL if last else 0)

    def _stream_until_cancelled(self, sender):
        while not sender.is_cancelled():
            sender.send(self._response("x", 1, last=False, stats=None))
            time.sleep(0.02)
        with open(os.environ["TOY_CANCEL_LOG"], "a") as log:
            log.write("cancelled\n")
        error = pb_utils.TritonError("cancelled", pb_utils.TritonError.CANCELLED)
        sender.send(pb_utils.InferenceResponse(error=error), flags=FINAL)

    @staticmethod
    def _response(piece, num_input_tokens, last, stats):
        ids = np.frombuffer(piece.encode(), dtype=np.uint8).astype(np.int32)
        tensors = [
            pb_utils.Tensor("text_output", np.array([piece.encode()], dtype=np.object_)),
            pb_utils.Tensor("finish_reason", np.array([b"stop" if last else b"None"], dtype=np.object_)),
            pb_utils.Tensor("num_input_tokens", np.array([num_input_tokens], dtype=np.uint32)),
            pb_utils.Tensor("num_output_tokens", np.array([len(ids)], dtype=np.uint32)),
            pb_utils.Tensor("token_ids", ids),
        ]
        if stats is not None:
            tensors.append(pb_utils.Tensor("spec_stats", np.array([stats.encode()], dtype=np.object_)))
        return pb_utils.InferenceResponse(tensors)
