"""Word problems with numbers too large for mental arithmetic, and a calculator for the model to call.

lockstep rl --environment examples/calculator.py:Calculator --model DIR
"""

import ast
import operator
import random
import re

import lockstep.rl as rl
from lockstep.rl.conversations.reasoning import answer_text

COUNTS = {"train": 5000, "validation": 200}
OPERATORS = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul},
    **{ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod},
}
PROBLEMS = (
    ("A depot holds {a} crates of {b} kg each. {c} kg are taken away. How many kg are left?", "{a}*{b}-{c}"),
    ("{a} pages are bound in books of {d} pages, as many as can be filled. How many pages are left over?", "{a}%{d}"),
    ("A factory makes {a} screws an hour. How many does it make in {d} days of {e} hours each?", "{a}*{d}*{e}"),
)


def calculate(expression: str) -> str:
    """Works out an arithmetic expression.

    Args:
        expression: numbers, + - * / // % and parentheses, such as (12 + 3) * 4
    """
    # A tool that raises is answered with the error, and the conversation continues.
    if len(expression) > 200:
        raise ValueError("an expression has at most 200 characters")
    return str(_value(ast.parse(expression.strip(), mode="eval").body))


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(left), _value(right))
    raise ValueError("only numbers, + - * / // % and parentheses can be worked out; write 1000, not 1,000")


class Calculator(rl.ConversationEnvironment):
    """Graded by the reply's last line, `Answer: NUMBER`; an answer without the tool counts the same."""

    tools = (calculate,)
    turns = 6
    marks_reasoning = True  # only what follows the reasoning is an answer
    unfinished = {"correct": 0.0}

    def examples(self, split: str):
        for number in range(COUNTS[split]):
            draw = random.Random(f"{split} {number}")
            text, expression = draw.choice(PROBLEMS)
            values = {"a": draw.randint(10_000, 999_999), "b": draw.randint(1_000, 99_999)}
            values |= {"c": draw.randint(1_000, 9_999_999), "d": draw.randint(12, 999), "e": draw.randint(3, 23)}
            prompt = text.format(**values) + "\nUse the tool, then reply with the last line `Answer: NUMBER`."
            yield rl.Example(prompt, calculate(expression.format(**values)), id=f"{split}:{number}")

    def reward(self, example: rl.Example, completion: str) -> dict[str, float]:
        last = answer_text(completion).strip().rpartition("\n")[2]
        match = re.fullmatch(r"\W*Answer:\W*?(-?[0-9][0-9,]*)\W*", last)
        return {"correct": float(match is not None and match[1].replace(",", "") == example.answer)}
