"""Sends one request, reads its answer and compares it with the expected one."""

from __future__ import annotations

from collections.abc import Mapping

from dflash_client import Cancelled, ClientError, Delta, DFlashClient, Unavailable
from dflash_client.stream import Stream
from load_tests.expected_answers import ExpectedAnswer
from load_tests.samples import Recorder, Sample, WrongAnswer
from load_tests.workload import Question, Request


class RequestRunner:
    """Sends requests over one client, which all users share."""

    def __init__(
        self,
        client: DFlashClient,
        questions: Mapping[str, Question],
        expected: Mapping[str, ExpectedAnswer],
        recorder: Recorder,
    ) -> None:
        self._client = client
        self._questions = questions
        self._expected = expected
        self._recorder = recorder
        self._cancelled_at_end: set[Stream] = set()
        # Those of them that this client has cancelled.
        self._cancelled: set[Stream] = set()

    def run(self, request: Request, sample: Sample) -> None:
        """Send the request and fill in the sample, also where the server answers with an error."""
        answer = ReceivedAnswer(self._expected[request.question])
        stream = self._client.stream(
            answer.expected.prompt,
            **self._questions[request.question].sampling(),  # type: ignore[arg-type]
            cache_salt=request.salt or None,
            tenant=request.tenant or None,
        )
        try:
            was_cancelled = self._read(stream, request, sample, answer)
        except Unavailable as error:
            self._recorder.end(sample, "refused", error.status)
        except ClientError as error:
            self._recorder.end(sample, "error", f"{error.status}: {error}")
        else:
            if not (answer.is_right_so_far if was_cancelled else answer.is_right):
                self._recorder.end(sample, "wrong")
                self._recorder.keep_wrong(answer.as_wrong(sample))
            else:
                self._recorder.end(sample, "cancelled" if was_cancelled else "right")

    def _read(self, stream: Stream, request: Request, sample: Sample, answer: ReceivedAnswer) -> bool:
        """Read the stream to its end, or until the request is to be cancelled; returns whether it was."""
        if request.cancel_at_end:
            self._cancelled_at_end.add(stream)
        try:
            with stream:
                for number, delta in enumerate(stream, 1):
                    answer.add(delta)
                    if delta.num_output_tokens:
                        self._recorder.add_tokens(sample, delta.num_output_tokens)
                    _add_stats(sample, delta)
                    if number == request.cancel_after and delta.finish_reason is None:
                        return True
        except Cancelled:
            # What the server cancels without being asked to is an error.
            if stream not in self._cancelled:
                raise
            return True
        finally:
            self._cancelled_at_end.discard(stream)
            self._cancelled.discard(stream)
        return False

    def end_load(self) -> None:
        """Cancel the requests in flight that are not to outlive the load."""
        for stream in list(self._cancelled_at_end):
            self._cancelled.add(stream)
            stream.cancel()


class ReceivedAnswer:
    """The answer as it comes, beside the expected one."""

    def __init__(self, expected: ExpectedAnswer) -> None:
        self.expected = expected
        self._token_ids: list[int] = []
        self._text = ""
        self._finish_reason: str | None = None

    def add(self, delta: Delta) -> None:
        """Append a response."""
        self._token_ids += delta.token_ids
        self._text += delta.text
        self._finish_reason = delta.finish_reason or self._finish_reason

    @property
    def is_right_so_far(self) -> bool:
        """Whether the expected answer begins with what has come."""
        token_ids = self.expected.token_ids[: len(self._token_ids)]
        return tuple(self._token_ids) == token_ids and self.expected.text.startswith(self._text)

    @property
    def is_right(self) -> bool:
        """Whether tokens, text and finish reason are the expected ones."""
        expected = self.expected
        received = (tuple(self._token_ids), self._text, self._finish_reason)
        return received == (expected.token_ids, expected.text, expected.finish_reason)

    def as_wrong(self, sample: Sample) -> WrongAnswer:
        """The record of a wrong answer."""
        return WrongAnswer(
            at_s=sample.ended_s,
            phase=sample.phase,
            question=sample.question,
            salt=sample.salt,
            prompt=self.expected.prompt,
            expected_token_ids=list(self.expected.token_ids),
            got_token_ids=self._token_ids,
            expected_text=self.expected.text,
            got_text=self._text,
            expected_finish_reason=self.expected.finish_reason,
            got_finish_reason=self._finish_reason,
        )


def _add_stats(sample: Sample, delta: Delta) -> None:
    if delta.num_input_tokens is not None:
        sample.num_prompt_tokens = delta.num_input_tokens
    if delta.spec_stats is not None:
        sample.num_cached_tokens = delta.spec_stats["num_cached_tokens"]
        sample.num_drafts = delta.spec_stats["num_drafts"]
        sample.num_accepted = delta.spec_stats["num_accepted_tokens"]
