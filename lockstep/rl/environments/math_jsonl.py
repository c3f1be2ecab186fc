"""Mathematics from JSONL: any problems with an answer, compared by math-verify."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import ClassVar

from lockstep.errors import UserError
from lockstep.rl.conversations import ConversationEnvironment
from lockstep.rl.environment import Example
from lockstep.rl.environments.math_checker import MathChecker
from lockstep.rl.environments.problems import needs_text, read_problems, text_of

NEEDS = "`problem` or `question`, and `answer` or `solution`"
INSTRUCTION = "\n\nReason step by step, and give the final answer in \\boxed{}."
LONGEST = 300
"""Characters of an answer: a longer one is none."""
NUMBER = re.compile(r"-?[0-9][0-9,]*(\.[0-9]+)?")
SUM = re.compile(r"[0-9)}]\s*(?:[-+*^!]|\\(?:times|cdot|div|pm)\b)|\\(?:binom|sum|prod|int|left\s*\()")
"""What leaves the work undone: 37*43 equals 1591, but is no answer."""
WORDS = re.compile(r"[A-Za-z]{2,}(?:[ -][A-Za-z]+)*")


class Math(ConversationEnvironment):
    """Lines of a problem and its answer; the reply's last `\\boxed{…}` is compared with it.

    The answer of a line is what stands behind `####` in it, or in its last `\\boxed{…}`, or all of it. The keys are
    tried in order: a subclass may name others. The reward is `correct`.
    """

    in_workers = True
    problem_keys: ClassVar[tuple[str, ...]] = ("problem", "question", "prompt")
    answer_keys: ClassVar[tuple[str, ...]] = ("answer", "solution")
    turns = 1
    unfinished: ClassVar[dict[str, float]] = {"correct": 0.0}

    def examples(self, split: str) -> Iterator[Example]:
        for where, values in read_problems(self.data, split, self.skip_bad_lines, NEEDS):
            problem, solution = text_of(values, self.problem_keys), text_of(values, self.answer_keys)
            answer = None if solution is None else final_answer(solution)
            if problem is not None and answer:
                yield Example(problem + INSTRUCTION, answer, where)
            elif not self.skip_bad_lines:
                if problem is None or solution is None:
                    raise needs_text(where, values, self.problem_keys if problem is None else self.answer_keys)
                raise UserError(
                    f"{where}: its answer is empty or longer than {LONGEST}; fix it or use --skip-bad-lines"
                )

    def reward(self, example: Example, completion: str) -> dict[str, float]:
        _, closed, after = completion.partition("</think>")
        given = last_boxed(after if closed else completion)
        return {"correct": float(given is not None and is_right(example.answer, given))}


def final_answer(solution: str) -> str:
    """The answer in a data set's solution; empty where it is too long to be one."""
    boxed = last_boxed(solution)
    found = solution.rpartition("####")[2] if "####" in solution else solution if boxed is None else boxed
    answer = found.strip().strip("$").strip()
    return answer if len(answer) <= LONGEST else ""


def last_boxed(text: str) -> str | None:
    """What the last `\\boxed{…}` holds, braces in it paired; None where there is none or it is not closed."""
    begin = text.rfind("\\boxed{")
    if begin < 0:
        return None
    begin += len("\\boxed{")
    depth = 1
    for place in range(begin, min(len(text), begin + LONGEST)):
        depth += {"{": 1, "}": -1}.get(text[place], 0) * (text[place - 1] != "\\")
        if depth == 0:
            return text[begin:place].strip()
    return None


def is_right(answer: str, given: str) -> bool:
    """Whether an answer equals the right one, as math-verify sees it; words, which it takes for products of letters,
    are compared as words. A number must be given as one, not as the sum that leads to it."""
    if plain(given) == plain(answer):
        return bool(plain(answer))
    if WORDS.fullmatch(plain(answer)):
        return False
    if NUMBER.fullmatch(plain(answer)) and SUM.search(given.lstrip("+-")):
        return False
    return _checker().equal(answer, given)


def plain(text: str) -> str:
    """An answer without the signs around it."""
    inner = re.fullmatch(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}", text.strip("$ ."))
    return " ".join((inner.group(1) if inner else text).strip("$ .").casefold().split())


@cache
def _checker() -> MathChecker:
    return MathChecker()
