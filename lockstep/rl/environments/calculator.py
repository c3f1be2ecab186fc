"""Word problems with numbers too large for mental arithmetic, and a calculator tool."""

from __future__ import annotations

import ast
import math
import operator
import random
import re
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from lockstep.rl.conversations import ConversationEnvironment
from lockstep.rl.conversations.reasoning import answer_text
from lockstep.rl.environments.protocol import Example

COUNTS = {"train": 5000, "validation": 200}
MAX_CHARACTERS, MAX_BITS, MAX_DEPTH = 200, 4096, 50
OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul},
    **{ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod},
}
ANSWER = re.compile(r"^[^\w\n]*Answer:\W*?\$?(-?[0-9][0-9,]*)(?:\.0*)?[\s*.$]*\Z", re.MULTILINE)
PROMPTS = (
    ("A depot holds {a} crates of {b} kg each. {c} kg are taken away. How many kg are left?", "{a}*{b}-{c}"),
    ("{a} tickets were sold at {b} coins, and {c} at {d} coins. How many coins is that?", "{a}*{b}+{c}*{d}"),
    ("{a} pages are bound in books of {d} pages, as many as can be filled. How many pages are left over?", "{a}%{d}"),
    ("A factory makes {a} screws an hour. How many does it make in {d} days of {e} hours each?", "{a}*{d}*{e}"),
    (
        "{a} coins and {b} coins are shared out equally among {e} people. How many whole coins has each?",
        "({a}+{b})//{e}",
    ),
)


def calculate(expression: str) -> str:
    """Works out an arithmetic expression.

    Args:
        expression: numbers, + - * / // % ** and parentheses, such as (12 + 3) * 4
    """
    return str(evaluate(expression))


class Calculator(ConversationEnvironment):
    """Word problems, graded by the reply's last line, `Answer: NUMBER`. The reward is `correct`.

    Tool calls are not rewarded: an answer without the tool counts the same.
    """

    tools: ClassVar[tuple[Callable[..., Any], ...]] = (calculate,)
    turns = 6
    marks_reasoning = True
    unfinished: ClassVar[dict[str, float]] = {"correct": 0.0}

    def examples(self, split: str) -> Iterator[Example]:
        for number in range(COUNTS[split]):
            draw = random.Random(f"{split} {number}")
            text, expression = draw.choice(PROMPTS)
            a, b, c = draw.randint(10_000, 999_999), draw.randint(1_000, 99_999), draw.randint(1_000, 9_999_999)
            values = {"a": a, "b": b, "c": c, "d": draw.randint(12, 999), "e": draw.randint(3, 23)}
            prompt = text.format(**values) + "\nUse the tool, then reply with the last line `Answer: NUMBER`."
            yield Example(prompt, str(evaluate(expression.format(**values))), id=f"{split}:{number}")

    def reward(self, example: Example, completion: str) -> dict[str, float]:
        match = ANSWER.search(answer_text(completion).rstrip())
        return {"correct": float(match is not None and match.group(1).replace(",", "") == example.answer)}


def evaluate(expression: str) -> int | float:
    """The value of an arithmetic expression. Raises ValueError, ZeroDivisionError or OverflowError.

    Only numbers and operators are allowed, and results are bounded, so that no expression takes long.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"an expression has at most {MAX_CHARACTERS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"this is not an arithmetic expression: {expression}") from error
    return _value(tree.body, 0)


def _value(node: ast.expr, depth: int) -> int | float:
    if depth > MAX_DEPTH:
        raise ValueError("the expression is nested too deep")
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value: int | float = node.value  # type: ignore[assignment]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        operand = _value(node.operand, depth + 1)
        value = operand if isinstance(node.op, ast.UAdd) else -operand
    elif isinstance(node, ast.BinOp):
        left, right = _value(node.left, depth + 1), _value(node.right, depth + 1)
        if isinstance(node.op, ast.Pow):
            value = _power(left, right)
        elif type(node.op) in OPERATORS:
            value = OPERATORS[type(node.op)](left, right)
        else:
            raise ValueError("only + - * / // % ** and parentheses may join numbers; ** is the power")
    else:
        raise ValueError("only numbers, + - * / // % ** and parentheses can be evaluated; write 1000, not 1,000")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise OverflowError("the result is too large")
    if isinstance(value, float) and not math.isfinite(value):
        raise OverflowError("the result is too large for a number with a decimal point")
    return value


def _power(base: int | float, exponent: int | float) -> int | float:
    # Checked before it is computed: 9**9**9 has 370 million digits.
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > MAX_BITS:
        raise OverflowError("the result is too large")
    value = base**exponent
    if isinstance(value, complex):
        raise ValueError("a root of a negative number is not a number")
    return value
