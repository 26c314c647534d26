"""Measures a drafter on a set of prompts: how many tokens a step yields, and how many answers are right.

`dflash-triton eval`, `benchmarks` and the test of the published figures use it. `datasets` and `hub_sets` read
questions, `run` has them answered, `scoring` scores the answers, `figures` counts, `report` and `plot` show, `measure`
does all of it. `engine` answers in this process; any other `Answerer`, such as a client, can be measured instead. Only
`engine` imports the engine, so a running server can be measured from a machine without torch.
"""

from dflash_backend.evaluation.errors import EvaluationError, InvalidSetting
from dflash_backend.evaluation.questions import Question
from dflash_backend.evaluation.run import Answer, Answerer, Evaluation, ModelRequest, Sampling, evaluate

__all__ = [
    "Answer",
    "Answerer",
    "Evaluation",
    "EvaluationError",
    "InvalidSetting",
    "ModelRequest",
    "Question",
    "Sampling",
    "evaluate",
]
