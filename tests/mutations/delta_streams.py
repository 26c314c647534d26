"""Defects of delta streams, in Triton's package and in the client."""

from __future__ import annotations

from tests.mutations.mutant import mutants_of

SERVER = ("tests/triton/test_delta_streams.py",)
CLIENT = ("tests/client/test_delta_stream.py",)

DELTA_STREAM_MUTANTS = (
    *mutants_of(
        "dflash_backend/triton/delta_streams.py",
        SERVER,
        ("a second client of a name has the first one's deltas", "if name in self._streams:", "if False:"),
        ("a stream is not acknowledged", 'responder.send(self._responses.description("[]"), final=False)', "pass"),
        ("batches are not counted", "stream.num_batches += 1", "stream.num_batches += 0"),
        (
            "a stream that failed is tried again",
            "            self.close(stream)\n            raise\n",
            "            raise\n",
        ),
        ("a stream that is named ends", "if stream.name in named or", "if stream.name not in named or"),
        ("a reader that stops takes memory", "if len(self.waiting) + len(batch) > MOST_WAITING:", "if False:"),
        ("another user's process has the batches", "if user != os.geteuid():", "if False:"),
        (
            "what waits for a slow reader is forgotten",
            "                stream.socket.flush()\n",
            "                pass\n",
        ),
        ("a stream whose client has gone stays", " or self._has_gone(stream):", ":"),
        ("a stream that Triton cannot be asked about stays", "            return True\n", "            return False\n"),
        ("a stream ends without telling Triton", "        stream.responder.end()\n", ""),
        ("entries have ids that no one asked for", "if returns.token_ids else len(completion.token_ids)", ""),
    ),
    *mutants_of(
        "dflash_backend/triton/running_requests.py",
        SERVER,
        (
            "a batch has requests that have nothing new",
            "in self._requests and each.state.has_output]",
            "in self._requests]",
        ),
        (
            "what a batch had is sent again",
            "            request.answered = True\n            request.state.clear()\n        self",
            "            request.answered = True\n        self",
        ),
        (
            "batches do not count for the largest answer",
            "            request.responder.num_bytes_sent += request.state.num_bytes\n",
            "",
        ),
        (
            "tokens of batches are not counted",
            'count("dflash:generation_tokens_total", num_tokens)',
            'count("dflash:generation_tokens_total", 0)',
        ),
        (
            "a request in a batch waits for as much as a response",
            "sum(1 + BATCHED_RESPONSE * (num_requests - 1)",
            "sum(num_requests",
        ),
        (
            "first tokens wait for others",
            "self._send_waiting(at_once=begins)",
            "self._send_waiting()",
        ),
        (
            "first tokens come alone",
            "(request.answered or self._stream_of(request) is not None)",
            "request.answered",
        ),
        ("responses of its own come after a batch", "if request.num_alone < 2 else None", "if True else None"),
        ("each entry begins its answer", "entry(each.state, not each.answered)", "entry(each.state, True)"),
        ("prompts that begin in a batch are not counted", "        if num_prompt_tokens:\n", "        if False:\n"),
        ("last responses do not say what comes before", "            request.delta_stream = stream\n", ""),
        ("a stream is never the one that holds memory", "            self.delta_streams.close(together)\n", ""),
    ),
    *mutants_of(
        "dflash_backend/triton/service.py",
        SERVER,
        (
            "streams outlive the service",
            "        self._requests.delta_streams.close_all()\n        self._swaps.fail_all(BROKEN",
            "        self._swaps.fail_all(BROKEN",
        ),
    ),
    *mutants_of(
        "dflash_backend/text/request.py",
        SERVER,
        (
            "what a batch cannot hold is left out of it",
            "    if asked is not None or sampling.n > 1 or has_logprobs:\n        deltas = None\n",
            "",
        ),
        ("names that can be guessed", "if not FEWEST_NAME_CHARS <= len(name) <= MOST_NAME_CHARS:", "if not name:"),
    ),
    *mutants_of(
        "client/dflash_client/delta_stream.py",
        CLIENT,
        ("any process is the server", "user == os.geteuid() and self._batches", "self._batches"),
        ("a batch in two pieces is lost", "if len(self._data) < end:", "if False:"),
        ("batches on their way are not waited for", "            await batches.rest()\n", ""),
        (
            "a second process is the server",
            "if self._transport is not None:\n            return False",
            "if False:\n            return False",
        ),
        (
            "a socket that breaks leaves its requests",
            "        if self._is_server:\n            self._batches.end()\n",
            "        pass\n",
        ),
        ("all clients draw one name", "secrets.token_urlsafe(24)", '"a-name-of-all-clients"'),
        (
            "requests name a stream of a server that may have none",
            "is not None and self._is_known else None",
            "is not None else None",
        ),
        (
            "a stream is not named until it is open",
            "self._is_known = stream.is_open",
            "self._is_known = stream.is_open and not stream.has_ended",
        ),
        (
            "a server without streams is asked each time",
            "                self._refused_at = now\n",
            "                pass\n",
        ),
        (
            "deltas are lost without a word",
            "            if self.has_ended:\n                raise",
            "            if False:\n                raise",
        ),
        (
            "the acknowledgement is a batch",
            "            self.is_open = True\n            return\n",
            "            self.is_open = True\n",
        ),
        (
            "a batch is missed that comes before waiting for it has begun",
            "        while self.num_batches < num_batches:\n",
            "        num_batches = self.num_batches + 1\n        while self.num_batches < num_batches:\n",
        ),
        ("a reader gets the last of several deltas", "for entry in entries])],", "for entry in entries[-1:]])],"),
        (
            "requests that wait for a stream that ends wait on",
            "            self.has_ended = True\n            self._wake()\n",
            "            self.has_ended = True\n",
        ),
    ),
    *mutants_of(
        "client/dflash_client/grpc_transport.py",
        CLIENT,
        (
            "a last response does not wait for batches",
            "while inbox.stream.num_batches < num_before:",
            "while False:",
        ),
        (
            "a last response waits past its deadline",
            "remaining_s(self._deadline))\n        except",
            "None)\n        except",
        ),
        (
            "a request that waits for a batch is not cancelled",
            "            self._batch.cancel()\n",
            "            pass\n",
        ),
        ("batches overtake the first response", "has_begun = False\n", "has_begun = True\n"),
        ("an answer that begins in a batch waits for its end", "has_begun or inbox.begins", "has_begun"),
        ("an error overtakes batches", "if has_begun and inbox:", "if has_begun and inbox and not is_read:"),
        ("answers at once name a stream", "self.delta_streams if self._request.stream else None", "self.delta_streams"),
        (
            "requests that have ended keep their inbox",
            "                inbox.stream.leave(inbox)\n",
            "                pass\n",
        ),
    ),
)
