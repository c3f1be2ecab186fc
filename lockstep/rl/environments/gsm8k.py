"""GSM8K: grade-school word problems (arXiv 2110.14168), graded by their final number."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

from lockstep.errors import UserError
from lockstep.rl.environment import Environment, Example

FILES = {"train": "train.jsonl", "validation": "test.jsonl"}
# No two repeats of the same characters stand side by side, so a long run of digits is read in linear time.
DIGITS = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
FINAL = re.compile(rf"(?<!#)#### *((?:-?\$?|\$-){DIGITS})\s*\Z")
"""`#### NUMBER` at the end: with or without dollar sign, thousands' commas, decimals; nothing after it but space."""

PROMPT = "Question: {question}\nAnswer:"
"""What the model continues."""
TEMPLATE = PROMPT + " {answer}"
"""A problem with its solution as a text to pretrain on, whose beginning is the prompt."""


class GSM8K(Environment):
    """Lines of `question` and `answer`, the result behind `####`, in the folder's train.jsonl and test.jsonl.

    Rewards: `correct`, 1 where math-verify finds the completion's final number equal to the answer's; `format`, 1
    where the completion ends with a single `#### NUMBER`. The format weighs 0.3 in the total.
    """

    reward_weights = {"correct": 1.0, "format": 0.3}  # noqa: RUF012

    def examples(self, split: str) -> Iterator[Example]:
        for number, question, answer in problems(self.data, split, self.skip_bad_lines):
            final = FINAL.search(answer)
            if final is not None:
                yield Example(PROMPT.format(question=question), final.group(1), id=f"{FILES[split]}:{number}")
            elif not self.skip_bad_lines:
                raise UserError(
                    f"{Path(self.data) / FILES[split]}:{number}: the answer has no `#### NUMBER` at its end; "
                    "fix it or use --skip-bad-lines"
                )

    def reward(self, example: Example, completion: str) -> dict[str, float]:
        formatted = completion.count("####") == 1 and FINAL.search(completion) is not None
        return {"correct": float(is_right(example.answer, completion)), "format": float(formatted)}


def problems(folder: str, split: str, skip_bad_lines: bool = False) -> Iterator[tuple[int, str, str]]:
    """(line number, question, answer) of each problem of a split. Raises UserError for a missing file or bad line."""
    from lockstep.data.records import read_jsonl  # which imports torch: a reward's worker need not

    path = Path(folder) / FILES[split]
    if not folder or not path.is_file():
        missing = f"{path}: no such file" if folder else "gsm8k needs data"
        raise UserError(f"{missing}; give the folder with train.jsonl and test.jsonl as --data DIR")
    for number, values in read_jsonl(path, skip_bad_lines):
        question, answer = values.get("question"), values.get("answer")
        if isinstance(question, str) and isinstance(answer, str):
            yield number, question, answer
        elif not skip_bad_lines:
            raise UserError(f"{path}:{number}: needs the strings `question` and `answer`; or use --skip-bad-lines")


def is_right(answer: str, completion: str) -> bool:
    """Whether the completion's final number equals the answer's, as math-verify sees it; False where it has none."""
    found = FINAL.search(completion)
    if found is None:
        return False
    from math_verify import parse, verify

    # Its time-outs work in the main thread alone; a number needs none, which it warns of once.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    gold, given = (parse(_plain(text), parsing_timeout=None) for text in (answer, found.group(1)))
    return bool(gold) and bool(given) and verify(gold, given, timeout_seconds=None)


def _plain(number: str) -> str:
    # math-verify reads ".5", but not "-.5".
    return re.sub(r"^(-?)\.", r"\g<1>0.", number.replace(",", "").replace("$", ""))
