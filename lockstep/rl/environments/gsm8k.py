"""GSM8K: grade-school word problems (arXiv 2110.14168), graded by their final number."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from lockstep.errors import UserError
from lockstep.rl.conversations.reasoning import answer_text
from lockstep.rl.environments.problems import answer_of, needs_text, prompt_of, read_problems
from lockstep.rl.environments.protocol import Environment, Example, Message

NEEDS = "the strings `question` and `answer`, or `prompt`, a list of messages, and an answer"
# No two adjacent repeats match the same characters, so a long run of digits is matched in linear time.
DIGITS = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
FINAL = re.compile(rf"(?<!#)#### *((?:-?(?:\\?\$)?|\\?\$-){DIGITS})\.?\s*\Z")
"""`#### NUMBER` at the end, optionally with dollar sign, thousands separators, decimals and a period."""

PROMPT = "Question: {question}\nAnswer:"
"""The prompt that the model continues."""
TEMPLATE = PROMPT + " {answer}"
"""A problem with its solution as a text for pretraining; it begins with the prompt."""


class GSM8K(Environment):
    """Lines of `question` and `answer`, with the result after `####`, from train.jsonl and test.jsonl or the hub.

    A `prompt` that is a list of messages is used as it is, instead of the question; `reward_model.ground_truth` (verl's
    layout) is a result without `####`.

    Rewards: `correct`, 1 if the completion's final number equals the answer's; `format`, 1 if the completion ends with
    a single `#### NUMBER`. The format has weight 0.3 in the total.
    """

    reward_weights = {"correct": 1.0, "format": 0.3}  # noqa: RUF012
    marks_reasoning = True

    def examples(self, split: str) -> Iterator[Example]:
        for where, values in read_problems(self.data, split, self.skip_bad_lines, NEEDS):
            prompt, answer = _prompt(values), _answer(values)
            final = FINAL.search(answer or "")
            if prompt is not None and final is not None:
                kwargs = values["chat_template_kwargs"]
                yield Example(prompt, final.group(1), where.rpartition("/")[2], chat_template_kwargs=kwargs)
            elif not self.skip_bad_lines:
                if prompt is None and isinstance(values.get("prompt"), list):
                    raise needs_text(where, values, ("prompt",))
                if prompt is None or answer is None:
                    raise UserError(f"{where}: needs {NEEDS}; or use --skip-bad-lines")
                raise UserError(f"{where}: the answer has no `#### NUMBER` at its end; fix it or use --skip-bad-lines")

    def reward(self, example: Example, completion: str) -> dict[str, float]:
        answer = answer_text(completion)
        formatted = answer.count("####") == 1 and FINAL.search(answer) is not None
        return {"correct": float(is_right(example.answer, answer)), "format": float(formatted)}


def _prompt(values: dict[str, Any]) -> str | list[Message] | None:
    question = values.get("question")
    if isinstance(values.get("prompt"), list):
        return prompt_of(values, ("prompt",))
    return PROMPT.format(question=question) if isinstance(question, str) else None


def _answer(values: dict[str, Any]) -> str | None:
    if isinstance(answer := values.get("answer"), str):
        return answer
    truth = answer_of(values, ())
    return None if truth is None else f"#### {truth}"


def is_right(answer: str, completion: str) -> bool:
    """Whether the completion's final number equals the answer's; False if it has none."""
    final = FINAL.search(completion)
    return final is not None and _number(final.group(1)) == _number(answer)


def _number(text: str) -> Decimal:
    return Decimal(re.sub(r"[,$\\]", "", text))
