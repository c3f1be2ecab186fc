"""Conversations as tokens: renders and encodes new messages, and keeps the sampled tokens of replies."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from lockstep.data import Tokenizer, ends_of_text
from lockstep.data.chat import ChatTemplate, ChatTemplateError, command_values, load_chat_template, template_values
from lockstep.data.messages import SHOWN_REASONING, shows_developer
from lockstep.data.replies import ReplyParts, read_reply, reply_form
from lockstep.errors import UserError
from lockstep.generate import Completion
from lockstep.hub import local_folder
from lockstep.model import TrainableModel
from lockstep.observe import log
from lockstep.rl.conversations.protocol import ConversationEnvironment
from lockstep.rl.conversations.reasoning import with_reasoning_marked
from lockstep.rl.conversations.schemas import schema_of
from lockstep.rl.environments.protocol import Environment, Example, Message

# Private-use characters, which templates leave unchanged, also in JSON. If a text contains them, they are escaped like
# names of special tokens.
LEFT, RIGHT = "\uf8f1", "\uf8f2"
MARK = f"{LEFT}reply{RIGHT}"
"""Placeholder for a reply, to find what the template writes after it."""

MAX_CHARACTERS = 128
"""Per token: the longest in use are 128 spaces. Encoding a text of many millions takes minutes."""
RENDERED = (
    "example %s: its prompt contains a special token, so it is assumed to be rendered by a chat template already and "
    "used as is, like other such prompts; chat = never uses all prompts as they are, chat = always renders all"
)
UNSHOWN = "the chat template of %s does not show tools, so the model does not see those of %s; list them in the prompt"
UNREAD = (
    "the chat template of %s shows the tools of %s, but writes calls in a format that is not known, so no call is "
    "parsed and no tool runs; parse them in `converse`, or train a model with a known format (Qwen's, GLM's, "
    "Llama 3.1's, DeepSeek's, Mistral's or gpt-oss's)"
)
NO_TEMPLATE = "%s has no chat template, so the model does not see the tools of %s; list them in the prompt"


class TooLongError(ValueError):
    """A text is too long to fit in the context."""


class Rendering:
    """Turns a model's conversations into text and tokens: with its chat template, or else by concatenating messages.

    Message contents are text: with a template, a special token's name in it ("<|im_end|>" in a tool's result) becomes
    the tokens of its characters, never the special token. Without a template, texts are encoded like any prompt.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None = None,
        end_ids: Collection[int] = (),
        tools: Sequence[Callable[..., Any]] = (),
        keeps_rendered: bool = True,
        template_values: Mapping[str, Any] | None = None,
    ):
        self.tokenizer = tokenizer
        self.template = template
        self.template_values = dict(template_values or {})
        """For the template; an example's values take precedence."""
        self._names = [*tokenizer.special_tokens(), LEFT, RIGHT]
        self._special = _any_of(self._names)
        self._tokens_in_text = _any_of(self._names[:-2])
        self.keeps_rendered = keeps_rendered
        self._warned = False
        self.schemas: list[dict[str, Any]] | None = None
        if tools:
            self.schemas = [schema_of(tool) for tool in tools]
        source = template.used_with(self.schemas).source if template else None
        self.form = reply_form(tokenizer, source, bool(tools)).with_tools(self.schemas or ())
        """How replies are parsed."""
        self.end_ids = ends_of_text(end_ids, tokenizer, template)
        """Tokens that end a reply."""

    def prompt(self, example: Example) -> list[int]:
        """The tokens of an example's prompt: with a template, rendered as its messages, or as a user message.

        A prompt that contains a special token counts as already rendered, and is encoded as it is, unless `chat` is
        always. Raises UserError as `check`, and for messages that the template refuses.
        """
        self.check(example)
        if self.is_rendered(example.prompt):
            if self.template is not None and not self._warned:
                self._warned = True
                log.warning(RENDERED, example.name)
            return self.tokenizer.encode("".join(message["content"] for message in example.messages))
        try:
            return self.tokens(self.text(example.messages, example.chat_template_kwargs))
        except ChatTemplateError as error:
            raise UserError(f"example {example.name}: {error}") from error

    def is_rendered(self, prompt: str | list[Message]) -> bool:
        """Whether a prompt is encoded as it is, not as a user message."""
        if self.template is None:
            return True
        return self.keeps_rendered and isinstance(prompt, str) and bool(self._tokens_in_text.search(prompt))

    def check(self, example: Example) -> None:
        """Raises UserError for a list of messages without a template, and for values that the template ignores."""
        if self.template is None and [message["role"] for message in example.messages] != ["user"]:
            raise UserError(
                f"example {example.name}: its prompt is a list of messages, but the model has no chat template; put a "
                'chat_template.jinja next to its weights, leave chat = "auto", or give prompts as texts'
            )
        try:
            template_values(example.chat_template_kwargs, self.template)
        except ChatTemplateError as error:
            raise UserError(f"example {example.name}: {error}") from error

    def text(self, messages: Sequence[Message], values: Mapping[str, Any] | None = None) -> str:
        """The conversation up to the model's turn, with names of special tokens escaped for `tokens`.

        values: the example's values for the template. Raises ChatTemplateError for messages that the template refuses,
        or does not show.
        """
        escaped = [self.escaped(message) for message in messages]
        text = self.render(escaped, values)
        for number, message in enumerate(escaped):
            content = message.get("content")
            if self.template is None or message.get("role") in ("assistant", "tool") or not isinstance(content, str):
                continue
            if content.strip() not in text:
                other = [*escaped[:number], {**message, "content": f"{content}?"}, *escaped[number + 1 :]]
                if self.render(other, values) == text:
                    raise ChatTemplateError(f"the chat template does not show a message of the role {message['role']}")
        return text

    def render(self, escaped: list[Message], values: Mapping[str, Any] | None = None) -> str:
        """`text` for messages that are already escaped, without checking that all are shown."""
        if self.template is None:
            return "".join(map(_content, escaped))
        if not self._shows_developer and any(message.get("role") == "developer" for message in escaped):
            escaped = [m | {"role": "system"} if m.get("role") == "developer" else m for m in escaped]
        return self.template.render(escaped, tools=self.schemas, **self.template_values | dict(values or {}))

    @cached_property
    def _shows_developer(self) -> bool:
        """Whether the template has the role developer; most call it system."""
        assert self.template is not None
        return shows_developer(self.template)

    def tokens(self, text: str) -> list[int]:
        """The tokens of a result of `text`, or of a part of it."""
        if self.template is None:
            return self.tokenizer.encode(text)
        plain, *others = re.split(f"{LEFT}(\\d+){RIGHT}", text)
        ids = self.tokenizer.encode(plain) if plain else []
        for number, after in zip(others[::2], others[1::2]):
            # Encoded character by character, so that it does not become the special token.
            ids += [token for character in self._names[int(number)] for token in self.tokenizer.encode(character)]
            ids += self.tokenizer.encode(after) if after else []
        return ids

    def reply_text(self, token_ids: Sequence[int], prompt: Sequence[int] = ()) -> str:
        """The text of sampled tokens without their end token; for a family with channels, only the content."""
        if self.form.channels:
            return self.reply_parts(token_ids, prompt).content
        ended = bool(token_ids) and token_ids[-1] in self.end_ids
        tokens = token_ids[:-1] if ended else token_ids
        return self.tokenizer.decode([token for token in tokens if token != self.tokenizer.eos_id])

    def reply_parts(self, token_ids: Sequence[int], prompt: Sequence[int] = ()) -> ReplyParts:
        """Sampled tokens, which continue `prompt`, parsed into reasoning, content and calls.

        Calls are parsed if there are tools and the template's call format is known.
        """
        return read_reply(self.form, self.tokenizer, token_ids, prompt, self.end_ids)

    def with_marks(self, text: str, parts: ReplyParts) -> str:
        """A reply's text, with its reasoning marked for `answer_text` if the family's replies have any."""
        form = self.form
        if not (form.thinks or form.channels) or parts.calls:
            return text
        return with_reasoning_marked(text, parts.content)

    def escaped(self, value: Any) -> Any:
        """A message, or a part of one, with every special token's name escaped for `tokens`."""
        if self.template is None:
            return value
        if isinstance(value, str):
            return self._special.sub(lambda match: f"{LEFT}{self._names.index(match[0])}{RIGHT}", value)
        if isinstance(value, dict):
            return {self.escaped(key): self.escaped(item) for key, item in value.items()}
        return [self.escaped(item) for item in value] if isinstance(value, list) else value


def open_rendering(
    name: str,
    chat: Literal["auto", "always", "never"],
    chat_template_kwargs: str,
    environment: Environment,
    tokenizer: Tokenizer,
    model: TrainableModel,
) -> Rendering:
    """The rendering of a model by its `name`, a folder or one on the hub, with the settings `chat` of a run.

    Raises UserError if `chat` is always and the model has no template, and for values that the template does not read.
    """
    template = None if chat == "never" else load_chat_template(local_folder(name))
    if chat == "always" and template is None:
        raise UserError(
            f'chat is "always", but {name} has no chat template; put a chat_template.jinja next to its '
            'weights, or set chat = "auto"'
        )
    tools = environment.tools if isinstance(environment, ConversationEnvironment) else ()
    shows = template is not None and "tools" in template.used_with(tools).variables
    if tools and not shows:
        log.warning(UNSHOWN if template else NO_TEMPLATE, name, type(environment).__name__)
    values = command_values(chat_template_kwargs, template)
    rendering = Rendering(tokenizer, template, model.config.eos_token_ids, tools, chat == "auto", values)
    if tools and shows and rendering.form.calls is None:
        log.warning(UNREAD, name, type(environment).__name__)
    return rendering


def _any_of(names: Sequence[str]) -> re.Pattern[str]:
    # Longest first; without names, a pattern that matches nothing.
    return re.compile("|".join(re.escape(name) for name in sorted(names, key=len, reverse=True)) or r"(?!)")


def _content(message: Message) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        raise ChatTemplateError(
            f"the model has no chat template, so a message's content must be a string: {content!r:.80}"
        )
    return content


@dataclass
class Row:
    """A sequence that the model saw and sampled: a conversation, or the part of it with one history."""

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    """All tokens after the first prompt, up to the end of the last reply."""
    sampled: list[bool] = field(default_factory=list)
    """For each of `token_ids`, whether the model sampled it."""
    logprobs: list[float] = field(default_factory=list)
    """One per sampled token."""
    truncated_logprobs: list[float] = field(default_factory=list)
    """One per sampled token, after truncation by top_k, top_p and min_p; empty without truncation."""
    versions: list[int] = field(default_factory=list)
    """Weights version of each sampled token; empty if it cannot change."""
    routes: list[str] = field(default_factory=list)
    """One per sampled token; empty without experts."""
    turns: int = 0
    """Number of replies."""
    finish_reason: str = ""
    """Of the last reply."""
    completion: str = ""
    """The last reply's text."""
    parts: ReplyParts = field(default_factory=lambda: ReplyParts("", ""))
    """The last reply, parsed."""


class Transcript:
    """The rows of one conversation.

    The next prompt is the last row plus the tokens of what the template writes after the reply. If the template or the
    environment shows a different history than the model saw, apart from whitespace, the row is finished, and a new one
    begins with the tokens of the new history, none of which are targets.

    A prompt costs two renderings and the encoding of the new text; the first prompt costs one rendering. values: the
    example's values for the template.
    """

    def __init__(self, rendering: Rendering, values: Mapping[str, Any] | None = None):
        self.rendering, self._values = rendering, values
        self.rows: list[Row] = []
        self.turns = 0
        self._shown = ""
        """The text of the last prompt."""
        self._seen = 0
        """Number of messages in it; its reply is the next one."""
        self._continued: tuple[Row, list[int]] = Row([]), []
        """The row of the next reply, and the environment's new tokens before it."""

    @property
    def last_reply(self) -> ReplyParts:
        return self.rows[-1].parts

    def prompt(self, messages: Sequence[Message], positions: int | None = None) -> list[int]:
        """The tokens that the model continues, not stored until a reply is added.

        positions: the model's context; a text that cannot fit is refused before it is encoded. Raises TooLongError for
        such a text, and ChatTemplateError for messages that the template refuses.
        """
        text = self.rendering.text(messages, self._values)
        if positions is not None and len(text) > MAX_CHARACTERS * positions:
            raise TooLongError(f"{len(text):,} characters, which cannot fit in the context of {positions} tokens")
        suffix = self._suffix(messages, text)
        if suffix is None:
            self._continued = Row(self.rendering.tokens(text)), []
        else:
            self._continued = self.rows[-1], self._new_tokens(suffix)
        self._next = text, len(messages)
        row, new = self._continued
        return row.prompt_ids + row.token_ids + new

    def add(self, reply: Completion) -> str:
        """Adds the model's reply to the last prompt; returns its text."""
        row, new = self._continued
        if not self.rows or row is not self.rows[-1]:
            self.rows.append(row)
        prompt = [*row.prompt_ids, *row.token_ids, *new]
        row.parts = self.rendering.reply_parts(reply.token_ids, prompt)
        row.token_ids += [*new, *reply.token_ids]
        row.sampled += [False] * len(new) + [True] * len(reply.token_ids)
        row.logprobs += reply.logprobs
        row.truncated_logprobs += reply.truncated_logprobs
        row.versions += reply.versions
        row.routes += reply.routes
        row.turns += 1
        row.finish_reason = reply.finish_reason
        row.completion = self.rendering.reply_text(reply.token_ids, prompt)
        self.turns += 1
        self._shown, self._seen = self._next
        return row.completion

    def _suffix(self, messages: Sequence[Message], text: str) -> str | None:
        """The part of `text` after the last reply; None if the model saw or wrote something else before it."""
        if not self.rows or not text.startswith(self._shown):
            return None
        completion = self.rows[-1].completion
        reply = messages[self._seen] if len(messages) > self._seen else {}
        if reply.get("role") != "assistant" or reply.get("content") != completion:
            return None
        escaped = [self.rendering.escaped(message) for message in messages]
        escaped[self._seen] = {**escaped[self._seen], "content": MARK}
        try:
            marked = self.rendering.render(escaped, self._values)
        except ChatTemplateError:
            return None
        if marked.count(MARK) != 1:
            return None
        suffix = marked.partition(MARK)[2]
        shown = text[len(self._shown) : len(text) - len(suffix)]
        if len(text) < len(self._shown) + len(suffix) or not text.endswith(suffix):
            return None
        return suffix if _squeezed(shown) == _squeezed(self.rendering.escaped(completion)) else None

    def _new_tokens(self, suffix: str) -> list[int]:
        new = self.rendering.tokens(suffix) if suffix else []
        last = self.rows[-1].token_ids[-1]
        # The row already ends with the end-of-turn token if the model sampled it, and not if its reply was truncated.
        if self.rendering.template is not None and last in self.rendering.end_ids and new[:1] == [last]:
            return new[1:]
        return new


def message_values(parts: ReplyParts) -> dict[str, Any]:
    """The fields of a message besides role and content that templates show: reasoning and calls."""
    calls = [{"type": "function", "function": {"name": c.name or "?", "arguments": c.arguments}} for c in parts.calls]
    # Before a call, gpt-oss's template accepts only one of content and reasoning.
    reasoning = "" if calls and parts.content else parts.reasoning
    return (dict.fromkeys(SHOWN_REASONING, reasoning) if reasoning else {}) | ({"tool_calls": calls} if calls else {})


def _squeezed(text: str) -> str:
    """The text without whitespace, which templates trim from replies and insert between their parts."""
    return "".join(text.split())
