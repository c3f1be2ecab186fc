"""Splits a reply's text into reasoning and answer, for rewards that read texts."""

from __future__ import annotations

import re

BEGIN_THINK, END_THINK = "<think>", "</think>"
FENCE = re.compile(r"^ {0,3}(?:```|~~~)", re.MULTILINE)


def answer_text(text: str) -> str:
    """The text after the reasoning; empty if the reasoning is not closed.

    A `</think>` without `<think>` closes reasoning that the prompt opened, but not inside a code block.
    """
    return _split(text)[1]


def reasoning_text(text: str) -> str:
    """The reasoning, without its tags."""
    return _split(text)[0]


def _split(text: str) -> tuple[str, str]:
    is_open = text.lstrip().startswith(BEGIN_THINK)
    before, closed, after = text.partition(END_THINK)
    if not (is_open or closed) or (not is_open and len(FENCE.findall(before)) % 2):
        return "", text
    return before.lstrip().removeprefix(BEGIN_THINK), after


def with_reasoning_marked(text: str, content: str) -> str:
    """A reply's text, changed if necessary so that `answer_text` returns its `content`, as parsed from its tokens.

    It stays the same, or gets the `<think>` that was in the prompt, or is replaced by empty reasoning and `content`.
    """
    forms = text, BEGIN_THINK + text, BEGIN_THINK + END_THINK + content
    return next((form for form in forms if answer_text(form).strip() == content.strip()), forms[-1])
