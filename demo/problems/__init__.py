"""Seeded generators of the three problem categories the demo pair is trained on."""

from demo.problems.chat import make_chat
from demo.problems.code import make_code
from demo.problems.math import make_math
from demo.problems.problem import Problem

__all__ = ["Problem", "make_chat", "make_code", "make_math"]
