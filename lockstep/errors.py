"""Exceptions that carry a message for the user, and the hint that goes with it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Bad input: says what was wrong, where (file, line, key) and what to do.

    The command line prints the message without a traceback and exits with code 2.
    """


class SaidByRank0(UserError):
    """The UserError of rank 0 on another rank, which need not say it again."""


class RunStopped(Exception):
    """A run that ended before its last step, on all ranks: says at which step, why, and how to continue.

    The command line prints the message without a traceback and exits with `exit_code`.
    """

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


class StopRun(Exception):
    """Raised by an `on_metrics` callback: the run saves its state after this step and ends as if it were finished."""


def closest(name: str, names: Iterable[str]) -> str:
    """A hint like ' Did you mean "gsm8k"?' for a misspelled `name`; empty if nothing is close."""
    near = difflib.get_close_matches(name, list(names), n=3, cutoff=0.6)
    return " Did you mean " + " or ".join(f'"{n}"' for n in near) + "?" if near else ""


def one_line(text: object, most: int = 300) -> str:
    """Text from elsewhere for a log or a terminal: on one line, truncated, with terminal control characters escaped."""
    said = str(text)
    cut = said[:most] + "…" * (len(said) > most)
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in cut)
