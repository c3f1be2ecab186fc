"""Grades completions: rewards by name, their weights, and failed rewards.

Nothing here imports torch, so that worker processes start in a fraction of a second.
"""

from lockstep.rl.grading.calling import LARGEST, Grader, Job, Outcome, call_rewards, refuse_none
from lockstep.rl.grading.totals import Grade, InProcessGrader, failures, grade, grade_here, refuse_too_many, totals

__all__ = [
    "LARGEST",
    "Grade",
    "Grader",
    "InProcessGrader",
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
