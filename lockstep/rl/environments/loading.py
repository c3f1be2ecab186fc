"""Loads an environment by name, or from a user's file."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import UserError, closest
from lockstep.python_file import import_file, user_line
from lockstep.rl.conversations.protocol import ConversationEnvironment
from lockstep.rl.environments.code import Code
from lockstep.rl.environments.digit_sum import DigitSum
from lockstep.rl.environments.gsm8k import GSM8K
from lockstep.rl.environments.gymnasium_adapter import gymnasium_game
from lockstep.rl.environments.math_jsonl import Math
from lockstep.rl.environments.prompts import Prompts
from lockstep.rl.environments.protocol import Environment, source_file
from lockstep.rl.environments.verifiers_adapter import verifiers_tasks

ENVIRONMENTS: dict[str, type[Environment]] = {
    "code": Code,
    "digit_sum": DigitSum,
    "gsm8k": GSM8K,
    "math": Math,
    "prompts": Prompts,
}
ADAPTERS: dict[str, Callable[[str], type[Environment]]] = {"gymnasium": gymnasium_game, "verifiers": verifiers_tasks}
"""Environments of other packages, given as `PACKAGE:NAME`: functions that create the class from the name."""
GIVEN = "object:"
"""Prefix in a run's settings for an environment that was passed as an object."""
FORMS = {"gymnasium": "gymnasium:ID", "verifiers": "verifiers:TASKSET"}
"""Names of environments of other packages."""


@dataclass(frozen=True)
class EnvironmentSource:
    """How another process loads an environment: the arguments of `load_environment`."""

    name: str
    data: str = ""
    skip_bad_lines: bool = False


def given_name(environment: Environment) -> str:
    """The name in a run's settings for an environment passed as an object: `object:MODULE.CLASS`."""
    kind = type(environment)
    return f"{GIVEN}{kind.__module__}.{kind.__qualname__}"


def require_environment(name: str) -> None:
    """Raises UserError, with the available environments, if `name` is empty."""
    if not name:
        raise UserError(
            f"which environment? Give --environment {', '.join(ENVIRONMENTS)}, gymnasium:ID, verifiers:TASKSET, or "
            "FILE.py:Class for your own task (docs/rl.md)"
        )


def load_environment(name: str, data: str = "", skip_bad_lines: bool = False) -> Environment:
    """A built-in environment by name, another package's as `gymnasium:ID` or `verifiers:TASKSET`, or `FILE.py:Class`.

    `data` and `skip_bad_lines` are passed to an `__init__` that has parameters of these names. Raises UserError if the
    name is unknown, the file does not import or has no such Environment, or the Environment cannot be created.
    """
    require_environment(name)
    if name.startswith(GIVEN):
        raise UserError(
            f"the run got its environment as an object ({name.removeprefix(GIVEN)}); pass it to lockstep.reinforce or "
            "lockstep.rl.replay.replay"
        )
    if (path := name.removesuffix(":")).endswith(".py"):
        raise UserError(f"{path}: add the class: {path}:Class")
    file, colon, class_name = name.rpartition(":")
    package, _, package_name = name.partition(":")
    if colon and package in ADAPTERS:
        if not package_name:
            raise UserError(f'the environment "{name}" is incomplete; write {FORMS[package]}')
        kind = ADAPTERS[package](package_name)
    elif colon:
        kind = _class_in(Path(file), class_name)
    elif name in ENVIRONMENTS:
        kind = ENVIRONMENTS[name]
    else:
        raise UserError(
            f'unknown environment "{name}".{closest(name, ENVIRONMENTS)} '
            f"Built in: {', '.join([*ENVIRONMENTS, *FORMS.values()])}; your own: FILE.py:Class"
        )
    return _create(kind, data, skip_bad_lines)


def _create(kind: type[Environment], data: str, skip_bad_lines: bool) -> Environment:
    file = source_file(kind)
    where = f"{file or kind.__module__}: {kind.__name__}"
    converses = issubclass(kind, ConversationEnvironment)
    for method in ("examples", "reward"):
        rewards_otherwise = kind.rewards or not kind.has_rewards or (converses and converses_or_grades(kind))
        is_optional = method == "reward" and rewards_otherwise
        if getattr(kind, method) is getattr(Environment, method) and not is_optional:
            name = "lockstep.rl.ConversationEnvironment" if converses else "lockstep.rl.Environment"
            also = ", `converse` or `grade`" if converses and method == "reward" else ""
            raise UserError(f"{where} defines no `{method}`{also}; write it as described in {name}")
    signature = inspect.signature(kind)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    options: dict[str, Any] = {"data": data, "skip_bad_lines": skip_bad_lines}
    arguments = {name: value for name, value in options.items() if takes_any or name in signature.parameters}
    if data and "data" not in arguments:
        raise UserError(f"{where}.__init__ takes no `data`; add the parameter, or remove --data")
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise UserError(
            f"{where}.__init__ cannot be called ({error}); it can take `data` and `skip_bad_lines`, and must have "
            "defaults for anything else"
        ) from error
    try:
        environment = kind(**arguments)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{user_line(error, file)}: {kind.__name__} cannot be created ({type(error).__name__}: {error})"
        ) from error
    check_environment(environment)
    return environment


METHODS: dict[str, tuple[str, ...]] = {
    "examples": ("split",),
    "reward": ("example", "completion"),
    "converse": ("example", "chat"),
    "grade": ("example", "episodes"),
}
"""Arguments of an environment's methods."""


def check_environment(environment: Environment) -> None:
    """Raises UserError for methods that a run cannot call, and for invalid `tools` and `turns`."""
    if not isinstance(environment, Environment):
        return  # `examples_of` reports it
    kind = type(environment)
    where = f"{source_file(kind) or kind.__module__}: {kind.__name__}"
    converses = isinstance(environment, ConversationEnvironment)
    for method, names in METHODS.items():
        function = getattr(environment, method, None)
        if not callable(function):
            continue
        if converses and method in ("converse", "grade") and not inspect.iscoroutinefunction(function):
            raise UserError(f"{where}.{method} is not a coroutine function; write `async def {method}(…)`")
        try:
            inspect.signature(function).bind(*names)
        except TypeError as error:
            keyword = "async def" if inspect.iscoroutinefunction(function) else "def"
            signature_text = f"{keyword} {method}({', '.join(('self', *names))})"
            raise UserError(f"{where}.{method} cannot be called ({error}); write `{signature_text}`") from error
    if not isinstance(environment, ConversationEnvironment):
        return
    tools, turns = environment.tools, environment.turns
    if not isinstance(tools, tuple | list) or not all(map(callable, tools)):
        raise UserError(f"{where}.tools is {tools!r:.60}, not a tuple or list of functions; write `tools = (f,)`")
    if type(turns) is not int or turns < 1:
        raise UserError(f"{where}.turns is {turns!r:.60}, not an integer of at least 1; write `turns = 8`")


def converses_or_grades(kind: type[Environment]) -> bool:
    """Whether it overrides `converse` or `grade`, which can return rewards."""
    base = ConversationEnvironment
    return any(getattr(kind, name, None) is not getattr(base, name) for name in ("converse", "grade"))


def _class_in(file: Path, class_name: str) -> Any:
    module = import_file(file, "environment", "FILE.py:Class")
    classes = [n for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, Environment)]
    classes = [n for n in classes if n not in ("Environment", "ConversationEnvironment")]
    if class_name not in classes:
        exists = class_name not in ("Environment", "ConversationEnvironment") and hasattr(module, class_name)
        problem = f'"{class_name}" is not an Environment' if exists else f'no Environment named "{class_name}"'
        raise UserError(
            f"{file}: {problem}.{closest(class_name, classes)} "
            f"Found: {', '.join(classes) or 'none; subclass lockstep.rl.Environment'}"
        )
    return getattr(module, class_name)
