"""A reward model's scores of what the policy says, as one more reward."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.config import RLConfig
from lockstep.data import ConversationEncoder, Tokenizer, load_tokenizer
from lockstep.data.chat import ChatTemplate, ChatTemplateError, load_chat_template
from lockstep.errors import UserError
from lockstep.model import Decoder, load_model, read_config
from lockstep.rl.actors.replicas import Replicas
from lockstep.rl.actors.scoring import score_groups
from lockstep.rl.conversations.rendering import Rendering
from lockstep.rl.environment import Environment
from lockstep.rl.rollouts import REWARD_MODEL, Rollout, episodes_of
from lockstep.train.packing import PackedRow, target_scores


class RewardModel:
    """A model whose head scores a text, and how a prompt and what was said become that text's tokens: as
    `lockstep reward-model` makes them of its data."""

    def __init__(self, model: Decoder, tokenizer: Tokenizer, template: ChatTemplate | None):
        self.model, self.template = model, template
        self._encoder = ConversationEncoder(tokenizer, template)
        names = sorted(tokenizer.special_tokens(), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names)) or r"(?!)")

    def tokens(self, rollout: Rollout, is_chat: bool) -> list[int]:
        """Of a completion with its prompt, or of a conversation up to its end. `is_chat`: the prompt is what a user
        says. What was said has no special tokens: their names are taken out of it. Raises UserError."""
        where = f"example {rollout.example.name}"
        if rollout.conversation is not None:
            if self.template is None:
                raise UserError(
                    "the reward model has no chat template, and cannot read conversations; put a chat_template.jinja "
                    "beside its weights"
                )
            values: dict[str, Any] = {"messages": self._without_special(rollout.conversation.messages)}
        elif is_chat and self.template is not None:
            said = self._without_special(rollout.completion)
            asked, answer = {"role": "user", "content": rollout.example.prompt}, {"role": "assistant", "content": said}
            values = {"messages": [asked, answer]}
        else:
            prompt = rollout.example.prompt
            values = {"prompt": prompt, "completion": self._behind(prompt, self._without_special(rollout.completion))}
        try:
            text, _ = self._encoder.text(values)
        except ChatTemplateError as error:
            raise UserError(f"{where}: the reward model cannot read it: {error}") from error
        if not text:
            raise UserError(f"{where}: has neither a prompt nor a completion, so there is nothing to score")
        # An answer may be empty: whatever stands last, the text's end is scored.
        encoded = self._encoder.tokens(where, text, [(len(text) - 1, len(text))])
        if encoded.problem:
            raise UserError(encoded.problem)
        most = self.model.config.max_positions
        if len(encoded.tokens) > most:
            raise UserError(
                f"{where}: prompt and completion are {len(encoded.tokens)} tokens of the reward model, whose context "
                f"has {most}; lower max_new_tokens, or give a reward model with a longer context"
            )
        return [int(token) for token in encoded.tokens]

    def _behind(self, prompt: str, said: str) -> str:
        """What was said, without the rest of a special token's name that the prompt's end has begun."""
        while name := next((m for m in self._special.finditer(prompt + said) if m.end() > len(prompt)), None):
            said = self._without_special(said[name.end() - len(prompt) :])
        return said

    def _without_special(self, value: Any) -> Any:
        if isinstance(value, str):
            while (less := self._special.sub("", value)) != value:  # what is left may be a name again
                value = less
            return value
        if isinstance(value, dict):
            return {self._without_special(key): self._without_special(own) for key, own in value.items()}
        return [self._without_special(own) for own in value] if isinstance(value, list) else value


def load_reward_model(config: RLConfig, environment: Environment, device: torch.device) -> RewardModel | None:
    """The run's, whole on every rank and in its own dtype; None without one.

    Raises UserError for a folder that has none, and where neither the environment nor a model rewards.
    """
    if not config.reward_model:
        if not environment.has_rewards:
            raise UserError(
                f"the environment {config.environment} has no rewards of its own; give --reward-model with the folder "
                "of a run of lockstep reward-model"
            )
        return None
    folder = Path(config.reward_model)
    if not read_config(folder).score_head:
        raise UserError(
            f"reward_model {folder}: is a language model, whose head gives no score; train one with lockstep "
            "reward-model, or give a folder of transformers' …ForSequenceClassification with one label"
        )
    model = load_model(folder, device=device).requires_grad_(False)
    return RewardModel(model, load_tokenizer(folder, model.config.vocab_size), load_chat_template(folder))


def assign_scores(
    rollouts: Sequence[Rollout],
    reward_model: RewardModel,
    rendering: Rendering,
    config: RLConfig,
    replicas: Replicas | None = None,
    moved: Callable[[], None] = lambda: None,
) -> None:
    """Adds the score of each completion or conversation as the reward `reward_model`, by its weight in the total.

    Those that do not count, for their reward failed, stay without; where failures count as 0, that is what is added to.
    Groups are shared out between `replicas`; None: all are scored here. moved:
    called for each micro-batch that is done. Raises UserError for a score that is no number.
    """
    episodes = [rows for rows in episodes_of(rollouts) if rows[-1].counts]
    texts = [reward_model.tokens(rows[-1], not rendering.is_rendered(rows[-1].example.prompt)) for rows in episodes]

    def score(row: PackedRow) -> Tensor:
        return target_scores(reward_model.model, row)

    asked = _as_rollouts([rows[-1] for rows in episodes], texts)
    for rows, (found,) in zip(episodes, score_groups(asked, config, reward_model.model.device, score, replicas, moved)):
        if not math.isfinite(found):
            raise UserError(
                f"the reward model's score of example {rows[-1].example.name} is {found}; check its weights"
            )
        if REWARD_MODEL in rows[-1].rewards:
            raise UserError(
                f"the environment has a reward named {REWARD_MODEL}, which is the reward model's; rename it"
            )
        for rollout in rows:
            rollout.rewards[REWARD_MODEL] = found
            rollout.reward += config.reward_model_weight * found


def _as_rollouts(rollouts: Sequence[Rollout], texts: Sequence[list[int]]) -> list[Rollout]:
    """Each text as a rollout whose one sampled token stands behind it; what a group's texts begin with is its prompt,
    which is computed once."""
    common: dict[int, list[int]] = {}
    for rollout, text in zip(rollouts, texts):
        before = common.setdefault(rollout.group, text)
        same = next(
            (i for i, (one, other) in enumerate(zip(before, text)) if one != other), min(len(before), len(text))
        )
        common[rollout.group] = before[: max(same, 1)]
    made = []
    for rollout, text in zip(rollouts, texts):
        prompt = common[rollout.group]
        rest = [*text[len(prompt) :], 0]
        sampled = [False] * (len(rest) - 1) + [True]
        made.append(Rollout(rollout.example, rollout.group, prompt, rest, [], "", "", 0, sampled=sampled))
    return made
