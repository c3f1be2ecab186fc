"""The grammar of a whole reply: reasoning first, then content, calls, or either."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lockstep.data.replies import ReplyForm
from lockstep.data.replies.form import CHANNEL, CONSTRAIN, ENDS, MESSAGE, START, THINK, THINK_END
from lockstep.generate.grammars import lark_grammar, regex_grammar, regex_rule
from lockstep.generate.server.call_rules import Rules, Tool, call_rules, json_rule, quoted

SPACE = r"/[ \t\r\n]{0,4}/"
"""Between reasoning and what follows."""


@dataclass(frozen=True)
class ContentRule:
    """What the content of a reply must be."""

    kind: Literal["json", "regex", "choice", "lark"]
    schema: Mapping[str, Any] | None = None
    """Of json; None: any object."""
    text: str = ""
    """The pattern, or the grammar."""
    choices: tuple[str, ...] = ()

    def rule(self) -> str:
        match self.kind:
            case "json":
                return json_rule({"type": "object"} if self.schema is None else self.schema)
            case "regex":
                return regex_rule(self.text)
            case "choice":
                return " | ".join(map(quoted, self.choices))
        return "@content"

    def add_to(self, rules: Rules) -> str:
        """The name of its rule. Choices are a terminal: as rules, llguidance would follow 2,000 at most."""
        return rules.add("CHOICE" if self.kind == "choice" else "content_rule", self.rule())

    def free_grammar(self) -> str:
        """The grammar of a regular expression or in Lark's syntax by itself; empty for others."""
        return {"regex": regex_grammar, "lark": lark_grammar}[self.kind](self.text) if self.text else ""


@dataclass(frozen=True)
class CallRule:
    """Which calls a reply may have."""

    tools: Sequence[tuple[Tool, bool]]
    """Those that may be called, and whether the arguments must fit their schemas."""
    required: bool
    """Whether there must be a call."""
    many: bool
    """Whether there may be several."""


def reply_grammar(form: ReplyForm, after: str, content: ContentRule | None, calls: CallRule | None) -> str:
    """The grammar of a reply. Raises UserError for calls that their format cannot express.

    after: `<think>` or `</think>`, if the prompt ends with it. content: None if any text may be the content.
    """
    rules = Rules({name: token for token, name in form.ids.items()})
    if form.channels:
        start = _channels(rules, content, calls)
    else:
        reasoning = _reasoning(rules, form, after)
        ways = _ways(rules, form, content, calls)
        start = f"{reasoning} ({' | '.join(ways)})"
    lark = f"start: {start}\n{rules.lark()}"
    grammars = [{"name": "reply", "lark_grammar": lark}]
    if content is not None and content.kind == "lark":
        grammars.append({"name": "content", "lark_grammar": content.text})
    return json.dumps({"grammars": grammars})


def _reasoning(rules: Rules, form: ReplyForm, after: str) -> str:
    if after == THINK_END or not form.thinks:
        return SPACE if after == THINK_END else ""
    rest = f"{rules.until(THINK_END, 'reasoning')} {SPACE}"
    if after == THINK or THINK not in rules.vocabulary:
        return rest if after == THINK else ""
    return f"({SPACE} {rules.mark(THINK)} {rest})?"


def _ways(rules: Rules, form: ReplyForm, content: ContentRule | None, calls: CallRule | None) -> list[str]:
    """What may follow the reasoning."""
    if calls is None:
        assert content is not None
        return [content.add_to(rules)]
    format = form.calls
    assert format is not None
    called = call_rules(rules, format, calls.tools, calls.many)
    if calls.required:
        return [called]
    if content is not None:
        return [content.add_to(rules), called]
    if format.family == "llama3":  # calls without a mark: other text cannot begin as they do
        return [called, r"/([ \t\r\n]*[^{ \t\r\n](.|\n)*)?/"]
    return ["TEXT", f"TEXT {called}"]


def _channels(rules: Rules, content: ContentRule | None, calls: CallRule | None) -> str:
    channel, message, end = rules.mark(CHANNEL), rules.mark(MESSAGE), rules.mark(ENDS[0])
    again = f'{rules.mark(START)} "assistant"'
    thought = rules.add("thought", f'{channel} ("analysis" | "commentary") {message} TEXT {end} {again}')
    ways = []
    if content is not None or not (calls and calls.required):
        said = "TEXT" if content is None else content.add_to(rules)
        ways.append(f'{channel} "final" {message} {said}')
    if calls is not None:
        for number, (tool, enforced) in enumerate(calls.tools):
            arguments = json_rule(tool.schema if enforced else {"type": "object"})
            to = f" to=functions.{tool.name}"
            json_type = f'(" json" | " " {rules.mark(CONSTRAIN)} "json")?'
            heads = [f'{quoted(to)} {channel} "commentary"', f"{channel} {quoted(f'commentary{to}')}"]
            ways.append(rules.add(f"call_{number}", f"({' | '.join(heads)}) {json_type} {message} {arguments}"))
    return f"{thought}* ({' | '.join(ways)})"
