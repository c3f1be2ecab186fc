"""A task with examples and rewards."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

Message = dict[str, Any]
"""As chat templates expect: `role` (system, user, assistant, tool), `content`, and whatever else a template shows."""


@dataclass(frozen=True)
class Example:
    """A prompt and what its completion is graded against."""

    prompt: str | list[Message] = field(hash=False)
    """A text, which a chat template renders as a user message, or messages, such as those of a system and a user."""
    answer: str = ""
    id: str = ""
    """Names the example in errors; if empty, the beginning of the prompt does."""
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Whatever else the environment's reward needs."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Values for the chat template, such as `{"enable_thinking": False}`, which win over the run's."""

    @property
    def name(self) -> str:
        return self.id or repr(self.text[:60])

    @property
    def text(self) -> str:
        """The prompt for people: of messages, `role: content` line by line."""
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
    """A completion ends after any of these strings."""
    reward_weights: ClassVar[Mapping[str, float]] = {}
    """Weights of named rewards in the total that is trained on; a name that is missing here has weight 1."""

    has_rewards: ClassVar[bool] = True
    """Whether completions are rewarded here; if not, only a reward model rewards them."""
    in_workers: ClassVar[bool] = False
    """Whether a built-in task's rewards and conversations can take long or fail, and so run in worker processes if
    `rewards.isolate` is auto, like those of a FILE.py:Class."""
    marks_reasoning: ClassVar[bool] = False
    """Whether a completion whose text alone does not show where its reasoning ends, as where the prompt has begun it,
    gets the tags that show it: see `lockstep.rl.conversations.reasoning`. The ready environments grade only the
    text after it."""
    rewards: ClassVar[Mapping[str, RewardFunction]] = {}
    """Reward functions by name, in place of a method `reward`."""

    def __init__(self, data: str = "", skip_bad_lines: bool = False):
        self.data = data
        self.skip_bad_lines = skip_bad_lines

    def examples(self, split: str) -> Iterable[Example]:
        """The examples of `"train"` or `"validation"`: finitely many, and the same at every call."""
        raise NotImplementedError(f"{type(self).__name__} must define examples(self, split)")

    def reward(self, example: Example, completion: str) -> float | dict[str, float]:
        """How good a completion is: one number, or several by name. Can be a coroutine (`async def`)."""
        if not self.has_rewards:
            return {}
        if self.rewards:
            # The caller awaits what a coroutine function returns here.
            return {name: function(example, completion) for name, function in self.rewards.items()}  # type: ignore
        raise NotImplementedError(f"{type(self).__name__} must define reward(self, example, completion)")

    def is_correct(self, rewards: Mapping[str, float]) -> bool:
        """Whether rewards count as a correct answer: the one named `correct`, or else the sum of all, is at least 1."""
        return rewards.get("correct", sum(rewards.values())) >= 1.0

    def knows_correct(self, rewards: Mapping[str, float]) -> bool:
        """Whether accuracy is defined: there is a reward named `correct`, or the class overrides `is_correct`."""
        return "correct" in rewards or type(self).is_correct is not Environment.is_correct


def source_file(kind: type[Environment]) -> Path | None:
    """The file that defines an environment; None if there is none, as in an interactive session."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return Path(file) if file else None


def user_line(error: BaseException, file: Path | None = None) -> str:
    """`file:line` where an error occurred: in `file` if its traceback passes through it, else its innermost frame."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if file is not None and Path(f.filename).resolve() == file.resolve()]
    # A file with a syntax error has no frame of its own; one that calls `eval` on bad text does.
    if not own and isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frame = (own or list(frames))[-1]
    return f"{frame.filename}:{frame.lineno}"
