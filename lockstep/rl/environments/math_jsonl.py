"""Math problems from JSONL files, with answers compared by math-verify."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import ClassVar

from lockstep.errors import UserError
from lockstep.rl.conversations import ConversationEnvironment
from lockstep.rl.environment import Example
from lockstep.rl.environments.math_checker import MathChecker
from lockstep.rl.environments.problems import answer_of, needs_text, prompt_of, read_problems

NEEDS = "`problem` or `question`, and `answer` or `solution`"
INSTRUCTION = "\n\nReason step by step, and give the final answer in \\boxed{}."
LONGEST = 300
"""Most characters of an answer: anything longer does not count as one."""
BOXED = "\\boxed"
UNIT = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\(?:text|textrm|mathrm|mbox)\{[^{}]*\}(?:\^\{?[0-9]\}?)?")
"""Degrees, and words with a power behind them: after a number they are its unit, and no power of it."""
NUMBER = re.compile(r"-?[0-9][0-9,]*(\.[0-9]+)?")
SUM = re.compile(r"[0-9)}]\s*(?:[-+*^!]|\\(?:times|cdot|div|pm)\b)|\\(?:binom|sum|prod|int|left\s*\()")
"""Unevaluated expressions: 37*43 equals 1591, but is not an answer."""
WORDS = re.compile(r"[A-Za-z]{2,}(?:[ -][A-Za-z]+)*")


class Math(ConversationEnvironment):
    """Lines of a problem and its answer; the reply's last `\\boxed{…}` is compared with it.

    The answer of a line is what follows `####`, or the content of its last `\\boxed{…}`, or all of it. The keys are
    tried in order; a subclass can name others. The reward is `correct`.
    """

    in_workers = True
    problem_keys: ClassVar[tuple[str, ...]] = ("problem", "question", "prompt")
    answer_keys: ClassVar[tuple[str, ...]] = ("answer", "solution")
    turns = 1
    unfinished: ClassVar[dict[str, float]] = {"correct": 0.0}

    def examples(self, split: str) -> Iterator[Example]:
        for where, values in read_problems(self.data, split, self.skip_bad_lines, NEEDS):
            problem = prompt_of(values, self.problem_keys, INSTRUCTION)
            solution = answer_of(values, self.answer_keys)
            answer = None if solution is None else final_answer(solution)
            if problem is not None and answer:
                yield Example(problem, answer, where, chat_template_kwargs=values["chat_template_kwargs"])
            elif not self.skip_bad_lines:
                if problem is None or solution is None:
                    raise needs_text(where, values, self.problem_keys if problem is None else self.answer_keys)
                raise UserError(
                    f"{where}: its answer is empty or longer than {LONGEST} characters; fix it or use --skip-bad-lines"
                )

    def reward(self, example: Example, completion: str) -> dict[str, float]:
        _, closed, after = completion.partition("</think>")
        given = last_boxed(after if closed else completion)
        return {"correct": float(given is not None and is_right(example.answer, given))}


def final_answer(solution: str) -> str:
    """The answer in a dataset's solution; empty if it is too long."""
    boxed = last_boxed(solution)
    found = solution.rpartition("####")[2] if "####" in solution else solution if boxed is None else boxed
    answer = found.strip().strip("$").strip()
    return answer if len(answer) <= LONGEST else ""


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{…}`, with balanced braces, or what follows `\\boxed` up to the formula's end, as
    some of MATH's solutions write it; None if there is none or it is not closed."""
    begin = text.rfind(BOXED)
    if begin < 0:
        return None
    inside = text[begin + len(BOXED) : begin + len(BOXED) + LONGEST]
    if not inside.lstrip().startswith("{"):
        bare = re.match(r"(?:\s+|(?=[0-9]))([^$\n]*)", inside)
        return (bare[1].strip(" .") or None) if bare else None
    inside = inside.lstrip()
    depth = 0
    for place, character in enumerate(inside):
        depth += {"{": 1, "}": -1}.get(character, 0) * (inside[place - 1] != "\\" or not place)
        if depth == 0:
            return inside[1:place].strip()
    return None


def is_right(answer: str, given: str) -> bool:
    """Whether an answer equals the right one, according to math-verify; words, which it reads as products of letters,
    are compared as words. A number must be given as a number, not as an expression for it."""
    if plain(given) == plain(answer):
        return bool(plain(answer))
    if WORDS.fullmatch(plain(answer)):
        return False
    if NUMBER.fullmatch(plain(answer)) and SUM.search(UNIT.sub("", given).lstrip("+-")):
        return False
    return _checker().equal(answer, given)


def plain(text: str) -> str:
    """An answer without surrounding markup."""
    inner = re.fullmatch(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}", text.strip("$ ."))
    return " ".join((inner.group(1) if inner else text).strip("$ .").casefold().split())


@cache
def _checker() -> MathChecker:
    return MathChecker()
