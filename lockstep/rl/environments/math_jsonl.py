"""Math problems from JSONL files, with answers compared by math-verify."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import ClassVar

from lockstep.errors import UserError
from lockstep.rl.conversations import ConversationEnvironment
from lockstep.rl.conversations.reasoning import answer_text
from lockstep.rl.environments.answer_forms import (
    CHANGED,
    NUMBER,
    POWER_OF_TEN,
    canonical,
    choice,
    in_other_money,
    same_text,
    without_bare_unit,
)
from lockstep.rl.environments.math_checker import MathChecker
from lockstep.rl.environments.problems import answer_of, needs_text, prompt_of, read_problems
from lockstep.rl.environments.protocol import Example

NEEDS = "`problem` or `question`, and `answer` or `solution`"
INSTRUCTION = "\n\nReason step by step, and give the final answer in \\boxed{}."
MAX_LENGTH = 300
"""Longer texts do not count as answers."""
BOX = re.compile(r"\\boxed(?![A-Za-z])")
FRAMED = re.compile(r"\\fbox(?![A-Za-z])")
BARE = re.compile(r"(?:\s+|(?=[0-9]))((?:(?!\\[)\]])[^$\n])*)")
"""The content of a box without braces: up to the formula's end, as in MATH's grading code."""
BETWEEN = re.compile(r"[\s$.]*(?:[,;]|[,;]?[\s$]*(?:and|or|\\text\{\s*(?:and|or)\s*\}))[\s$]*(?:[A-Za-z]\s*=\s*)?")
"""Separators between boxes that together are one answer."""
SUM = re.compile(r"[0-9)}]\s*(?:[-+*^!(]|\\(?:times|cdot|div|pm)\b)|\\(?:binom|sum|prod|int)\b")
"""Unevaluated expressions: 37*43 equals 1591, but does not count as the answer."""
PERCENT = "\\%"
FRACTION = re.compile(r"-?(?:\\[cdt]?frac\s*(?:\{([0-9]+)\}|([0-9]))\s*(?:\{([0-9]+)\}|([0-9]))|([0-9]+)/([0-9]+))")
DECIMAL_COMMA = re.compile(r"-?[0-9]+,(?:[0-9]{1,2}|[0-9]{4,})")
UNIT_LETTER = r"(?<![A-Za-z\\])([cdghlmost])(?![A-Za-z])"
"""A letter that math-verify treats as a unit at the end of a formula."""
ASSIGNED = re.compile(r"[A-Za-z]\s*=\s*")
LISTED = re.compile(r"[,;]|\\text|\b(?:and|or)\b")
WORDS = re.compile(r"[A-Za-z]{2,}(?:[ -][A-Za-z]+)*")


class Math(ConversationEnvironment):
    """Lines of a problem and its answer; the reply's last `\\boxed{…}` is compared with it.

    A line's answer is the text after `####`, or the content of its last `\\boxed{…}`, or its whole text. Keys are tried
    in order; a subclass can name others. The reward is `correct`.
    """

    in_workers = True
    problem_keys: ClassVar[tuple[str, ...]] = ("problem", "question", "prompt")
    answer_keys: ClassVar[tuple[str, ...]] = ("answer", "solution")
    turns = 1
    marks_reasoning = True
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
                problem = f"its answer is empty or longer than {MAX_LENGTH} characters"
                raise UserError(f"{where}: {problem}; fix it or use --skip-bad-lines")

    def reward(self, example: Example, completion: str) -> dict[str, float]:
        given = last_boxed(answer_text(completion))
        return {"correct": float(given is not None and is_right(example.answer, given))}


def final_answer(solution: str) -> str:
    """The answer in a data set's solution; empty if it is too long."""
    boxed = last_boxed(solution)
    text = solution.rpartition("####")[2] if "####" in solution else solution if boxed is None else boxed
    answer = text.strip().strip("$").strip()
    return answer if len(answer) <= MAX_LENGTH else ""


def last_boxed(text: str) -> str | None:
    """The content of the last box, or of the last ones if only commas, "and" or "or" separate them."""
    contents: list[str] = []
    following = 0
    for box in reversed(_boxes(text)):
        content, end = _content(text, box.end())
        if contents and not (content and 0 < following - end <= 40 and BETWEEN.fullmatch(text, end, following)):
            break
        if content is None:
            return None
        contents.insert(0, content)
        following = box.start()
        if sum(map(len, contents)) > MAX_LENGTH:
            break
    return ", ".join(dict.fromkeys(contents)) or None


def _boxes(text: str) -> list[re.Match[str]]:
    return list(BOX.finditer(text)) or list(FRAMED.finditer(text))


def _content(text: str, begin: int) -> tuple[str | None, int]:
    """The content of a box that opens before `begin`, and the position of its end."""
    inside = text[begin : begin + MAX_LENGTH]
    if not inside.lstrip().startswith("{"):
        bare = BARE.match(inside)
        return ((bare[1].strip(" .") or None), begin + bare.end()) if bare else (None, begin)
    depth = 0
    for index, character in enumerate(inside):
        depth += {"{": 1, "}": -1}.get(character, 0) * (inside[index - 1] != "\\" or not index)
        if depth == 0 and character == "}":
            return inside[:index].lstrip()[1:].strip(), begin + index + 1
    return None, begin


def is_right(answer: str, given: str) -> bool:
    """Whether an answer equals the correct one, according to math-verify.

    Words, which it parses as products of letters, are compared as words. A number must be given as a number, not as an
    expression.
    """
    expected, actual = canonical(answer), canonical(given)
    if in_other_money(answer, given):
        return False
    if same_text(expected, actual) or _same_choice(expected, actual):
        return True
    if WORDS.fullmatch(expected):
        return False
    if expected.endswith(PERCENT) or (actual.endswith(PERCENT) and not _below_one(expected)):
        # For 12.5%, 12.5 and 0.125 are accepted, too; for 12.5 so is 12.5%.
        values = (text.removesuffix(PERCENT).rstrip() for text in (expected, actual))
        return _equal(*values) or _equal(expected, actual)
    if actual.endswith(PERCENT):
        return _equal(f"({expected})*100", actual.removesuffix(PERCENT).rstrip())
    return _equal(expected, actual)


def _below_one(answer: str) -> bool:
    """Whether a canonical answer is a number between -1 and 1."""
    if fraction := FRACTION.fullmatch(answer):
        top, bottom = (int(part) for part in fraction.groups() if part)
        return top < bottom
    return bool(NUMBER.fullmatch(answer)) and abs(float(answer.replace(",", ""))) < 1


def _equal(expected: str, actual: str) -> bool:
    """Whether math-verify considers two canonical answers equal. A number must be stated as a number."""
    name, other = ASSIGNED.match(expected), ASSIGNED.match(actual)
    if name and ("=" not in actual or (other and other[0][0] == name[0][0])):
        expected = expected[name.end() :]
    is_pair = actual.startswith(("(", "[")) and "," in actual  # or an interval
    if NUMBER.fullmatch(expected) and (is_pair or CHANGED.match(actual)):
        return False
    number, stated = without_bare_unit(expected), _stated(actual)
    if NUMBER.fullmatch(number) and (number == expected or NUMBER.fullmatch(stated)):
        if SUM.search(stated.lstrip("+-")) and not POWER_OF_TEN.fullmatch(stated):
            return False
        if "." in number and DECIMAL_COMMA.fullmatch(stated):
            stated = stated.replace(",", ".")
        expected, actual = number, stated
    if re.search(UNIT_LETTER, expected):  # in braces it stays a variable: 3t is not 3
        expected, actual = (re.sub(UNIT_LETTER + r"\Z", r"{\1}", text) for text in (expected, actual))
    return _checker().equal(expected, actual)


def _same_choice(answer: str, given: str) -> bool:
    pairs = (choice(answer), choice(given, long=True)), (choice(answer, long=True), choice(given))
    return any(first is not None and first == second for first, second in pairs)


def _stated(answer: str) -> str:
    """The number in an equation, without its unit: 1591 in 37*43 = 1591 and in 1591 = 37*43. Lists are unchanged."""
    answer = re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", answer)
    if LISTED.search(answer):
        return answer
    sides = [side.strip() for side in re.split(r"(?<![<>!])=", answer)]
    return without_bare_unit(next((side for side in reversed(sides) if not SUM.search(side.lstrip("+-"))), sides[-1]))


@cache
def _checker() -> MathChecker:
    return MathChecker()
