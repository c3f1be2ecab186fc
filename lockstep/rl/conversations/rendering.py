"""A conversation as tokens: new messages are rendered and encoded, and replies keep their sampled tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lockstep.config import RLConfig
from lockstep.data import Tokenizer, ends_of_text
from lockstep.data.chat import ChatTemplate, ChatTemplateError, load_chat_template
from lockstep.data.messages import SHOWN_REASONING
from lockstep.data.replies import ReplyParts, read_reply, reply_form
from lockstep.data.template_values import command_values, template_values
from lockstep.errors import UserError
from lockstep.hub import local_folder
from lockstep.model import TrainableModel
from lockstep.observe import log
from lockstep.rl.conversations.protocol import ConversationEnvironment
from lockstep.rl.conversations.schemas import schema_of
from lockstep.rl.conversations.without_reasoning import with_reasoning_marked
from lockstep.rl.environments.protocol import Environment, Example, Message

# Private-use characters: templates keep them unchanged, also in JSON. If a text contains them itself, they are
# escaped in the same way as names of special tokens.
LEFT, RIGHT = "\uf8f1", "\uf8f2"
MARK = f"{LEFT}reply{RIGHT}"
"""Placeholder for the reply when only what follows it is needed."""

MOST_CHARACTERS = 128
"""Most characters per token: the longest in use are 128 spaces. Encoding a text of many millions takes minutes."""
RENDERED = (
    "example %s: its prompt contains a special token, so it is assumed to be rendered by a chat template already and "
    "used as is, like other such prompts; chat = never uses all prompts as they are, chat = always renders all"
)
UNSHOWN = "the chat template of %s does not show tools, so the model does not see those of %s; list them in the prompt"
UNREAD = (
    "the chat template of %s shows the tools of %s, but its call format is not Qwen3's, Llama 3.1's, DeepSeek's or "
    "gpt-oss's, so no call is parsed and no tool runs; parse them in `converse`, or train a model with one of these "
    "formats"
)
NO_TEMPLATE = "%s has no chat template, so the model does not see the tools of %s; list them in the prompt"


class TooLongError(ValueError):
    """A text is too long to fit in the context."""


class Rendering:
    """How a model's conversations become text and tokens: by its chat template, or else by concatenating the messages.

    Message contents are text: with a template, a special token's name in it ("<|im_end|>" in a tool's result) becomes
    the tokens of its characters, never the special token. Without one, texts are encoded like any prompt.
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
        """For the template; an example's own win over them."""
        self._names = [*tokenizer.special_tokens(), LEFT, RIGHT]
        self._special = _any_of(self._names)
        self._tokens_in_text = _any_of(self._names[:-2])
        self.keeps_rendered = keeps_rendered
        self._warned = False
        self.schemas: list[dict[str, Any]] | None = None
        if tools:
            self.schemas = [schema_of(tool) for tool in tools]
        self.form = reply_form(tokenizer, template.used_with(self.schemas).source if template else None, bool(tools))
        """How replies are taken apart."""
        self.end_ids = ends_of_text(end_ids, tokenizer, template)
        """Tokens that end a reply."""

    def prompt(self, example: Example) -> list[int]:
        """A single prompt's tokens: with a template, those of its messages, or of a user message.

        A prompt that contains a special token counts as rendered already, and is encoded as is, unless `chat` is
        always. Raises UserError as `check` does, and for messages that the template refuses.
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
        """Whether a single prompt is used as it is, not as a user message."""
        if self.template is None:
            return True
        return self.keeps_rendered and isinstance(prompt, str) and bool(self._tokens_in_text.search(prompt))

    def check(self, example: Example) -> None:
        """Raises UserError for a prompt of several messages without a template, and for values it does not read."""
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

        values: the example's own for the template. Raises ChatTemplateError for messages that the template refuses, or
        does not show.
        """
        written = [self.written(message) for message in messages]
        text = self.render(written, values)
        for number, message in enumerate(written):
            said = message.get("content")
            if self.template is None or message.get("role") in ("assistant", "tool") or not isinstance(said, str):
                continue
            if said.strip() not in text:
                other = [*written[:number], {**message, "content": f"{said}?"}, *written[number + 1 :]]
                if self.render(other, values) == text:
                    raise ChatTemplateError(f"the chat template does not show a message of the role {message['role']}")
        return text

    def render(self, written: list[Message], values: Mapping[str, Any] | None = None) -> str:
        """`text` for messages that are already escaped (`written`), without looking whether all are shown."""
        if self.template is None:
            return "".join(map(_content, written))
        if not self._knows_developer and any(message.get("role") == "developer" for message in written):
            written = [m | {"role": "system"} if m.get("role") == "developer" else m for m in written]
        return self.template.render(written, tools=self.schemas, **self.template_values | dict(values or {}))

    @cached_property
    def _knows_developer(self) -> bool:
        """Whether the template shows the developer's messages; most know the developer as the system."""
        assert self.template is not None
        try:
            return MARK in self.template.render(
                [{"role": "developer", "content": MARK}, {"role": "user", "content": "?"}]
            )
        except ChatTemplateError:
            return False

    def tokens(self, text: str) -> list[int]:
        """The tokens of what `text` returned, or of a part of it."""
        if self.template is None:
            return self.tokenizer.encode(text)
        plain, *others = re.split(f"{LEFT}(\\d+){RIGHT}", text)
        ids = self.tokenizer.encode(plain) if plain else []
        for number, after in zip(others[::2], others[1::2]):
            # Encoded character by character, no text becomes a special token.
            ids += [token for character in self._names[int(number)] for token in self.tokenizer.encode(character)]
            ids += self.tokenizer.encode(after) if after else []
        return ids

    def reply(self, token_ids: Sequence[int], prompt: Sequence[int] = ()) -> str:
        """The text of sampled tokens, without the one that ended them; of a family with channels only the content."""
        if self.form.channels:
            return self.read(token_ids, prompt).content
        ended = bool(token_ids) and token_ids[-1] in self.end_ids
        said = token_ids[:-1] if ended else token_ids
        return self.tokenizer.decode([token for token in said if token != self.tokenizer.eos_id])

    def read(self, token_ids: Sequence[int], prompt: Sequence[int] = ()) -> ReplyParts:
        """Sampled tokens taken apart; `prompt` is what they continue. Calls are read if there are tools, and the
        template has a known format for calls."""
        return read_reply(self.form, self.tokenizer, token_ids, prompt, self.end_ids)

    def marked(self, text: str, read: ReplyParts) -> str:
        """A reply's text in which `spoken` finds its content, in families whose replies have parts."""
        form = self.form
        if not (form.thinks or form.channels) or read.calls:
            return text
        return with_reasoning_marked(text, read.content)

    def written(self, value: Any) -> Any:
        """A message, or a part of one, with every special token's name escaped for `tokens`."""
        if self.template is None:
            return value
        if isinstance(value, str):
            return self._special.sub(lambda match: f"{LEFT}{self._names.index(match[0])}{RIGHT}", value)
        if isinstance(value, dict):
            return {self.written(key): self.written(own) for key, own in value.items()}
        return [self.written(own) for own in value] if isinstance(value, list) else value


def open_rendering(
    config: RLConfig, environment: Environment, tokenizer: Tokenizer, model: TrainableModel
) -> Rendering:
    """The rendering that `config.chat` asks for.

    Raises UserError if it is always and the model has no template, and for values that the template does not read.
    """
    template = None if config.chat == "never" else load_chat_template(local_folder(config.model))
    if config.chat == "always" and template is None:
        raise UserError(
            f'chat is "always", but {config.model} has no chat template; put a chat_template.jinja next to its '
            'weights, or set chat = "auto"'
        )
    tools = environment.tools if isinstance(environment, ConversationEnvironment) else ()
    shows = template is not None and "tools" in template.used_with(tools).variables
    if tools and not shows:
        log.warning(UNSHOWN if template else NO_TEMPLATE, config.model, type(environment).__name__)
    values = command_values(config.chat_template_kwargs, template)
    rendering = Rendering(tokenizer, template, model.config.eos_token_ids, tools, config.chat == "auto", values)
    if tools and shows and rendering.form.calls is None:
        log.warning(UNREAD, config.model, type(environment).__name__)
    return rendering


def _any_of(names: Sequence[str]) -> re.Pattern[str]:
    # Longest first; with no names, a pattern that matches nothing.
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
    """Tokens that the model saw and sampled as one sequence: a conversation, or a part of it with one history."""

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    """Everything after the first prompt, up to the end of the last reply."""
    sampled: list[bool] = field(default_factory=list)
    """For each of `token_ids`, whether the model sampled it."""
    logprobs: list[float] = field(default_factory=list)
    """One per sampled token."""
    truncated_logprobs: list[float] = field(default_factory=list)
    """One per sampled token, within the distribution left by a cut; empty if nothing was cut."""
    versions: list[int] = field(default_factory=list)
    """Weights version of each sampled token; empty if it did not change."""
    routes: list[str] = field(default_factory=list)
    """One per sampled token; empty if there are no experts."""
    turns: int = 0
    """Number of replies."""
    finish_reason: str = ""
    """Of the last reply."""
    completion: str = ""
    """The last reply's text."""
    read: ReplyParts = field(default_factory=lambda: ReplyParts("", ""))
    """The last reply, taken apart."""


class Transcript:
    """The rows of one conversation.

    The next prompt is the last row plus the tokens of what the template writes after the reply. If the template, or the
    environment, shows the history differently from what the model saw, apart from whitespace, the row is finished, and
    a new one begins with the tokens of all that is shown now, none of which are targets.

    A prompt costs two renderings, and the encoding of what is new; the first one costs one rendering. values: the
    example's own for the template.
    """

    def __init__(self, rendering: Rendering, values: Mapping[str, Any] | None = None):
        self.rendering, self._values = rendering, values
        self.rows: list[Row] = []
        self.turns = 0
        self._shown = ""
        """The text of the last prompt."""
        self._seen = 0
        """Number of messages in it; the reply to it is the next one."""
        self._continued: tuple[Row, list[int]] = Row([]), []
        """The row of the next reply, and the environment's tokens before it."""

    @property
    def read(self) -> ReplyParts:
        """The last reply, taken apart."""
        return self.rows[-1].read

    def prompt(self, messages: Sequence[Message], positions: int | None = None) -> list[int]:
        """The tokens that the model is to continue. They are not kept unless a reply is added.

        positions: the model's context, to refuse a text that can never fit before it is encoded. Raises TooLongError
        for such a text, and ChatTemplateError for messages that the template refuses.
        """
        text = self.rendering.text(messages, self._values)
        if positions is not None and len(text) > MOST_CHARACTERS * positions:
            raise TooLongError(f"{len(text):,} characters, which cannot fit in the context of {positions} tokens")
        suffix = self._suffix(messages, text)
        if suffix is None:
            self._continued = Row(self.rendering.tokens(text)), []
        else:
            self._continued = self.rows[-1], self._new_tokens(suffix)
        self._next = text, len(messages)
        row, new = self._continued
        return row.prompt_ids + row.token_ids + new

    def add(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        finish_reason: str,
        truncated_logprobs: Sequence[float] = (),
        versions: Sequence[int] = (),
        routes: Sequence[str] = (),
    ) -> str:
        """The model's reply to the last prompt; returns its text."""
        row, new = self._continued
        if not self.rows or row is not self.rows[-1]:
            self.rows.append(row)
        prompt = [*row.prompt_ids, *row.token_ids, *new]
        row.read = self.rendering.read(token_ids, prompt)
        row.token_ids += [*new, *token_ids]
        row.sampled += [False] * len(new) + [True] * len(token_ids)
        row.logprobs += logprobs
        row.truncated_logprobs += truncated_logprobs
        row.versions += versions
        row.routes += routes
        row.turns += 1
        row.finish_reason = finish_reason
        row.completion = self.rendering.reply(token_ids, prompt)
        self.turns += 1
        self._shown, self._seen = self._next
        return row.completion

    def _suffix(self, messages: Sequence[Message], text: str) -> str | None:
        """What follows the last reply in `text`; None if the text before it is not what the model saw and said."""
        if not self.rows or not text.startswith(self._shown):
            return None
        said = self.rows[-1].completion
        reply = messages[self._seen] if len(messages) > self._seen else {}
        if reply.get("role") != "assistant" or reply.get("content") != said:
            return None
        written = [self.rendering.written(message) for message in messages]
        written[self._seen] = {**written[self._seen], "content": MARK}
        try:
            marked = self.rendering.render(written, self._values)
        except ChatTemplateError:
            return None
        if marked.count(MARK) != 1:
            return None
        suffix = marked.partition(MARK)[2]
        shown = text[len(self._shown) : len(text) - len(suffix)]
        if len(text) < len(self._shown) + len(suffix) or not text.endswith(suffix):
            return None
        return suffix if _squeezed(shown) == _squeezed(self.rendering.written(said)) else None

    def _new_tokens(self, suffix: str) -> list[int]:
        new = self.rendering.tokens(suffix) if suffix else []
        last = self.rows[-1].token_ids[-1]
        # The end-of-turn token is already there if the model sampled it, and missing if its reply was cut off.
        if self.rendering.template is not None and last in self.rendering.end_ids and new[:1] == [last]:
            return new[1:]
        return new


def message_values(read: ReplyParts) -> dict[str, Any]:
    """What templates take apart from a message's content: its reasoning, and its calls."""
    calls = [{"type": "function", "function": {"name": c.name or "?", "arguments": c.arguments}} for c in read.calls]
    # Before a call, gpt-oss's template takes either of content and reasoning.
    reasoning = "" if calls and read.content else read.reasoning
    return (dict.fromkeys(SHOWN_REASONING, reasoning) if reasoning else {}) | ({"tool_calls": calls} if calls else {})


def _squeezed(text: str) -> str:
    """Without whitespace, which templates trim from replies and put between their parts."""
    return "".join(text.split())
