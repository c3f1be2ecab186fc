"""Conversations to tokens, with the loss on what the assistant says."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lockstep.data.chat import ChatTemplate, ChatTemplateError
from lockstep.data.encode import Encoded, half_a_pair, token_dtype
from lockstep.data.messages import FLAGS, LAYOUTS, are_messages, in_our_layout, is_trained, plain, refuse_hidden
from lockstep.data.records import HUB, Tally, holds_records, read_hub, read_records
from lockstep.data.template_values import template_values
from lockstep.data.text import find_files
from lockstep.data.tokenizer import Tokenizer
from lockstep.errors import UserError

KEYS = ("messages", "prompt", "completion", "tools", "chat_template_kwargs", *LAYOUTS)
"""Keys of a line or row that are read."""


class Conversation(NamedTuple):
    """A line's or row's values, and its place."""

    where: str
    values: dict[str, Any]


class ConversationSource:
    """Lines of JSONL files, items of JSON arrays, rows of Parquet files or of `hf:NAME[:config][:split]`, as they are.

    Raises UserError if nothing matches, and, while reading, for a line that is not a JSON object unless these are
    skipped. `tally` counts what the latest reading has encountered.
    """

    keys: tuple[str, ...] = KEYS

    def __init__(self, data: str, skip_bad_lines: bool = False):
        self.data, self.skip_bad_lines = data, skip_bad_lines
        self.tally = Tally()
        self.streamed = data.startswith(HUB)
        self.files: list[Path] = [] if self.streamed else find_files(data)
        if other := [path for path in self.files if not holds_records(path)]:
            raise UserError(
                f"{other[0]}: contains no conversations; give .jsonl (one object per line), .json (an array) or "
                ".parquet files"
            )

    def read(self, skip: int = 0) -> Iterator[Conversation]:
        """The conversations from number `skip` on. Only a data set can skip."""
        self.tally = Tally()
        if self.data.startswith(HUB):
            yield from (Conversation(*row) for row in read_hub(self.data, skip))
        for path in self.files:
            for where, values in read_records(path, self.skip_bad_lines, self.tally, self.keys):
                yield Conversation(where, values)

    def describe(self) -> dict[str, Any]:
        return {}


@dataclass
class ConversationEncoder:
    """Tokens of `messages` rendered by the chat template, or of `prompt` and `completion` one after the other.

    What the assistant says (if there is a completion, in it alone), or a completion's text, is scored, with the
    end-of-text token directly after it. If the conversation ends with the assistant and without that token, it is
    added, before the template's white space.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    template_values: Mapping[str, Any] = field(default_factory=dict)
    """For the template; a row's `chat_template_kwargs` win over them."""

    def encode(self, batch: list[Conversation]) -> list[Encoded]:
        return [self._encode(conversation) for conversation in batch]

    def describe(self) -> dict[str, Any]:
        template = self.template
        given = {"template_values": dict(self.template_values)} if self.template_values else {}
        return (
            {"chat_template": template.source, "special_tokens": template.special_tokens, **given} if template else {}
        )

    def weight(self, item: Conversation) -> int:
        return sum(len(str(value)) for value in item.values.values())

    def _encode(self, conversation: Conversation) -> Encoded:
        try:
            text, spans = self.text(conversation.values)
        except ChatTemplateError as error:
            return self._bad(f"{conversation.where}: {error}; fix it")
        encoded = self.tokens(conversation.where, text, spans)
        if encoded.scored is not None and not encoded.scored[1:].any():  # nothing comes before the first
            return self._bad(f"{conversation.where}: its answer has no token that can be scored; give it a prompt")
        return encoded

    def tokens(self, where: str, text: str, spans: list[tuple[int, int]]) -> Encoded:
        """Tokens of a whole conversation's text; the characters in `spans` are scored."""
        if not any(stop > start for start, stop in spans):
            return self._bad(f"{where}: the assistant says nothing in it; leave it out")
        try:
            ids, places = self.tokenizer.encode_with_spans(text)
        except (UnicodeEncodeError, TypeError):
            return self._bad(f"{where}: {half_a_pair(text)}")
        tokens = np.array(ids, dtype=np.int64)
        starts, stops = np.array(places, dtype=np.int64).reshape(-1, 2).T
        scored = np.zeros(len(tokens), dtype=bool)
        for start, stop in spans:
            scored |= self._up_to_the_end(tokens, (stops > start) & (starts < stop))
        tokens, scored = self._with_the_end(tokens, scored, ends=not text[spans[-1][1] :].strip())
        return Encoded(tokens.astype(token_dtype(self.tokenizer)), scored)

    def text(self, values: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        """The conversation's text, and the spans of characters that are the assistant's.

        Raises ChatTemplateError for values that are not a conversation, or not one that the template renders.
        """
        values = in_our_layout(values)
        messages, prompt, completion = (values.get(key) for key in ("messages", "prompt", "completion"))
        if messages is not None and completion is not None:
            raise ChatTemplateError('has "messages" as well as "completion"; leave one of them out')
        if isinstance(prompt, str) and isinstance(completion, str):
            return prompt + completion, [(len(prompt), len(prompt) + len(completion))]
        if are_messages(prompt) and are_messages(completion):
            return self._continued(prompt, completion, self._values(values))
        if not are_messages(messages):
            here = [name for name, value in values.items() if value is not None]
            raise ChatTemplateError(
                'needs "messages", a list of objects with "role" and "content", or "prompt" and "completion", both '
                f"texts or both such lists (here: {', '.join(here):.200})"
            )
        text, spans = self._rendered(messages, self._values(values))
        if not spans:
            roles = ", ".join(dict.fromkeys(str(message["role"]) for message in messages))
            raise ChatTemplateError(f"the assistant says nothing in it (roles here: {roles or 'none':.200})")
        return text, spans

    def _continued(
        self, prompt: list[Any], completion: list[Any], values: dict[str, Any]
    ) -> tuple[str, list[tuple[int, int]]]:
        """As `text`; what the assistant says in the prompt is not its own, flagged or not."""
        prompt = [{key: value for key, value in message.items() if key not in FLAGS} for message in prompt]
        text, spans = self._rendered([*prompt, *completion], values)
        if any(message["role"] == "assistant" for message in prompt):
            before, said = self._rendered(prompt, values)
            if not text.startswith(before):
                raise ChatTemplateError("the chat template renders its prompt differently before an answer")
            spans = spans[len(said) :]
        return text, spans

    def _rendered(self, messages: list[Any], values: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        if self.template is None:
            raise UserError(
                "the data has messages, but the model's folder has no chat template; give --template FILE, or "
                "--template chatml"
            )
        trained = [is_trained(message) for message in messages]
        answers = [wanted for message, wanted in zip(messages, trained) if message["role"] == "assistant"]
        if answers and not any(answers):
            raise ChatTemplateError("none of its answers is to be trained on; leave it out")
        plain_ones = [plain(message) for message in messages]
        others = [{**m, "role": "system"} if m["role"] == "developer" else m for m in plain_ones]
        try:
            return self._shown(plain_ones, trained, values)
        except ChatTemplateError:
            if others == plain_ones:
                raise
        return self._shown(others, trained, values)  # most templates know the developer as the system

    def _shown(
        self, messages: list[dict[str, Any]], trained: list[bool], values: dict[str, Any]
    ) -> tuple[str, list[tuple[int, int]]]:
        assert self.template is not None
        text, spans = self.template.render_with_assistant(messages, trained, **values)
        refuse_hidden(self.template, messages, text, **values)
        return text, spans

    def _values(self, row: dict[str, Any]) -> dict[str, Any]:
        """What a row gives the template besides the messages."""
        own = template_values(row.get("chat_template_kwargs"), self.template)
        return {"tools": self._tools(row), **self.template_values, **own}

    def _tools(self, values: dict[str, Any]) -> list[Any] | None:
        """The row's `tools`, which can be JSON in a string, since in Parquet objects have the keys of all others."""
        tools = values.get("tools") or None
        if isinstance(tools, str):
            tools = _from_json("tools", tools)
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            raise ChatTemplateError('"tools" is neither a list of objects nor JSON of one')
        if tools and self.template is not None and "tools" not in self.template.variables:
            raise ChatTemplateError('has "tools", which the chat template does not show; leave them out, or change it')
        return tools

    def _up_to_the_end(self, tokens: np.ndarray, inside: np.ndarray) -> np.ndarray:
        """Without what a template writes after the end-of-text token, which a model never generates."""
        ends = np.flatnonzero(inside & (tokens == self.tokenizer.eos_id))
        if len(ends):
            inside[ends[-1] + 1 :] = False
        return inside

    def _with_the_end(self, tokens: np.ndarray, scored: np.ndarray, ends: bool) -> tuple[np.ndarray, np.ndarray]:
        """Scores an end-of-text token directly after scored tokens; with `ends`, adds one after the last of them."""
        end = self.tokenizer.eos_id
        if end is None or not scored.any():
            return tokens, scored
        follows = np.concatenate([[False], scored[:-1] & (tokens[:-1] != end)])
        scored = scored | (follows & (tokens == end))
        last = int(np.flatnonzero(scored)[-1])
        if ends and tokens[last] != end:
            tokens, scored = np.insert(tokens, last + 1, end), np.insert(scored, last + 1, True)
        return tokens, scored

    def _bad(self, problem: str) -> Encoded:
        return Encoded(np.empty(0, token_dtype(self.tokenizer)), problem=problem)


def _from_json(name: str, text: str) -> Any:
    """A row's value that is JSON in a string, since in Parquet objects have the keys of all others."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ChatTemplateError(f'"{name}" is not JSON ({error})') from error
