"""Grading completions: rewards by name, their weights, and rewards that fail.

Nothing here imports torch, so that worker processes start in a fraction of a second.
"""

from lockstep.rl.grading.calling import LARGEST, Grader, Job, Outcome, call_rewards, refuse_none
from lockstep.rl.grading.totals import Grade, failures, grade, grade_here, refuse_too_many, totals

__all__ = [
    "LARGEST",
    "Grade",
    "Grader",
    "Job",
    "Outcome",
    "call_rewards",
    "failures",
    "grade",
    "grade_here",
    "refuse_none",
    "refuse_too_many",
    "totals",
]
