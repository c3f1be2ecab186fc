"""How `make test-types` checks annotations: an int may stand where a float is asked for, as PEP 484 has it.

A check sees types, shapes and dtypes alone, so a call whose arguments and result have those of a call that was checked
is not checked again; and of a function that a test calls often, only some calls are looked at. Checking every call
takes as long as the computing itself, and looking at every one half as long.
"""

import functools
import inspect
import random
from collections import Counter
from threading import get_ident
from unittest.mock import patch

import jaxtyping
import numpy as np
import torch

# beartype draws which item of a list it looks at: from a generator of its own, for a test may seed Python's.
with patch.object(random, "getrandbits", random.Random(0).getrandbits):
    from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
LONGEST = 4
"""Items of a tuple or list that are looked at one by one; a call with a longer one is always checked."""
MOST = 2_000
"""Kinds of calls remembered of a function."""
FIRST, EVERY = 32, 32
"""So many calls of a function are looked at in each test, and of those that follow every so-manieth."""
UNKNOWN = 8
"""Of calls whose kind says too little, so many are checked among the first."""
MADE = 8
"""Of a function within a function, so many that its calls make are checked."""
made: Counter = Counter()
test = [0]
"""The number of the test that runs."""
DEEPEST = 4
"""Lists within lists that are looked into; some hold themselves."""


def kind_of(value, depth=0):
    """All that a check of `value` depends on; None where the check looks into it."""
    kind = type(value)
    if issubclass(kind, (torch.Tensor, np.ndarray)):
        return kind, value.shape, value.dtype
    if kind is str:
        return kind, value  # of a Literal its value counts
    if kind in (tuple, list) and len(value) <= LONGEST and depth < DEEPEST:
        kinds = tuple(kind_of(item, depth + 1) for item in value)
        return None if None in kinds else (kind, kinds)
    return None if kind is type or issubclass(kind, (tuple, list, dict, set, frozenset)) else kind


def kind_of_call(values, named):
    kinds = (*map(kind_of, values), *map(kind_of, named.values()))
    return None if None in kinds else (kinds, *named)


def checked_once_a_kind(jaxtyped):
    """`jaxtyping.jaxtyped`, but checking calls of one kind once, and made at a function's first call: making those of
    all functions takes longer than most tests. torch.compile, which cannot trace the checks, sees the function."""

    def decorator(*arguments, **keywords):
        check_of = jaxtyped(*arguments, **keywords)

        def decorate(function):
            if not inspect.isfunction(function):
                return check_of(function)
            made[function.__code__] += 1
            if made[function.__code__] > MADE:
                return function
            computed = {}  # a result that is there already, by thread
            results_of = {}  # the kinds of results by the kinds of arguments

            @functools.wraps(function)
            def compute(*values, **named):
                ready = computed.pop(get_ident(), None)
                return ready[0] if ready else function(*values, **named)

            checked = functools.cache(lambda: check_of(compute))

            counted, calls = -1, 0

            @functools.wraps(function)
            def call(*values, **named):
                nonlocal counted, calls
                if torch.compiler.is_compiling():
                    return function(*values, **named)
                if counted != test[0]:
                    counted, calls = test[0], 0
                calls += 1
                if calls > FIRST and calls % EVERY:
                    return function(*values, **named)
                arguments = kind_of_call(values, named)
                if arguments is None and UNKNOWN < calls <= FIRST:
                    return function(*values, **named)
                if arguments in results_of:
                    result = function(*values, **named)
                    if kind_of(result) in results_of[arguments]:
                        return result
                    computed[get_ident()] = (result,)
                result = checked()(*values, **named)
                kind = kind_of(result)
                if None not in (arguments, kind) and len(results_of) < MOST:
                    results_of.setdefault(arguments, set()).add(kind)
                return result

            return call

        return decorate

    return decorator


def install():
    """Checks shapes and types in the package's annotated functions: in modules that are imported after this."""
    jaxtyping.jaxtyped = checked_once_a_kind(jaxtyping.jaxtyped)
    jaxtyping.install_import_hook("lockstep", "tests.typechecker.check")
