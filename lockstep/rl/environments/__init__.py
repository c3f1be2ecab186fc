"""The built-in tasks."""

from lockstep.rl.environment import Environment
from lockstep.rl.environments.digit_sum import DigitSum
from lockstep.rl.environments.gsm8k import GSM8K

ENVIRONMENTS: dict[str, type[Environment]] = {"digit_sum": DigitSum, "gsm8k": GSM8K}
