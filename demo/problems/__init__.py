"""Seeded generators of the problems that the demo pair is trained on."""

from demo.problems.chat import make_chat
from demo.problems.code import make_code
from demo.problems.copy import make_copy, make_short_edit
from demo.problems.math import make_math
from demo.problems.problem import Problem, is_held_out
from demo.problems.stories import make_story
from demo.problems.talk import make_small_sum, make_talk
from demo.problems.tools import make_calls, make_tools

__all__ = [
    "Problem",
    "is_held_out",
    "make_calls",
    "make_chat",
    "make_code",
    "make_copy",
    "make_math",
    "make_short_edit",
    "make_small_sum",
    "make_story",
    "make_talk",
    "make_tools",
]
