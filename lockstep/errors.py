"""Exceptions with a message for the user, and helpers for such messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Bad input; the message says what is wrong, where (file, line, key) and what to do.

    The command line prints the message without a traceback and exits with code 2.
    """


class ReportedByRank0(UserError):
    """The UserError of rank 0, raised on another rank, which does not print it again."""


class RunStopped(Exception):
    """A run ended before its last step, on all ranks; the message says at which step, why, and how to continue.

    The command line prints the message without a traceback and exits with `exit_code`.
    """

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


class StopRun(Exception):
    """Raised by an `on_metrics` callback: the run saves after this step and ends as if it had finished."""


def closest(name: str, names: Iterable[str]) -> str:
    """A hint like ' Did you mean "gsm8k"?' for a misspelled `name`; empty if nothing is close."""
    near = difflib.get_close_matches(name, list(names), n=3, cutoff=0.6)
    return " Did you mean " + " or ".join(f'"{n}"' for n in near) + "?" if near else ""


def one_line(text: object, most: int = 300) -> str:
    """Untrusted text for a log or a terminal: on one line, truncated, with control characters escaped."""
    whole = str(text)
    truncated = whole[:most] + "…" * (len(whole) > most)
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in truncated)
