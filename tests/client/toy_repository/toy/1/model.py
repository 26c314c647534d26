"""A Triton model that echoes: each byte of the prompt is a token, each delta one character of it.

Completion i of n echoes all but the last i characters, so that they end one after the other. Each token has the
log-probability -0.5. Special prompts: `error STATUS`, as the sampling parameter `refuse`, answers with that error,
`break STATUS` sends one delta and then that error, `busy NAME COUNT` is refused COUNT times before it is echoed,
`forever` streams until it is cancelled, `silent` waits until it is cancelled, but no longer than a second; a
cancellation appends a line to the file named by TOY_CANCEL_LOG. TOY_FAIL in the environment fails the load with its
text, TOY_HANG keeps it from ending, TOY_CHILD leaves a child process running.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from typing import NamedTuple

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
        self.refused = Counter()
        threading.Thread(target=beat, args=(os.environ["DFLASH_HEARTBEAT_FILE"],), daemon=True).start()

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

        if flag("describe"):
            sender.send(response([Piece("{}", "None", None)], 0), flags=FINAL)
            return
        prompt = text_of("text_input")
        if prompt is None and (messages := text_of("messages")) is not None:
            prompt = "".join(f"<{m['role']}>{m['content']}" for m in json.loads(messages))
        if prompt is None:
            ids = pb_utils.get_input_tensor_by_name(request, "input_ids").as_numpy()
            prompt = bytes(ids.astype(np.uint8).tolist()).decode()
        sampling = json.loads(text_of("sampling_parameters") or "{}")
        word, _, rest = prompt.partition(" ")
        if "refuse" in sampling:
            word, rest = "error", sampling["refuse"]
        if word in ("forever", "silent"):
            self._wait_until_cancelled(sender, word == "forever")
        elif word in ("error", "break"):
            if word == "break":
                sender.send(response([Piece("partial", "None", None)], len(prompt)))
            refuse(sender, rest, f"toy says {rest}")
        elif word == "busy" and self.refused[rest] < int(rest.split()[1]):
            self.refused[rest] += 1
            refuse(sender, "UNAVAILABLE", "toy is busy; try again later")
        else:
            self._echo(sender, prompt, sampling, flag)

    def _echo(self, sender, prompt, sampling, flag):
        text = prompt[: int(sampling.get("max_tokens", 16))]
        texts = [text[: len(text) - i] for i in range(int(sampling.get("n", 1)))]
        accepted = {"num_drafts": 2, "num_accepted_tokens": 3, "acceptance_length": 2.5}
        stats = json.dumps({**accepted, "num_cached_tokens": 0, "sampling": sampling})
        steps = max(len(text), 1) if flag("stream") else 1
        prefix = prompt if not flag("stream") and not flag("exclude_input_in_output") else ""
        for step in range(steps):
            pieces = []
            for whole in texts:
                part = whole[step : step + 1] if flag("stream") else whole
                ended = step >= len(whole) - 1 or not flag("stream")
                pieces.append(Piece(part, "stop" if ended else "None", stats if step == steps - 1 else None))
            sender.send(response(pieces, len(prompt), flag, prefix), flags=FINAL if step == steps - 1 else 0)

    def _wait_until_cancelled(self, sender, stream):
        end = time.monotonic() + 1
        while not sender.is_cancelled():
            if stream:
                sender.send(response([Piece("x", "None", None)], 1))
            elif time.monotonic() > end:
                sender.send(response([Piece("at last", "stop", None)], 1), flags=FINAL)
                return
            time.sleep(0.02)
        with open(os.environ["TOY_CANCEL_LOG"], "a") as log:
            log.write("cancelled\n")
        refuse(sender, "CANCELLED", "the request was cancelled")


def beat(path):
    """Touch the file over and over, as the project's model does while it lives, and say how many requests it has."""
    while True:
        with open(path, "w"):
            pass
        os.utime(path)
        if num_requests := os.environ.get("TOY_REQUESTS"):
            with open(f"{path}-{os.getpid()}", "w") as file:
                file.write(num_requests)
        time.sleep(0.2)


class Piece(NamedTuple):
    """What is new of a completion."""

    text: str
    finish_reason: str
    stats: str | None


def response(pieces, num_input_tokens, flag=lambda name: False, prefix=""):
    """A response with a piece of each completion."""
    ids = [np.frombuffer(piece.text.encode(), dtype=np.uint8).astype(np.int32) for piece in pieces]
    tensors = [
        strings("text_output", [prefix + piece.text for piece in pieces]),
        strings("finish_reason", [piece.finish_reason for piece in pieces]),
        pb_utils.Tensor("num_input_tokens", np.array([num_input_tokens], dtype=np.uint32)),
        pb_utils.Tensor("num_output_tokens", np.array([len(of_piece) for of_piece in ids], dtype=np.uint32)),
        pb_utils.Tensor("token_ids", np.concatenate(ids)),
    ]
    if any(piece.stats for piece in pieces):
        tensors.append(strings("spec_stats", [piece.stats or "null" for piece in pieces]))
    if flag("return_logprobs"):
        tensors.append(strings("logprobs", [json.dumps([entry(token) for token in of_piece]) for of_piece in ids]))
    if flag("return_cumulative_logprob"):
        sums = np.array([-0.5 * len(of_piece) for of_piece in ids], dtype=np.float32)
        tensors.append(pb_utils.Tensor("cumulative_logprob", sums))
    return pb_utils.InferenceResponse(tensors)


def entry(token):
    """The log-probabilities at the position of a token."""
    return {str(token): {"logprob": -0.5, "rank": 1, "decoded_token": chr(token)}}


def strings(name, values):
    """A STRING tensor."""
    return pb_utils.Tensor(name, np.array([value.encode() for value in values], dtype=np.object_))


def refuse(sender, status, message):
    """End a request with an error."""
    name = {"INVALID_ARG": "INVALID_ARGUMENT"}.get(status, status)
    error = pb_utils.TritonError(f"{name}: {message}", getattr(pb_utils.TritonError, status))
    sender.send(pb_utils.InferenceResponse(error=error), flags=FINAL)
