"""GSM8K: grade-school word problems (arXiv 2110.14168), graded by their final number."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

from lockstep.errors import UserError
from lockstep.rl.environment import Environment, Example
from lockstep.rl.environments.problems import read_problems

NEEDS = "the strings `question` and `answer`"
# No two adjacent repeats match the same characters, so a long run of digits is matched in linear time.
DIGITS = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
FINAL = re.compile(rf"(?<!#)#### *((?:-?(?:\\?\$)?|\\?\$-){DIGITS})\.?\s*\Z")
"""`#### NUMBER` at the end, optionally with dollar sign, thousands separators, decimals and a period."""

PROMPT = "Question: {question}\nAnswer:"
"""The text that the model continues."""
TEMPLATE = PROMPT + " {answer}"
"""A problem with its solution as a text for pretraining, which begins with the prompt."""


class GSM8K(Environment):
    """Lines of `question` and `answer`, with the result after `####`, from train.jsonl and test.jsonl or the hub.

    Rewards: `correct`, 1 if math-verify finds the completion's final number equal to the answer's; `format`, 1 if the
    completion ends with a single `#### NUMBER`. The format has weight 0.3 in the total.
    """

    reward_weights = {"correct": 1.0, "format": 0.3}  # noqa: RUF012

    def examples(self, split: str) -> Iterator[Example]:
        for where, question, answer in problems(self.data, split, self.skip_bad_lines):
            final = FINAL.search(answer)
            if final is not None:
                yield Example(PROMPT.format(question=question), final.group(1), id=where.rpartition("/")[2])
            elif not self.skip_bad_lines:
                raise UserError(f"{where}: the answer has no `#### NUMBER` at its end; fix it or use --skip-bad-lines")

    def reward(self, example: Example, completion: str) -> dict[str, float]:
        formatted = completion.count("####") == 1 and FINAL.search(completion) is not None
        return {"correct": float(is_right(example.answer, completion)), "format": float(formatted)}


def problems(data: str, split: str, skip_bad_lines: bool = False) -> Iterator[tuple[str, str, str]]:
    """(`file:line`, question, answer) of each problem of a split. Raises UserError as `read_problems`."""
    for where, values in read_problems(data, split, skip_bad_lines, NEEDS):
        question, answer = values.get("question"), values.get("answer")
        if isinstance(question, str) and isinstance(answer, str):
            yield where, question, answer
        elif not skip_bad_lines:
            raise UserError(f"{where}: needs {NEEDS}; or use --skip-bad-lines")


def is_right(answer: str, completion: str) -> bool:
    """Whether the completion's final number equals the answer's, according to math-verify; False if it has none."""
    found = FINAL.search(completion)
    if found is None:
        return False
    from math_verify import parse, verify

    # Its timeouts work only in the main thread; numbers need none, but it warns once about their absence.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    gold, given = (parse(_plain(text), parsing_timeout=None) for text in (answer, found.group(1)))
    return bool(gold) and bool(given) and verify(gold, given, timeout_seconds=None)


def _plain(number: str) -> str:
    # math-verify parses ".5", but not "-.5".
    return re.sub(r"^(-?)\.", r"\g<1>0.", re.sub(r"[,$\\]", "", number))
