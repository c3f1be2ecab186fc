"""Prompts without answers, rewarded only by a reward model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lockstep.errors import UserError
from lockstep.rl.environment import Environment, Example
from lockstep.rl.environments.problems import needs_text, read_problems, text_of

KEYS = ("prompt",)


class Prompts(Environment):
    """Lines with a `prompt`: a string, or a list with a single user message, as in preference data."""

    has_rewards = False

    def examples(self, split: str) -> Iterator[Example]:
        for where, values in read_problems(self.data, split, self.skip_bad_lines, "a `prompt`"):
            if (prompt := _asked(values)) is not None:
                yield Example(prompt, id=where)
            elif not self.skip_bad_lines:
                if isinstance(values.get("prompt"), list):
                    raise UserError(
                        f"{where}: `prompt` is a list, but not of exactly one user message; give one, or write your "
                        "own environment (docs/environments.md); --skip-bad-lines skips such lines"
                    )
                raise needs_text(where, values, KEYS)


def _asked(values: dict[str, Any]) -> str | None:
    """The prompt of a line; None if it has no usable one."""
    prompt = values.get("prompt")
    if not isinstance(prompt, list):
        return text_of(values, KEYS)
    if len(prompt) != 1 or not isinstance(prompt[0], dict) or prompt[0].get("role") != "user":
        return None
    return text_of(prompt[0], ("content",))
