"""The error of everything that can stop an evaluation."""

from __future__ import annotations


class EvaluationError(Exception):
    """A data set or an answer cannot be used. The message is a sentence for the person who started the evaluation."""


class InvalidSetting(EvaluationError):
    """A setting of the evaluation makes no sense; the message says which, and what is allowed."""
