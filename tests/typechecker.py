"""How annotations are checked: an int may stand where a float is asked for, as PEP 484 has it."""

import functools
import inspect

import torch
from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))


def unchecked_while_compiling(jaxtyped):
    """`jaxtyping.jaxtyped`, but torch.compile, which cannot trace the checks, sees the function itself."""

    def decorator(*arguments, **keywords):
        check_of = jaxtyped(*arguments, **keywords)

        def decorate(function):
            checked = check_of(function)
            if not inspect.isfunction(function):
                return checked

            @functools.wraps(function)
            def call(*values, **named):
                return function(*values, **named) if torch.compiler.is_compiling() else checked(*values, **named)

            return call

        return decorate

    return decorator
