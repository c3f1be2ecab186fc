"""The spans of the assistant's answers in a rendered conversation, each as the model would have sampled it.

A template may render an earlier turn differently from how it was sampled: Qwen3's drop its reasoning, gpt-oss's end
it with another token. Rendering the conversation up to each answer gives its prompt and its text as sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from lockstep.data.chat import BEGINS, ENDS, ChatTemplate, ChatTemplateError
from lockstep.data.messages import change_call

Turns = Literal["apart", "whole"]
STRANGE = "\ue000"
"""A private-use character: added at both ends of an answer, it changes its first and its last character."""


class ScoredText(NamedTuple):
    """A text and the spans of its characters to score, ascending."""

    text: str
    spans: list[tuple[int, int]]


def render_answers(
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    whole: str,
    trained: Sequence[bool],
    turns: Turns,
    ends: Sequence[str],
    **values: Any,
) -> list[ScoredText]:
    """`whole`, the rendering of all messages, with the spans of those that are `trained`; if `turns` is "apart", also
    each prefix of the conversation whose last answer `whole` renders differently.

    A template with `{% generation %}` marks what is scored of an answer. Otherwise an answer is scored through the
    first of `ends`, the end-of-turn tokens. values: passed to the template, such as `tools`. Raises ChatTemplateError
    for messages that the template refuses.
    """
    conversation = _Conversation(template, messages, whole, ends, values)
    wanted = [i for i, message in enumerate(messages) if message.get("role") == "assistant" and trained[i]]
    if turns == "whole":
        return [ScoredText(conversation.whole, conversation.spans_in_whole(wanted))]
    texts = [ScoredText(conversation.whole, [])]
    for index in reversed(wanted):
        text, spans = conversation.as_sampled(index)
        longer = next((other for other in texts if other.text.startswith(text)), None)
        if longer is None:
            texts.append(longer := ScoredText(text, []))
        longer.spans[:0] = spans
    return [text for text in texts if text.spans] or texts[:1]


class _Conversation:
    """Messages and their template; `whole`: their rendering."""

    def __init__(
        self,
        template: ChatTemplate,
        messages: list[dict[str, Any]],
        whole: str,
        ends: Sequence[str],
        values: Mapping[str, Any],
    ):
        self._template, self._messages, self.whole = template, messages, whole
        self._ends, self._values = ends, values

    def as_sampled(self, index: int) -> ScoredText:
        """The text up to the end of the answer at `index`, as it was sampled, with the answer's spans."""
        through = self._rendered(self._messages[: index + 1], False)
        if through is None:  # some templates require a user message
            spans = self.spans_in_whole([index])
            return ScoredText(self.whole[: spans[-1][1]] if spans else self.whole, spans)
        text, start = self._as_sampled(index, through)
        if not self._template.marks:
            stop = self._first_end(text, start)
            return ScoredText(text[:stop], [(start, stop)] if start < stop else [])
        moved = len(text) - len(through)  # both end with the answer
        return ScoredText(text, [(begin + moved, end + moved) for begin, end in self._marked_of(index)])

    def _as_sampled(self, index: int, through: str) -> tuple[str, int]:
        """The text up to the end of the answer, and where the answer begins. through: the text as rendered."""
        before = self._rendered(self._messages[:index], True)
        if before is not None and through.startswith(before):
            return through, len(before)
        start, complete = self._start(through, self._messages[: index + 1], index)
        # gpt-oss's template drops the reasoning of earlier calls once an answer follows.
        return (before + through[start:], len(before)) if complete and before is not None else (through, start)

    def spans_in_whole(self, wanted: Sequence[int]) -> list[tuple[int, int]]:
        """The spans in `whole` of the answers at `wanted`, including their end-of-turn tokens."""
        if not self._template.marks:
            spans = [self._span_in_whole(index) for index in wanted]
            return [(start, stop) for start, stop in spans if stop > start]
        spans = self._marked(self._messages, self.whole)
        answers = [index for index, message in enumerate(self._messages) if message.get("role") == "assistant"]
        if answers == list(wanted):
            return spans
        owners = [index for index in answers for _ in self._marked_of(index)]
        if len(spans) != len(owners):
            raise ChatTemplateError(
                f"some of its {len(answers)} answers are not trained on, but the chat template marks {len(spans)} "
                "spans with {% generation %}, which cannot be matched to the answers"
            )
        return [span for index, span in zip(owners, spans) if index in wanted]

    def _marked_of(self, index: int) -> list[tuple[int, int]]:
        """The spans that the template marks in the answer at `index`; none if it refuses the messages up to it."""
        earlier, through = (self._rendered(self._messages[:end], False) for end in (index, index + 1))
        if through is None:
            return []
        before = 0 if earlier is None else len(self._marked(self._messages[:index], earlier))
        return self._marked(self._messages[: index + 1], through)[before:]

    def _first_end(self, text: str, start: int) -> int:
        """The end of the first end token at or after `start`; the end of the text if there is none."""
        ends = [(place, len(end)) for end in self._ends if (place := text.find(end, start)) >= 0]
        return sum(min(ends)) if ends else len(text)

    def _marked(self, messages: list[dict[str, Any]], text: str) -> list[tuple[int, int]]:
        """The spans of `{% generation %}` blocks in `text`, the rendering of `messages`."""
        marks = {"generation_begins": BEGINS, "generation_ends": ENDS}
        marked = self._template.render(messages, add_generation_prompt=False, **self._values, **marks)
        plain, *parts = marked.split(BEGINS)
        spans = []
        for part in parts:
            inside, _, after = part.partition(ENDS)
            spans.append((len(plain), len(plain) + len(inside)))
            plain += inside + after
        if plain != text:
            raise ChatTemplateError(
                "the chat template changes the contents of {% generation %} afterwards; make it output them unchanged"
            )
        return [(start, stop) for start, stop in spans if stop > start]

    def _span_in_whole(self, index: int) -> tuple[int, int]:
        """The span in `whole` of the answer at `index`, for a template without `{% generation %}`."""
        before = self._rendered(self._messages[:index], True)
        through = self._rendered(self._messages[: index + 1], False)
        if before is not None and self.whole.startswith(before):
            start = len(before)
        else:
            start, _ = self._start(self.whole, self._messages, index)
        if through is not None and self.whole.startswith(through):
            return start, self._first_end(through, start)
        _, last = self._changed(self.whole, self._messages, index)
        stop = last + self._end_of_turn(through, index, self.whole[last:])
        return start, min(stop, self._first_end(self.whole, start))

    def _start(self, text: str, messages: list[dict[str, Any]], index: int) -> tuple[int, bool]:
        """Where the answer at `index` begins in `text`, the rendering of `messages`, and whether the whole generation
        prompt precedes it: some templates omit the <think> at its end."""
        first, _ = self._changed(text, messages, index)
        after = min(first, self._changed(text, messages, index - 1)[1]) if index else 0
        prompt = self._generation_prompt(index)
        for length in range(len(prompt), len(prompt) // 3, -1):
            if (place := text.rfind(prompt[:length], after, first)) >= 0:
                return place + length, length == len(prompt)
        return first, False

    def _end_of_turn(self, through: str | None, index: int, rest: str) -> int:
        """How many characters of `rest`, the text after the answer, also follow it when it is the last message."""
        if through is None:
            return 0
        _, last = self._changed(through, self._messages[: index + 1], index)
        return _common_prefix(rest, through[last:])

    def _changed(self, text: str, messages: list[dict[str, Any]], index: int) -> tuple[int, int]:
        """Bounds on the answer at `index` in `text`, the rendering of `messages`: the first and the last place at which
        rendering a different answer changes the text."""
        rendered = (
            self._rendered([*messages[:index], other, *messages[index + 1 :]], False)
            for other in _altered(messages[index])
        )
        others = [other for other in rendered if other is not None]
        if not others:
            raise ChatTemplateError(f"the chat template refuses any other message in place of message {index + 1}")
        first = min(_common_prefix(text, other) for other in others)
        return first, len(text) - _common_prefix(text[::-1], others[-1][::-1])

    def _generation_prompt(self, index: int) -> str:
        """The generation prompt before an answer at `index`; empty if it cannot be determined."""
        earlier = self._messages[:index]
        if (without := self._rendered(earlier, False)) is None:
            earlier = [{"role": "user", "content": "-"}]
            without = self._rendered(earlier, False) or ""
        prompt = self._rendered(earlier, True) or ""
        return prompt[len(without) :] if prompt.startswith(without) else ""

    def _rendered(self, messages: list[dict[str, Any]], prompt: bool) -> str | None:
        """The rendering of a prefix of the conversation; None if the template refuses it."""
        if not messages:
            return None
        if not prompt and messages == self._messages:
            return self.whole
        try:
            return self._template.render(messages, add_generation_prompt=prompt, **self._values)
        except ChatTemplateError:
            return None


def _common_prefix(one: str, other: str) -> int:
    """Length of the common prefix."""
    return next((place for place, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def _altered(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Variants of a message: one with its texts changed at both ends and, if it has tool calls, one with renamed calls
    and one with an extra argument, since templates render content before or after calls."""
    texts = {key: value for key, value in message.items() if key != "role" and isinstance(value, str) and value}
    changed = {key: f"{STRANGE}{value}{STRANGE}" for key, value in (texts or {"content": ""}).items()}
    calls = message.get("tool_calls") or []
    others = [[change_call(call, change) for call in calls] for change in (_renamed, _with_argument) if calls]
    return [{**message, **changed}, *({**message, "tool_calls": other} for other in others)]


def _renamed(call: dict[str, Any]) -> dict[str, Any]:
    return {**call, "name": f"{STRANGE}{call.get('name')}"}


def _with_argument(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call.get("arguments")
    return {**call, "arguments": {**(arguments if isinstance(arguments, dict) else {}), STRANGE: STRANGE}}
