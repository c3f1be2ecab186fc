"""Built-in tasks and adapters by name."""

from collections.abc import Callable

from lockstep.rl.environments.alphabet_sort import AlphabetSort
from lockstep.rl.environments.calculator import Calculator
from lockstep.rl.environments.code import Code
from lockstep.rl.environments.digit_sum import DigitSum
from lockstep.rl.environments.gsm8k import GSM8K
from lockstep.rl.environments.gymnasium_adapter import gymnasium_game
from lockstep.rl.environments.math_jsonl import Math
from lockstep.rl.environments.prompts import Prompts
from lockstep.rl.environments.protocol import Environment
from lockstep.rl.environments.retrieval import Retrieval
from lockstep.rl.environments.verifiers_adapter import verifiers_tasks

ENVIRONMENTS: dict[str, type[Environment]] = {
    "alphabet_sort": AlphabetSort,
    "calculator": Calculator,
    "code": Code,
    "digit_sum": DigitSum,
    "gsm8k": GSM8K,
    "math": Math,
    "prompts": Prompts,
    "retrieval": Retrieval,
}

ADAPTERS: dict[str, Callable[[str], type[Environment]]] = {
    "gymnasium": gymnasium_game,
    "verifiers": verifiers_tasks,
}
"""Environments of other packages, given as `PACKAGE:NAME`: functions that create the class from the name."""
