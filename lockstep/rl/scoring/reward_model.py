"""A reward model's scores of the policy's completions, as an additional reward."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import torch

from lockstep.config import RLConfig
from lockstep.data import ConversationEncoder, Tokenizer, load_tokenizer
from lockstep.data.answer_spans import ScoredText
from lockstep.data.chat import ChatTemplate, ChatTemplateError, load_chat_template
from lockstep.errors import UserError
from lockstep.hub import named_path
from lockstep.model import Decoder, load_model, read_config
from lockstep.rl.conversations.rendering import Rendering
from lockstep.rl.environments.protocol import Environment
from lockstep.rl.rollouts.records import REWARD_MODEL, Rollout, episodes_of
from lockstep.rl.scoring.forward import ForwardPasses
from lockstep.train.packing import target_scores


class RewardModel:
    """A model whose head scores a text, and the tokenization of a prompt and completion for it: the same as
    `lockstep reward-model` uses for its data."""

    def __init__(self, model: Decoder, tokenizer: Tokenizer, template: ChatTemplate | None):
        self.model, self.template = model, template
        self._encoder = ConversationEncoder(tokenizer, template, turns="whole")
        names = sorted(tokenizer.special_tokens(), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names)) or r"(?!)")

    def tokens(self, rollout: Rollout, is_chat: bool) -> list[int]:
        """The tokens of a completion with its prompt, or of a conversation up to its end. `is_chat`: the prompt is
        messages, or a user's. Names of special tokens are removed from messages and completion. Raises UserError."""
        where = f"example {rollout.example.name}"
        prompt_messages, answer = rollout.example.messages, self._without_special(rollout.completion)
        is_text = rollout.conversation is None and [message["role"] for message in prompt_messages] == ["user"]
        if self.template is None and not is_text:
            raise UserError(
                "the reward model has no chat template, so it cannot read conversations; put a chat_template.jinja "
                "next to its weights"
            )
        if rollout.conversation is not None:
            values: dict[str, Any] = {"messages": self._without_special(rollout.conversation.messages)}
        elif not is_text or (is_chat and self.template is not None):
            values = {"messages": [*prompt_messages, {"role": "assistant", "content": answer}]}
        else:
            prompt = prompt_messages[0]["content"]
            values = {"prompt": prompt, "completion": self._answer_after(prompt, answer)}
        try:
            ((text, _),) = self._encoder.scored_texts(values)
        except ChatTemplateError as error:
            raise UserError(f"{where}: the reward model cannot read it: {error}") from error
        if not text:
            raise UserError(f"{where}: has neither a prompt nor a completion, so there is nothing to score")
        # An answer may be empty: the end of the text is always scored.
        encoded = self._encoder.tokens(where, ScoredText(text, [(len(text) - 1, len(text))]))
        if encoded.problem:
            raise UserError(encoded.problem)
        most = self.model.config.max_positions
        if len(encoded.tokens) > most:
            raise UserError(
                f"{where}: prompt and completion are {len(encoded.tokens)} tokens for the reward model, whose context "
                f"is {most}; lower max_new_tokens, or give a reward model with a longer context"
            )
        return [int(token) for token in encoded.tokens]

    def _answer_after(self, prompt: str, answer: str) -> str:
        """The answer without the rest of a special token's name that starts at the end of the prompt."""
        while name := next((m for m in self._special.finditer(prompt + answer) if m.end() > len(prompt)), None):
            answer = self._without_special(answer[name.end() - len(prompt) :])
        return answer

    def _without_special(self, value: Any) -> Any:
        if isinstance(value, str):
            while (less := self._special.sub("", value)) != value:  # the rest may form a name again
                value = less
            return value
        if isinstance(value, dict):
            return {self._without_special(key): self._without_special(item) for key, item in value.items()}
        return [self._without_special(item) for item in value] if isinstance(value, list) else value


def load_reward_model(config: RLConfig, environment: Environment, device: torch.device) -> RewardModel | None:
    """The run's reward model, whole on every rank and in its folder's dtype; None without one.

    Raises UserError for a folder without a reward model, and if neither the environment nor a model gives rewards.
    """
    if not config.reward_model:
        if not environment.has_rewards:
            raise UserError(
                f"the environment {config.environment} has no rewards of its own; give --reward-model with the folder "
                "of a lockstep reward-model run"
            )
        return None
    folder = named_path(config.reward_model)
    if not read_config(folder).score_head:
        raise UserError(
            f"reward_model {folder}: is a language model without a score head; train one with lockstep reward-model, "
            "or give the folder of a transformers …ForSequenceClassification model with one label"
        )
    model = load_model(folder, device=device).requires_grad_(False)
    return RewardModel(model, load_tokenizer(folder, model.config.vocab_size), load_chat_template(folder))


class RewardModelScorer:
    """Adds a reward model's score of each completion or conversation as the reward `reward_model`."""

    def __init__(self, reward_model: RewardModel, rendering: Rendering, weight: float, forward: ForwardPasses):
        """weight: of the score in the total reward."""
        self._reward_model, self._rendering, self._weight, self._forward = reward_model, rendering, weight, forward

    def score(self, rollouts: Sequence[Rollout]) -> None:
        """Scores the rollouts whose reward counts; if its failures count as 0, the score is added to 0.

        Raises UserError for a score that is not finite.
        """
        model, rendering = self._reward_model, self._rendering
        episodes = [rows for rows in episodes_of(rollouts) if rows[-1].scores.counts]
        texts = [model.tokens(rows[-1], not rendering.is_rendered(rows[-1].example.prompt)) for rows in episodes]
        scored = self._forward.per_token(
            _as_rollouts([rows[-1] for rows in episodes], texts),
            model.model.device,
            lambda row: target_scores(model.model, row),
        )
        for rows, (score,) in zip(episodes, scored):
            if not math.isfinite(score):
                raise UserError(
                    f"the reward model's score of example {rows[-1].example.name} is {score}; check its weights"
                )
            if REWARD_MODEL in rows[-1].scores.rewards:
                raise UserError(
                    f"the environment has a reward named {REWARD_MODEL}, a name reserved for the reward model; rename "
                    "it"
                )
            for rollout in rows:
                rollout.scores.rewards[REWARD_MODEL] = score
                rollout.scores.reward += self._weight * score


def _as_rollouts(rollouts: Sequence[Rollout], texts: Sequence[list[int]]) -> list[Rollout]:
    """Each text as a rollout with one sampled token at the end; the common prefix of a group's texts is its prompt,
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
