"""The tokens that end what a model says: one set for everything that samples, and for what is saved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from lockstep.data.chat import ChatTemplate, ChatTemplateError
from lockstep.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lockstep.model import ModelConfig  # which imports torch; the processes that read data do without

ANSWER = "\uf8f1answer\uf8f2"
"""Private-use characters, which templates write as they are."""
CONVERSATIONS = (("user", "assistant"), ("system", "user", "assistant"), ("assistant",))
"""Roles of conversations, one of which every template accepts."""


def with_ends(config: ModelConfig, tokenizer: Tokenizer, template: ChatTemplate | None) -> ModelConfig:
    """A model's shape with all its end tokens (`ends_of_text`), as far as it has the tokenizer's."""
    own = config.eos_token_ids
    ends = ends_of_text(own, tokenizer, template)
    return replace(config, eos_token_ids=tuple(token for token in ends if token in own or token < config.vocab_size))


def ends_of_text(
    of_model: Iterable[int], tokenizer: Tokenizer, template: ChatTemplate | None = None
) -> tuple[int, ...]:
    """The ids of a model's own end tokens (those in `config.json` and `generation_config.json`), of the tokenizer's,
    and of the one that ends an answer in the chat template, each once, in this order."""
    ends = dict.fromkeys([*of_model, tokenizer.eos_id, _end_of_turn(tokenizer, template)])
    return tuple(token for token in ends if token is not None)


def name_ends(ends: Iterable[int], tokenizer: Tokenizer) -> str:
    """For a command's start line."""
    names = {number: name for name, number in tokenizer.vocabulary().items()}
    named = [f"{names[token]} ({token})" if token in names else f"token {token}" for token in ends]
    return f"ends at {', '.join(named)}" if named else "no token ends a text"


def _end_of_turn(tokenizer: Tokenizer, template: ChatTemplate | None) -> int | None:
    """The added token, special or not, that the template writes right after the last answer, apart from white space;
    None: there is none.

    Only after the last: gpt-oss's template ends earlier answers with a token that also ends its reasoning.
    """
    if template is None:
        return None
    for roles in CONVERSATIONS:
        messages = [{"role": role, "content": ANSWER if role == "assistant" else "?"} for role in roles]
        try:
            text = template.render(messages, add_generation_prompt=False)
        except ChatTemplateError:
            continue
        _, found, after = text.rpartition(ANSWER)
        added = tokenizer.added_tokens()
        begun = [name for name in added if found and after.lstrip().startswith(name)]
        return added[max(begun, key=len)] if begun else None
    return None
