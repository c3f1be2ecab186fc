"""A model's end tokens: one set for everything that samples, and for saved models."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from lockstep.data.chat import ChatTemplate, ChatTemplateError
from lockstep.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lockstep.model import ModelConfig  # imports torch, which the processes that read data do not need

ANSWER = "\uf8f1answer\uf8f2"
"""Text with private-use characters, which templates output unchanged."""
CONVERSATIONS = (("user", "assistant"), ("system", "user", "assistant"), ("assistant",))
"""Roles of conversations; every template accepts at least one of these."""


def with_ends(config: ModelConfig, tokenizer: Tokenizer, template: ChatTemplate | None) -> ModelConfig:
    """A model's config with all its end tokens (`ends_of_text`), without tokens outside its vocabulary."""
    configured = config.eos_token_ids
    ends = ends_of_text(configured, tokenizer, template)
    valid = (token for token in ends if token in configured or token < config.vocab_size)
    return replace(config, eos_token_ids=tuple(valid))


def ends_of_text(
    of_model: Iterable[int], tokenizer: Tokenizer, template: ChatTemplate | None = None
) -> tuple[int, ...]:
    """The ids of the model's end tokens (those in `config.json` and `generation_config.json`), of the tokenizer's, and
    of the one that ends an answer in the chat template, in this order, without duplicates."""
    ends = dict.fromkeys([*of_model, tokenizer.eos_id, _end_of_turn(tokenizer, template)])
    return tuple(token for token in ends if token is not None)


def name_ends(ends: Iterable[int], tokenizer: Tokenizer) -> str:
    """The end tokens in words, for a command's start line."""
    names = {number: name for name, number in tokenizer.vocabulary().items()}
    named = [f"{names[token]} ({token})" if token in names else f"token {token}" for token in ends]
    return f"ends at {', '.join(named)}" if named else "no token ends a text"


def _end_of_turn(tokenizer: Tokenizer, template: ChatTemplate | None) -> int | None:
    """The added token, special or not, that the template writes after the last answer and optional white space; None if
    there is none.

    Only the last answer counts: gpt-oss's template ends earlier ones with a token that also ends reasoning.
    """
    if template is None:
        return None
    for roles in CONVERSATIONS:
        messages = [{"role": role, "content": ANSWER if role == "assistant" else "?"} for role in roles]
        try:
            text = template.render(messages, add_generation_prompt=False)
        except ChatTemplateError:
            continue
        _, answer, after = text.rpartition(ANSWER)
        added = tokenizer.added_tokens()
        candidates = [name for name in added if answer and after.lstrip().startswith(name)]
        return added[max(candidates, key=len)] if candidates else None
    return None
