"""Where the assistant's answers stand in a rendered conversation, each as the model would have sampled it.

A template may write an earlier turn otherwise than it was sampled: Qwen3's drop its reasoning, gpt-oss's end it with
another token. ScoredText the conversation up to each answer shows what the model had before it, and what it said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from lockstep.data.chat import BEGINS, ENDS, ChatTemplate, ChatTemplateError

Turns = Literal["apart", "whole"]
STRANGE = "\ue000"
"""A character for private use: an answer that is changed by it differs from its first character to its last."""


class ScoredText(NamedTuple):
    """A text, and the spans of its characters that are to be scored, ascending."""

    text: str
    spans: list[tuple[int, int]]


def render_answers(
    template: ChatTemplate, messages: list[dict[str, Any]], trained: Sequence[bool], turns: Turns, **values: Any
) -> list[ScoredText]:
    """The whole conversation, and the spans of the messages that are `trained`; if `turns` are "apart", also the
    beginnings of the conversation whose last answer the whole has otherwise.

    With `{% generation %}` the template itself says what is scored, in the whole. values: for the template, such as
    `tools`. Raises ChatTemplateError for messages that the template refuses.
    """
    text = template.render(messages, add_generation_prompt=False, **values)
    if template.marks:
        return [ScoredText(text, _marked(template, text, messages, trained, values))]
    conversation = _Conversation(template, messages, text, values)
    wanted = [i for i, message in enumerate(messages) if message.get("role") == "assistant" and trained[i]]
    if turns == "whole":
        spans: list[tuple[int, int]] = []
        for index in wanted:
            spans.append(conversation.in_whole(index, after=spans[-1][1] if spans else 0))
        return [ScoredText(text, [(start, stop) for start, stop in spans if stop > start])]
    found = [ScoredText(text, [])]
    for index in reversed(wanted):
        through, start = conversation.as_sampled(index)
        if start < len(through):
            same = next((rendering for rendering in found if rendering.text.startswith(through)), None)
            if same is None:
                found.append(same := ScoredText(through, []))
            same.spans.insert(0, (start, len(through)))
    return [rendering for rendering in found if rendering.spans] or found[:1]


def _marked(
    template: ChatTemplate,
    text: str,
    messages: list[dict[str, Any]],
    trained: Sequence[bool],
    values: Mapping[str, Any],
) -> list[tuple[int, int]]:
    """The contents of `{% generation %}`."""
    marks = {"generation_begins": BEGINS, "generation_ends": ENDS}
    before, *said = template.render(messages, add_generation_prompt=False, **values, **marks).split(BEGINS)
    plain, spans = before, []
    for part in said:
        inside, _, after = part.partition(ENDS)
        spans.append((len(plain), len(plain) + len(inside)))
        plain += inside + after
    if plain != text:
        raise ChatTemplateError(
            "the chat template changes the contents of {% generation %} afterwards; let it write them unchanged"
        )
    wanted = [is_wanted for message, is_wanted in zip(messages, trained) if message.get("role") == "assistant"]
    if not all(wanted) and len(spans) != len(wanted):
        raise ChatTemplateError(
            f"some of its {len(wanted)} answers are not to be trained on, but the chat template marks {len(spans)} "
            "spans with {% generation %}, so it is not known which they are"
        )
    chosen = spans if all(wanted) else [span for span, is_wanted in zip(spans, wanted) if is_wanted]
    return [(start, stop) for start, stop in chosen if stop > start]


class _Conversation:
    """A conversation whose template marks nothing, and its `whole` rendering."""

    def __init__(self, template: ChatTemplate, messages: list[dict[str, Any]], whole: str, values: Mapping[str, Any]):
        self._template, self._messages, self._whole, self._values = template, messages, whole, values

    def as_sampled(self, index: int) -> tuple[str, int]:
        """The text up to the end of the answer at `index`, as when it was sampled, and where the answer begins."""
        through = self._rendered(self._messages[: index + 1], False)
        if through is None:  # some templates want a user's message
            start, stop = self.in_whole(index)
            return self._whole[:stop], start
        before = self._rendered(self._messages[:index], True)
        if before is not None and through.startswith(before):
            return through, len(before)
        start, _ = self._changed(through, self._messages[: index + 1], index)
        prompt = self._generation_prompt(index)
        start, complete = _after(prompt, through, 0, start)
        # gpt-oss's drop the reasoning of earlier calls only once there is an answer.
        return (before + through[start:], len(before)) if complete and before is not None else (through, start)

    def in_whole(self, index: int, after: int = 0) -> tuple[int, int]:
        """The span of the answer at `index`, with its end of turn, in the whole from character `after` on."""
        before = self._rendered(self._messages[:index], True)
        through = self._rendered(self._messages[: index + 1], False)
        start = len(before) if before is not None and self._whole.startswith(before) else -1
        stop = len(through) if through is not None and self._whole.startswith(through) else -1
        if start < 0 or stop < 0:
            first, last = self._changed(self._whole, self._messages, index)
            start = _after(self._generation_prompt(index), self._whole, after, first)[0] if start < 0 else start
            stop = last + self._end_of_turn(through, index, self._whole[last:]) if stop < 0 else stop
        return start, stop

    def _end_of_turn(self, through: str | None, index: int, rest: str) -> int:
        """How much of `rest`, which follows an answer's own text, is as when the answer is the last message."""
        if through is None:
            return 0
        _, last = self._changed(through, self._messages[: index + 1], index)
        return _alike(rest, through[last:])

    def _changed(self, text: str, messages: list[dict[str, Any]], index: int) -> tuple[int, int]:
        """Where `text`, of `messages`, and one in which the answer at `index` is another begin and cease to differ."""
        changed = [*messages[:index], _other(messages[index]), *messages[index + 1 :]]
        other = self._template.render(changed, add_generation_prompt=False, **self._values)
        return _alike(text, other), len(text) - _alike(text[::-1], other[::-1])

    def _generation_prompt(self, index: int) -> str:
        """What the template writes before an answer that is to come at `index`."""
        for messages in (self._messages[:index], [{"role": "user", "content": "-"}]):
            without, prompt = self._rendered(messages, False), self._rendered(messages, True)
            if without is not None and prompt is not None and prompt.startswith(without):
                return prompt[len(without) :]
        return ""

    def _rendered(self, messages: list[dict[str, Any]], prompt: bool) -> str | None:
        """None if the template refuses these, as the beginning of a conversation that it does not refuse."""
        if not messages:
            return None
        if not prompt and len(messages) == len(self._messages):
            return self._whole
        try:
            return self._template.render(messages, add_generation_prompt=prompt, **self._values)
        except ChatTemplateError:
            return None


def _after(prompt: str, text: str, first: int, last: int) -> tuple[int, bool]:
    """Where an answer begins whose own text begins at `last` at the latest: after `prompt`, or as much of it as the
    template writes there; and whether that is all of it."""
    before = text[first:last]
    if not before.endswith(prompt):
        part = next((n for n in range(len(prompt) - 1, 1, -1) if before.endswith(prompt[:n])), 0)
        if not part and (place := before.rfind(prompt)) >= 0:  # both texts go on alike, as by an empty thought
            return first + place + len(prompt), True
        return last, False
    return last, bool(prompt)


def _alike(one: str, other: str) -> int:
    """How many characters both begin with."""
    return next((place for place, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def _other(message: Mapping[str, Any]) -> dict[str, Any]:
    """Another answer: each of its texts begins and ends otherwise, and its calls have one more argument."""
    changed = {
        key: f"{STRANGE}{value}{STRANGE}" for key, value in message.items() if key != "role" and isinstance(value, str)
    }
    calls = message.get("tool_calls")
    return {**message, **changed, **({"tool_calls": [_with_argument(call) for call in calls]} if calls else {})}


def _with_argument(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(function := call.get("function"), dict):
        return {**call, "function": _with_argument(function)}
    arguments = call.get("arguments")
    return {**call, "arguments": {**(arguments if isinstance(arguments, dict) else {}), STRANGE: STRANGE}}
