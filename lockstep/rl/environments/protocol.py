"""A task with examples and rewards."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

Message = dict[str, Any]
"""As in chat templates: `role` (system, user, assistant, tool), `content`, and other fields that a template shows."""


@dataclass(frozen=True)
class Example:
    """A prompt, and what its completions are graded against."""

    prompt: str | list[Message] = field(hash=False)
    """A text, which a chat template renders as a user message, or a list of messages, such as system and user."""
    answer: str = ""
    id: str = ""
    """Names the example in errors; default: the beginning of the prompt."""
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Other data that the environment's reward needs."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Values for the chat template, such as `{"enable_thinking": False}`, which take precedence over the run's."""

    @property
    def name(self) -> str:
        return self.id or repr(self.text[:60])

    @property
    def text(self) -> str:
        """The prompt as text for people; messages become lines of `role: content`."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n".join(f"{message['role']}: {message.get('content') or ''}" for message in self.prompt)

    @property
    def messages(self) -> list[Message]:
        """The prompt as messages."""
        return [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else list(self.prompt)


RewardFunction = Callable[[Example, str], float | Awaitable[float]]
"""A single reward: a plain function or a coroutine of an example and a completion."""


class Environment:
    """Examples and their rewards. Subclass it and write `examples`, and `reward` or `rewards`."""

    stop: ClassVar[tuple[str, ...]] = ()
    """Strings that end a completion."""
    reward_weights: ClassVar[Mapping[str, float]] = {}
    """Weights of named rewards in the total, which training uses; default: 1."""

    has_rewards: ClassVar[bool] = True
    """Whether the environment rewards completions; if not, only a reward model does."""
    in_workers: ClassVar[bool] = False
    """Whether a built-in task's rewards and conversations can take long or fail, and so run in worker processes if
    `rewards.isolate` is auto, like those of a FILE.py:Class."""
    marks_reasoning: ClassVar[bool] = False
    """Whether a completion whose text does not show where its reasoning ends, as when the prompt opened it, gets the
    missing tags: see `lockstep.rl.conversations.reasoning`. The built-in environments grade only the
    text after it."""
    rewards: ClassVar[Mapping[str, RewardFunction]] = {}
    """Reward functions by name, in place of a method `reward`."""

    def __init__(self, data: str = "", skip_bad_lines: bool = False):
        self.data = data
        self.skip_bad_lines = skip_bad_lines

    def examples(self, split: str) -> Iterable[Example]:
        """The examples of `"train"` or `"validation"`: finitely many, and the same for every call."""
        raise NotImplementedError(f"{type(self).__name__} must define examples(self, split)")

    def reward(self, example: Example, completion: str) -> float | dict[str, float]:
        """The reward of a completion: one number, or several by name. Can be a coroutine (`async def`)."""
        if not self.has_rewards:
            return {}
        if self.rewards:
            # The caller awaits the coroutines among these.
            return {name: function(example, completion) for name, function in self.rewards.items()}  # type: ignore
        raise NotImplementedError(f"{type(self).__name__} must define reward(self, example, completion)")

    def is_correct(self, rewards: Mapping[str, float]) -> bool:
        """Whether rewards mean a correct answer: the one named `correct`, or else the sum of all, is at least 1."""
        return rewards.get("correct", sum(rewards.values())) >= 1.0

    def knows_correct(self, rewards: Mapping[str, float]) -> bool:
        """Whether accuracy is defined: there is a reward named `correct`, or the class overrides `is_correct`."""
        return "correct" in rewards or type(self).is_correct is not Environment.is_correct


def source_file(kind: type[Environment]) -> Path | None:
    """The file that defines an environment; None in an interactive session."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return Path(file) if file else None
