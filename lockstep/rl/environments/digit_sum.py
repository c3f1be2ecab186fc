"""Sums of digits: a task that a small model learns in minutes."""

from __future__ import annotations

import random
from collections.abc import Iterator

from lockstep.rl.environments.protocol import Environment, Example

TERMS = (2, 3)
"""Numbers of digits in a sum."""
HELD_OUT = 5
"""Every fifth sum, by a fixed hash, is for validation."""


class DigitSum(Environment):
    """Prompts such as `3+5+2=`, whose correct completion is `10` and a line break."""

    stop = ("\n",)

    def examples(self, split: str) -> Iterator[Example]:
        """Each sum of two or three digits, once, in a fixed random order."""
        held_out = split == "validation"
        questions = [q for q in _questions() if _is_held_out(q) == held_out]
        random.Random(0).shuffle(questions)
        for question in questions:
            yield Example(prompt=f"{question}=", answer=str(sum(map(int, question.split("+")))), id=question)

    def reward(self, example: Example, completion: str) -> dict[str, float]:
        return {"correct": float(completion.strip() == example.answer and completion.endswith("\n"))}


def pretraining_text(lines: int, error_rate: float, seed: int = 0) -> Iterator[str]:
    """Sums of the training split, one per document; a fraction `error_rate` repeats the last digit instead of adding.

    A model pretrained on them knows the format and the arithmetic, but does not apply it every time. Unlike random
    wrong results, such mistakes do not interfere with learning from the correct lines. Every line is a separate
    document, like the prompts, and because attention over short sequences is cheapest.
    """
    draw = random.Random(seed)
    examples = list(DigitSum().examples("train"))
    for _ in range(lines):
        example = draw.choice(examples)
        yield f"{example.prompt}{example.id[-1] if draw.random() < error_rate else example.answer}\n"


def _questions() -> Iterator[str]:
    for terms in TERMS:
        for number in range(10**terms):
            yield "+".join(f"{number:0{terms}}")


def _is_held_out(question: str) -> bool:
    number = int(question.replace("+", ""))
    return (number * 2654435761 + len(question)) % 2**32 // 7 % HELD_OUT == 0
