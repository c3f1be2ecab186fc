"""Prompts without answers, for training with a reward model alone."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.rl.environments.problems import needs_text, prompt_of, read_problems
from lockstep.rl.environments.protocol import Environment, Example

KEYS = ("prompt",)


class Prompts(Environment):
    """Lines with a `prompt`: a string, or a list of messages, as in preference data."""

    has_rewards = False

    def examples(self, split: str) -> Iterator[Example]:
        for where, values in read_problems(self.data, split, self.skip_bad_lines, "a `prompt`"):
            if (prompt := prompt_of(values, KEYS)) is not None:
                yield Example(prompt, id=where, chat_template_kwargs=values["chat_template_kwargs"])
            elif not self.skip_bad_lines:
                raise needs_text(where, values, KEYS)
