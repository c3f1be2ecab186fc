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
LONGEST = 300
"""Most characters of an answer: anything longer does not count as one."""
BOX = re.compile(r"\\boxed(?![A-Za-z])")
FRAMED = re.compile(r"\\fbox(?![A-Za-z])")
BARE = re.compile(r"(?:\s+|(?=[0-9]))((?:(?!\\[)\]])[^$\n])*)")
"""The content of a box without braces: up to the formula's end, as MATH's own code reads it."""
BETWEEN = re.compile(r"[\s$.]*(?:[,;]|[,;]?[\s$]*(?:and|or|\\text\{\s*(?:and|or)\s*\}))[\s$]*(?:[A-Za-z]\s*=\s*)?")
"""Between boxes that are one answer together."""
SUM = re.compile(r"[0-9)}]\s*(?:[-+*^!(]|\\(?:times|cdot|div|pm)\b)|\\(?:binom|sum|prod|int)\b")
"""Unevaluated expressions: 37*43 equals 1591, but is not an answer."""
PERCENT = "\\%"
FRACTION = re.compile(r"-?(?:\\[cdt]?frac\s*(?:\{([0-9]+)\}|([0-9]))\s*(?:\{([0-9]+)\}|([0-9]))|([0-9]+)/([0-9]+))")
DECIMAL_COMMA = re.compile(r"-?[0-9]+,(?:[0-9]{1,2}|[0-9]{4,})")
UNIT_LETTER = r"(?<![A-Za-z\\])([cdghlmost])(?![A-Za-z])"
"""A letter that math-verify takes for a unit where it ends a formula."""
ASSIGNED = re.compile(r"[A-Za-z]\s*=\s*")
LISTED = re.compile(r"[,;]|\\text|\b(?:and|or)\b")
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
                raise UserError(
                    f"{where}: its answer is empty or longer than {LONGEST} characters; fix it or use --skip-bad-lines"
                )

    def reward(self, example: Example, completion: str) -> dict[str, float]:
        given = boxed_answer(answer_text(completion))
        return {"correct": float(given is not None and is_right(example.answer, given))}


def final_answer(solution: str) -> str:
    """The answer in a dataset's solution; empty if it is too long."""
    boxed = boxed_answer(solution)
    found = solution.rpartition("####")[2] if "####" in solution else solution if boxed is None else boxed
    answer = found.strip().strip("$").strip()
    return answer if len(answer) <= LONGEST else ""


def boxed_answer(text: str) -> str | None:
    """The content of the last box, or of the last ones if only commas, "and" or "or" stand between them."""
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
        if sum(map(len, contents)) > LONGEST:
            break
    return ", ".join(dict.fromkeys(contents)) or None


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{…}` (`\\fbox{…}` if there is none), with balanced braces, or what follows
    `\\boxed` up to the formula's end, as some of MATH's solutions write it; None if it is not closed or absent."""
    boxes = _boxes(text)
    return _content(text, boxes[-1].end())[0] if boxes else None


def _boxes(text: str) -> list[re.Match[str]]:
    return list(BOX.finditer(text)) or list(FRAMED.finditer(text))


def _content(text: str, begin: int) -> tuple[str | None, int]:
    """What a box that is opened before `begin` contains, and where it ends."""
    inside = text[begin : begin + LONGEST]
    if not inside.lstrip().startswith("{"):
        bare = BARE.match(inside)
        return ((bare[1].strip(" .") or None), begin + bare.end()) if bare else (None, begin)
    depth = 0
    for place, character in enumerate(inside):
        depth += {"{": 1, "}": -1}.get(character, 0) * (inside[place - 1] != "\\" or not place)
        if depth == 0 and character == "}":
            return inside[:place].lstrip()[1:].strip(), begin + place + 1
    return None, begin


def is_right(answer: str, given: str) -> bool:
    """Whether an answer equals the right one, according to math-verify; words, which it reads as products of letters,
    are compared as words. A number must be given as a number, not as an expression for it."""
    wanted, said = canonical(answer), canonical(given)
    if in_other_money(answer, given):
        return False
    if same_text(wanted, said) or _same_choice(wanted, said):
        return True
    if WORDS.fullmatch(wanted):
        return False
    if wanted.endswith(PERCENT) or (said.endswith(PERCENT) and not _below_one(wanted)):
        # 12.5% is given as 12.5, as 12.5% or as 0.125; where 12.5 is wanted, 12.5% is meant.
        values = (text.removesuffix(PERCENT).rstrip() for text in (wanted, said))
        return _equal(*values) or _equal(wanted, said)
    if said.endswith(PERCENT):
        return _equal(f"({wanted})*100", said.removesuffix(PERCENT).rstrip())
    return _equal(wanted, said)


def _below_one(answer: str) -> bool:
    """Whether a canonical answer is a number between -1 and 1."""
    if fraction := FRACTION.fullmatch(answer):
        top, bottom = (int(part) for part in fraction.groups() if part)
        return top < bottom
    return bool(NUMBER.fullmatch(answer)) and abs(float(answer.replace(",", ""))) < 1


def _equal(wanted: str, said: str) -> bool:
    """Whether math-verify finds two canonical answers equal, of which a number is stated as one."""
    name, other = ASSIGNED.match(wanted), ASSIGNED.match(said)
    if name and ("=" not in said or (other and other[0][0] == name[0][0])):
        wanted = wanted[name.end() :]
    is_pair = said.startswith(("(", "[")) and "," in said  # or an interval
    if NUMBER.fullmatch(wanted) and (is_pair or CHANGED.match(said)):
        return False
    number, stated = without_bare_unit(wanted), _stated(said)
    if NUMBER.fullmatch(number) and (number == wanted or NUMBER.fullmatch(stated)):
        if SUM.search(stated.lstrip("+-")) and not POWER_OF_TEN.fullmatch(stated):
            return False
        if "." in number and DECIMAL_COMMA.fullmatch(stated):
            stated = stated.replace(",", ".")
        wanted, said = number, stated
    if re.search(UNIT_LETTER, wanted):  # in braces it stays a variable: 3t is not 3
        wanted, said = (re.sub(UNIT_LETTER + r"\Z", r"{\1}", text) for text in (wanted, said))
    return _checker().equal(wanted, said)


def _same_choice(answer: str, given: str) -> bool:
    pairs = (choice(answer), choice(given, long=True)), (choice(answer, long=True), choice(given))
    return any(one is not None and one == other for one, other in pairs)


def _stated(said: str) -> str:
    """The number in an equation, without its unit: 1591 in 37*43 = 1591 and in 1591 = 37*43. Lists stay as they are."""
    said = re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", said)
    if LISTED.search(said):
        return said
    sides = [side.strip() for side in re.split(r"(?<![<>!])=", said)]
    return without_bare_unit(next((side for side in reversed(sides) if not SUM.search(side.lstrip("+-"))), sides[-1]))


@cache
def _checker() -> MathChecker:
    return MathChecker()
