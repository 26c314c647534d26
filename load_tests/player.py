"""Sends one shot, reads its answer and checks it. Runs in the event loop of `bridge`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from dflash_client import AsyncDFlashClient, ClientError, Delta, Unavailable
from load_tests.recording import Outcome, Recorder, Sample, Wrong
from load_tests.reference import Expected
from load_tests.workload import Question, Shot


class Player:
    """Plays shots over one client, which has one connection (gRPC) or one pool of them (HTTP) for everybody."""

    def __init__(
        self,
        client: AsyncDFlashClient,
        questions: Mapping[str, Question],
        expected: Mapping[str, Expected],
        recorder: Recorder,
    ) -> None:
        self._client = client
        self._questions = questions
        self._expected = expected
        self._recorder = recorder

    async def play(self, shot: Shot, sample: Sample) -> Sample:
        """Send the shot and fill in the sample. Errors of the server end up in it too."""
        answer = _Answer(self._expected[shot.question])
        try:
            left_s = None if shot.until_s is None else max(0.0, shot.until_s - self._recorder.now())
            async with asyncio.timeout(left_s):
                outcome = await self._read(shot, sample, answer)
        except TimeoutError:
            outcome = "cancelled" if answer.is_right_so_far else "wrong"
            self._recorder.end(sample, outcome)
        except Unavailable as error:
            self._recorder.end(sample, "refused", error.status)
        except ClientError as error:
            self._recorder.end(sample, "error", f"{error.status}: {error}")
        else:
            self._recorder.end(sample, outcome)
            if outcome == "wrong":
                self._recorder.keep_wrong(answer.as_wrong(sample))
        return sample

    async def _read(self, shot: Shot, sample: Sample, answer: _Answer) -> Outcome:
        sampling = {
            **self._questions[shot.question].sampling(),
            "cache_salt": shot.salt or None,
            "tenant": shot.tenant or None,
        }
        previous = None
        async with self._client.stream(answer.expected.prompt, **sampling) as stream:  # type: ignore[arg-type]
            num_responses = 0
            async for delta in stream:
                now = self._recorder.now()
                answer.add(delta)
                _take_stats(sample, delta)
                if delta.num_output_tokens:
                    self._recorder.tokens(sample, now, delta.num_output_tokens)
                    if previous is None:
                        sample.first_s = now
                    else:
                        sample.gaps.append(now - previous)
                    previous = now
                num_responses += 1
                if shot.cancel_after == num_responses and delta.finish_reason is None:
                    return "cancelled" if answer.is_right_so_far else "wrong"
        return "right" if answer.is_right else "wrong"


class _Answer:
    """The answer as it comes, beside the expected one."""

    def __init__(self, expected: Expected) -> None:
        self.expected = expected
        self._token_ids: list[int] = []
        self._text = ""
        self._finish_reason: str | None = None

    def add(self, delta: Delta) -> None:
        self._token_ids += delta.token_ids
        self._text += delta.text
        self._finish_reason = delta.finish_reason or self._finish_reason

    @property
    def is_right_so_far(self) -> bool:
        length = len(self._token_ids)
        return tuple(self._token_ids) == self.expected.token_ids[:length] and self.expected.text.startswith(self._text)

    @property
    def is_right(self) -> bool:
        return (
            tuple(self._token_ids) == self.expected.token_ids
            and self._text == self.expected.text
            and self._finish_reason == self.expected.finish_reason
        )

    def as_wrong(self, sample: Sample) -> Wrong:
        return Wrong(
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


def _take_stats(sample: Sample, delta: Delta) -> None:
    if delta.num_input_tokens is not None:
        sample.num_prompt_tokens = delta.num_input_tokens
    if delta.spec_stats is not None:
        sample.num_cached_tokens = delta.spec_stats["num_cached_tokens"]
        sample.num_drafts = delta.spec_stats["num_drafts"]
        sample.num_accepted = delta.spec_stats["num_accepted_tokens"]
