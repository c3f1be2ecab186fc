"""What a reply's text says apart from its reasoning, for rewards that read texts."""

from __future__ import annotations

import re

THINK, THINK_END = "<think>", "</think>"
FENCE = re.compile(r"^ {0,3}(?:```|~~~)", re.MULTILINE)


def spoken(text: str) -> str:
    """What stands behind the reasoning; nothing, if the reasoning has begun and not ended.

    A `</think>` without its beginning ends reasoning that the prompt has begun, but not within a block of code.
    """
    return _parted(text)[1]


def thought(text: str) -> str:
    """The reasoning, without its tags."""
    return _parted(text)[0]


def _parted(text: str) -> tuple[str, str]:
    begun = text.lstrip().startswith(THINK)
    before, closed, after = text.partition(THINK_END)
    if not (begun or closed) or (not begun and len(FENCE.findall(before)) % 2):
        return "", text
    return before.lstrip().removeprefix(THINK), after


def with_reasoning_marked(text: str, content: str) -> str:
    """A reply's text in which `spoken` finds its content, which its tokens and its prompt have told: as it is, or with
    the `<think>` that the prompt has, or else the content alone behind an empty thought."""
    forms = text, THINK + text, THINK + THINK_END + content
    return next((form for form in forms if spoken(form).strip() == content.strip()), forms[-1])
