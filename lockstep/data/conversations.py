"""Tokenizes conversations, with the loss on the assistant's tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lockstep.data.answer_spans import ScoredText, Turns, render_answers
from lockstep.data.chat import ChatTemplate, ChatTemplateError, decoded, template_values
from lockstep.data.encode import Branch, Encoded, surrogate_problem, token_dtype
from lockstep.data.end_tokens import ends_of_text
from lockstep.data.messages import (
    FLAGS,
    LAYOUTS,
    are_messages,
    between_parts,
    in_our_layout,
    is_trained,
    plain,
    refuse_hidden,
    system_message,
)
from lockstep.data.records import HUB, Tally, holds_records, read_hub, read_records
from lockstep.data.text import find_files
from lockstep.data.tokenizer import Tokenizer, special_ids
from lockstep.errors import UserError

TOOLS = ("tools", "tool_defs", "functions")
"""Names of a row's tools; the last is OpenAI's older one, a list of functions."""
KEYS = ("messages", "prompt", "completion", *TOOLS, "chat_template_kwargs", *LAYOUTS)
"""Keys that are read of a line or row."""


class Conversation(NamedTuple):
    """A line's or row's values and its location."""

    where: str
    values: dict[str, Any]


class ConversationSource:
    """Lines of JSONL files, items of JSON arrays, rows of Parquet files or of `hf:NAME[:config][:split]`, unchanged.

    Raises UserError if nothing matches, and, while reading, for a line that is not a JSON object unless these are
    skipped. `tally` has the counts of the latest pass.
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
        """The conversations from number `skip` on. Only a streamed data set can skip."""
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
    """Tokens of `messages` rendered by the chat template, or of `prompt` followed by `completion`.

    The assistant's text (with a completion, only there) is scored through its end-of-turn token. With `turns` "apart",
    an answer that the template renders differently once others follow becomes a separate sequence, as it was sampled;
    with "whole", the rendering of the whole conversation is scored. If a text ends with an answer that has no
    end-of-turn token, the end-of-text token is added before the template's trailing white space.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    turns: Turns = "apart"
    template_values: Mapping[str, Any] = field(default_factory=dict)
    """For the template; a row's `chat_template_kwargs` take precedence."""

    def __post_init__(self) -> None:
        self._special = np.array(sorted(special_ids(self.tokenizer)), dtype=np.int64)
        names = {number: name for name, number in self.tokenizer.vocabulary().items()}
        self._ends = [names[token] for token in ends_of_text((), self.tokenizer, self.template)]

    def encode(self, batch: list[Conversation]) -> list[Encoded]:
        return [self._encode(conversation) for conversation in batch]

    def describe(self) -> dict[str, Any]:
        template = self.template
        if template is None:
            return {}
        tool_use = {"tool_use": template.tool_use.source} if template.tool_use else {}
        values = {"template_values": dict(self.template_values)} if self.template_values else {}
        rendering = {"chat_template": template.source, **tool_use, "special_tokens": template.special_tokens, **values}
        return {**rendering, "turns": self.turns}

    def weight(self, item: Conversation) -> int:
        return sum(len(str(value)) for value in item.values.values())

    def _encode(self, conversation: Conversation) -> Encoded:
        try:
            texts = self.scored_texts(conversation.values)
        except ChatTemplateError as error:
            return self._bad(f"{conversation.where}: {error}; fix it")
        sequences = [self.tokens(conversation.where, text) for text in texts]
        if bad := next((one for one in sequences if one.problem), None):
            return bad
        encoded = _as_one(sequences)
        assert encoded.scored is not None
        if not encoded.scored[1:].any():  # the first token has no context
            return self._bad(f"{conversation.where}: its answer has no token that can be scored; give it a prompt")
        return encoded

    def tokens(self, where: str, scored_text: ScoredText) -> Encoded:
        """Tokens of a text, scored within its spans."""
        text, spans = scored_text
        if not any(stop > start for start, stop in spans):
            return self._bad(f"{where}: the assistant says nothing in it; leave it out")
        try:
            ids, places = self.tokenizer.encode_with_spans(text)
        except (UnicodeEncodeError, TypeError):
            return self._bad(f"{where}: {surrogate_problem(text)}")
        tokens = np.array(ids, dtype=np.int64)
        starts, stops = np.array(places, dtype=np.int64).reshape(-1, 2).T
        scored = np.zeros(len(tokens), dtype=bool)
        for start, stop in spans:
            scored |= self._up_to_the_end(tokens, (stops > start) & (starts < stop), stops, text)
        tokens, scored = self._with_the_end(tokens, scored, ends=not text[spans[-1][1] :].strip())
        return Encoded(tokens.astype(token_dtype(self.tokenizer)), scored)

    def scored_texts(self, values: dict[str, Any]) -> list[ScoredText]:
        """The conversation's text with the assistant's spans, then the texts of answers that are separate sequences.

        Raises ChatTemplateError for values that are not a conversation, or that the template refuses.
        """
        values = in_our_layout(values)
        messages, prompt, completion = (values.get(key) for key in ("messages", "prompt", "completion"))
        if messages is not None and completion is not None:
            raise ChatTemplateError('has "messages" as well as "completion"; leave one of them out')
        if isinstance(prompt, str) and isinstance(completion, str):
            if values.get("system"):
                raise ChatTemplateError('has "system" with a prompt that is a text; write the prompt as messages')
            return [ScoredText(prompt + completion, [(len(prompt), len(prompt) + len(completion))])]
        if are_messages(prompt) and are_messages(completion):
            # The assistant's messages in the prompt are context, whatever their flags.
            prompt = [*system_message(values, prompt), *prompt]
            unflagged = [{key: value for key, value in message.items() if key not in FLAGS} for message in prompt]
            trained = [False] * len(prompt) + [is_trained(message) for message in completion]
            return self._rendered([*unflagged, *completion], trained, self._values(values))
        if not are_messages(messages):
            present = [name for name, value in values.items() if value is not None]
            raise ChatTemplateError(
                'needs "messages", a list of objects with "role" and "content", or "prompt" and "completion", both '
                f"texts or both such lists (here: {', '.join(present):.200})"
            )
        trained = [is_trained(message) for message in messages]
        answers = [wanted for message, wanted in zip(messages, trained) if message["role"] == "assistant"]
        if answers and not any(answers):
            raise ChatTemplateError("none of its answers is trained on; leave it out")
        texts = self._rendered(messages, trained, self._values(values))
        if not texts[0].spans:
            roles = ", ".join(dict.fromkeys(str(message["role"]) for message in messages))
            raise ChatTemplateError(f"the assistant says nothing in it (roles here: {roles or 'none':.200})")
        return texts

    def _rendered(self, messages: list[Any], trained: list[bool], values: dict[str, Any]) -> list[ScoredText]:
        if self.template is None:
            raise UserError(
                "the data has messages, but the model's folder has no chat template; give --template FILE, or "
                "--template chatml"
            )
        several = any(isinstance(m.get("content"), list) and len(m["content"]) > 1 for m in messages)
        between = between_parts(self.template.used_with(values["tools"])) if several else ""
        converted = [plain(message, between) for message in messages]
        as_system = [{**m, "role": "system"} if m["role"] == "developer" else m for m in converted]
        try:
            return self._answers(converted, trained, values)
        except ChatTemplateError:
            if as_system == converted:
                raise
        return self._answers(as_system, trained, values)  # most templates have no developer role

    def _answers(self, messages: list[dict[str, Any]], trained: list[bool], values: dict[str, Any]) -> list[ScoredText]:
        assert self.template is not None
        template = self.template.used_with(values["tools"])
        text = template.render(messages, add_generation_prompt=False, **values)
        refuse_hidden(template, messages, trained, text, **values)
        return render_answers(template, messages, text, trained, self.turns, self._ends, **values)

    def _values(self, row: dict[str, Any]) -> dict[str, Any]:
        """The row's template variables besides the messages."""
        tools = self._tools(row)
        kwargs = template_values(row.get("chat_template_kwargs"), self.template and self.template.used_with(tools))
        return {"tools": tools, **self.template_values, **kwargs}

    def _tools(self, values: dict[str, Any]) -> list[Any] | None:
        """The row's `tools`; may be a JSON string, since every Parquet object has the keys of all objects."""
        name = next((name for name in TOOLS if values.get(name)), "tools")
        tools = values.get(name) or None
        if isinstance(tools, str):
            tools = decoded(f'"{name}"', tools)
        if name == "functions" and isinstance(tools, list):
            tools = [{"type": "function", "function": function} for function in tools]
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            raise ChatTemplateError('"tools" is neither a list of objects nor JSON of one')
        if tools and self.template is not None and "tools" not in self.template.used_with(tools).variables:
            raise ChatTemplateError('has "tools", which the chat template does not show; leave them out, or change it')
        return tools

    def _up_to_the_end(self, tokens: np.ndarray, inside: np.ndarray, stops: np.ndarray, text: str) -> np.ndarray:
        """Excludes what the template writes after the end of the turn, which a model never generates.

        The turn ends with the end-of-text token, or with a special token that only white space follows.
        """
        span = np.flatnonzero(inside)
        ends = span[tokens[span] == self.tokenizer.eos_id]
        if not len(ends):
            ends = span[np.isin(tokens[span], self._special)]
            ends = ends if len(ends) and not text[stops[ends[-1]] : stops[span[-1]]].strip() else ends[:0]
        if len(ends):
            inside[ends[-1] + 1 :] = False
        return inside

    def _with_the_end(self, tokens: np.ndarray, scored: np.ndarray, ends: bool) -> tuple[np.ndarray, np.ndarray]:
        """Scores a special token after scored tokens; if there is none and `ends`, adds the end-of-text token."""
        if not scored.any():
            return tokens, scored
        special = np.isin(tokens, self._special) & (tokens != self.tokenizer.bos_id)
        follows = np.concatenate([[False], scored[:-1] & ~special[:-1]])
        scored = scored | (follows & special)
        last = int(np.flatnonzero(scored)[-1])
        if ends and not special[last] and self.tokenizer.eos_id is not None:
            tokens, scored = np.insert(tokens, last + 1, self.tokenizer.eos_id), np.insert(scored, last + 1, True)
        return tokens, scored

    def _bad(self, problem: str) -> Encoded:
        return Encoded(np.empty(0, token_dtype(self.tokenizer)), problem=problem)


def _as_one(sequences: Sequence[Encoded]) -> Encoded:
    """Sequences with a common prefix as one document, which has the prefix shared with the first sequence once."""
    lead, *others = sequences
    assert lead.scored is not None
    branches = []
    for other in others:
        assert other.scored is not None
        # The token that predicts a scored token must be in the same branch.
        most = min(len(lead.tokens), max(int(np.flatnonzero(other.scored)[0]) - 1, 0))
        differs = np.flatnonzero(lead.tokens[:most] != other.tokens[:most])
        branches.append((int(differs[0]) if len(differs) else most, other))
    branches.sort(key=lambda branch: -branch[0])
    tokens = [lead.tokens, *(other.tokens[shared:] for shared, other in branches)]
    scored = [lead.scored, *(other.scored[shared:] for shared, other in branches)]  # type: ignore[index]
    starts = np.cumsum([len(part) for part in tokens])
    starts_and_shared = [Branch(int(start), shared) for start, (shared, _) in zip(starts, branches)]
    return Encoded(np.concatenate(tokens), np.concatenate(scored), branches=starts_and_shared)
