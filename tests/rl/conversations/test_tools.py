"""Tools: what a model is told of them, the calls that it writes, and what it is answered."""

import asyncio
import importlib.util
import json
import time
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import render_jinja_template

from lockstep.data.replies import LLAMA3, QWEN3, parse_calls, tool_format
from lockstep.errors import UserError
from lockstep.rl.conversations import ConversationOver, Reply, ToolCall
from lockstep.rl.conversations.tools import answer_calls, schema_of
from tests.rl.conversations.scripted import call, scripted


class Color(StrEnum):
    RED = "red"
    BLUE = "blue"


def everything(
    text: str,
    count: int,
    share: float,
    sure: bool,
    words: list[str],
    pair: tuple[int, str],
    table: dict[str, float],
    kind: Literal["a", "b", 3],
    number: int | str,
    either: int | list[str],
    anything: Any,
    rows: list[dict[str, int]],
    color: Color,
    maybe: str | None = None,
    top: int = 3,
) -> str:
    """Takes one of everything.

    And has a second paragraph.

    Args:
        text: some text
        count: how many
        share: how much,
            from 0 to 1
        sure: whether
        words: words
        pair: a pair
        table: a table
        kind: one of three
        number: a number
        either: either
        anything: anything
        rows: rows: each a table
        color: its color
        maybe: perhaps
        top: at most

    Returns:
        a text: the result
    """
    return text


def search(query: str, limit: int = 3) -> str:
    """Finds pages.

    Args:
        query: what to look for
        limit: at most so many
    """
    return f"{limit} pages about {query}"


def no_parameters() -> str:
    """The time."""
    return "now"


@pytest.mark.parametrize("function", [everything, search, no_parameters])
def test_a_function_is_described_as_transformers_describes_it(function):
    theirs = get_json_schema(function)
    theirs["function"].pop("return", None)  # OpenAI's format has no such key, and a model makes no results
    assert schema_of(function) == theirs


def test_a_method_and_a_function_without_descriptions_of_parameters_are_described():
    class Index:
        def find(self, word: str) -> str:
            """Finds a word."""
            return word

    assert schema_of(Index().find)["function"] == {
        "name": "find",
        "description": "Finds a word.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    }


def undocumented(a: int): ...
def without_types(a):
    "Adds."


def many(*numbers: int):
    "Adds."


def positional(a: int, /):
    "Adds."


def odd(a: bytes):
    "Adds."


def unknown(a: "Missing"): "Adds."  # noqa: F821  # fmt: skip


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (undocumented, r"the tool undocumented \(.*test_tools.py:\d+\) has no docstring"),
        (without_types, "the parameter a has no annotation"),
        (many, r"\*numbers: int, which cannot be passed by name"),
        (positional, "cannot be passed by name"),
        (odd, "the parameter a is a <class 'bytes'>, which JSON cannot express"),
        (unknown, "the tool unknown .* cannot be described .*Missing"),
    ],
)
def test_a_function_that_cannot_be_described_is_refused(function, message):
    with pytest.raises(UserError, match=message):
        schema_of(function)


def templates():
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("trl, whose chat templates are the real ones, is not installed")
    return {p.stem: p.read_text() for p in sorted((Path(spec.origin).parent / "chat_templates").glob("*.jinja"))}


def test_the_templates_that_write_calls_in_a_known_format_are_told_apart():
    found = {name: form.family for name, source in templates().items() if (form := tool_format(source))}
    assert {n for n, f in found.items() if f == "llama3"} == {"llama3_1", "llama3_2"}
    qwen = {n for n, f in found.items() if f == "qwen3"}
    assert {"qwen3", "qwen3_training", "qwen3_instruct_2507", "qwen2_5"} <= qwen
    # Qwen3.5 and later, GLM and Nemotron put tags of their own between <tool_call> and </tool_call>.
    assert all(name.startswith(("qwen2_5", "qwen3")) for name in qwen), qwen
    assert not {n for n in qwen if n.startswith(("qwen3_5", "qwen3_6", "qwen3_8"))}


def rendered(template, content, calls):
    """The last assistant message of a conversation as the real template writes it."""
    tools = [schema_of(search)]
    ask = {"role": "user", "content": "?"}
    written = [{"type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}} for c in calls]
    turns = [ask, {"role": "assistant", "content": content, "tool_calls": written}]
    (before,), _ = render_jinja_template([[ask]], tools, chat_template=template, add_generation_prompt=True)
    (after,), _ = render_jinja_template([turns], tools, chat_template=template)
    assert after.startswith(before.removesuffix("<think>\n"))
    return after[len(before) :]


CALLS = (
    ToolCall("search", {"query": 'a "b"\n</tool_call>\\ ü; {"name": "c"}', "limit": 3}),
    ToolCall("search", {"query": "<tool_call>", "deep": {"list": [1, 2.5, None, True]}}),
)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_instruct_2507", "qwen2_5", "llama3_1", "llama3_2"])
def test_calls_that_templates_write_are_read_as_they_were(name):
    template, calls = templates()[name], CALLS[1:] if name.startswith("llama") else CALLS
    for content in ("",) if name.startswith("llama") else ("", "I will look it up."):
        assert parse_calls(rendered(template, content, calls), tool_format(template)) == calls


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=20)
@given(st.lists(st.dictionaries(st.text(), JSON, max_size=3), min_size=1, max_size=3))
def test_any_arguments_are_read_as_they_were_written(arguments):
    dumped = [json.dumps({"name": "f", "arguments": one}) for one in arguments]
    text = "".join(f"x\n<tool_call>\n{one}\n</tool_call>" for one in dumped)
    assert parse_calls(text, QWEN3) == tuple(ToolCall("f", one) for one in arguments)
    text = "; ".join(json.dumps({"name": "f", "parameters": one}) for one in arguments)
    for prefix in ("", "<|python_tag|>", "\n "):
        assert parse_calls(prefix + text, LLAMA3) == tuple(ToolCall("f", one) for one in arguments)


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", '{"name": ', '"f"', ', "arguments": ',
     ', "parameters": ', "{", "}", "[", "]", '"', ":", ",", ";", "\\ud800", "NaN", "1e999", "-", "9" * 5000, "\ud800"]
)  # fmt: skip


@settings(max_examples=80)
@given(st.lists(PIECES | st.text(max_size=5), max_size=20).map("".join), st.sampled_from([QWEN3, LLAMA3]))
def test_no_reply_breaks_the_reading_of_calls(text, format):
    for found in parse_calls(text, format):
        assert found.problem or found.name
        assert found.problem.encode() is not None and len(found.problem) < 300


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('{"name": "f", "arguments": {"a": 1}', "not valid JSON"),
        ("", "not valid JSON"),
        ("[1]", "must be a JSON object"),
        ('{"arguments": {}}', 'must have a "name"'),
        ('{"name": 3, "arguments": {}}', 'must have a "name"'),
        ('{"name": "f"}', 'must have "arguments"'),
        ('{"name": "f", "parameters": {}}', 'must have "arguments"'),
        ('{"name": "f", "arguments": "{}"}', 'must have "arguments", a JSON object'),
        ('{"name": "f", "name": "g", "arguments": {}}', 'the key "name" occurs more than once in an object'),
        ('{"name": "f", "arguments": {"a": NaN}}', "NaN is not a number"),
        ('{"name": "f", "arguments": {"a": -Infinity}}', "-Infinity is not a number"),
        ('{"name": "f", "arguments": {"a": 1e999}}', "too large"),
        ('{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}", "too many digits"),
        ('{"name": "f", "arguments": {"a": ' + "[" * 40 + "]" * 40 + "}}", "nested deeper"),
        ('{"name": "f", "arguments": {"a": ' + "[" * 100_000 + "]" * 100_000 + "}}", "nested deeper"),
        ('{"name": "f", "arguments": {"a": "\\ud800"}}', "surrogate"),
        ('{"name": "f", "arguments": {}} and more', "only </tool_call> may follow"),
        ('{"name": "f", "arguments": {}}{"name": "g", "arguments": {}}', "only </tool_call> may follow"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(body, problem):
    good = call("g", a=1)
    bad, after = parse_calls(f"<tool_call>\n{body}\n</tool_call>\n{good}", QWEN3)
    assert problem in bad.problem and not bad.arguments
    assert after == ToolCall("g", {"a": 1}), "the next one is read"


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("An answer.", 0),
        ("<think>\nI could " + call("f") + " but", 0),
        ("<think>\n<tool_call></think>\n\n" + call("f"), 1),
        ("reasoning whose beginning the prompt had " + call("f") + "</think> no call", 0),
        ("<tool_call>", 1),
        ('<tool_call>{"name": "f", "arguments": {}}', 1),
        (call("f") * 100, 33),
    ],
)
def test_reasoning_holds_no_calls_and_what_is_cut_off_is_a_problem(text, calls):
    found = parse_calls(text, QWEN3)
    assert len(found) == calls
    assert not found or bool(found[-1].problem) == (not text.endswith("</tool_call>") or calls > 32)


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ('{"answer": 3}', []),
        ("{not JSON", []),
        ('I call {"name": "f", "parameters": {}}', []),
        ('{"type": "function", "name": "f", "parameters": {}}', [""]),
        ('{"name": "f", "parameters": {}}<|eom_id|>', [""]),
        ('<|python_tag|>{"name": "f", "parameters": {}}<|eot_id|>', [""]),
        ('{"name": "f", "parameters": {"a": 1}', ["not valid JSON"]),
        ('{"name": "f", "arguments": {}}', ['must have "parameters"']),
        ('{"name": "f", "parameters": {}} and more', ["must be the only content"]),
        ('{"name": "f", "parameters": {}}; {', ["", "not valid JSON"]),
        ("<|python_tag|>print(1)", ["not valid JSON"]),
        ("<|python_tag|>", ["no JSON after"]),
    ],
)
def test_llama_calls(text, problems):
    found = parse_calls(text, LLAMA3)
    assert len(found) == len(problems)
    assert all(p in c.problem and bool(p) == bool(c.problem) for p, c in zip(problems, found))


def answers(tools, *calls):
    async def run():
        chat = scripted()
        await answer_calls(chat, Reply("", tool_calls=calls), tools)
        return chat

    return asyncio.run(run())


def raising(kind: str) -> str:
    """Raises."""
    raise {"value": ValueError, "exit": SystemExit, "stop": StopIteration, "cancel": asyncio.CancelledError}[kind](
        "no!"
    )


async def table(rows: int) -> list[dict[str, int]]:
    """Makes rows."""
    await asyncio.sleep(0)
    return [{"row": n} for n in range(rows)]


@pytest.mark.parametrize(
    ("asked", "content"),
    [
        (ToolCall("search", {"query": "tea"}), "3 pages about tea"),
        (ToolCall("search", {"query": "tea", "limit": 1}), "1 pages about tea"),
        (ToolCall("table", {"rows": 2}), '[{"row": 0}, {"row": 1}]'),
        (ToolCall("serch", {"query": "tea"}), 'Error: there is no tool "serch". Did you mean "search"?'),
        (ToolCall("search", {}), 'Error: search: the argument "query" is missing'),
        (ToolCall("search", {"query": 3}), 'Error: search: the argument "query" must be of the type string'),
        (ToolCall("search", {"query": "a", "limit": True}), 'the argument "limit" must be of the type integer'),
        (ToolCall("search", {"query": "a", "limt": 1}), 'no argument "limt"; it takes query, limit. Did you mean'),
        (ToolCall("search", problem="the call is not valid JSON"), "Error: the call is not valid JSON"),
        (ToolCall("raising", {"kind": "value"}), "Error: ValueError: no!"),
        (ToolCall("raising", {"kind": "exit"}), "Error: SystemExit: no!"),
        (ToolCall("raising", {"kind": "stop"}), "Error: RuntimeError: StopIteration"),
        (ToolCall("raising", {"kind": "cancel"}), "Error: RuntimeError: CancelledError"),
        (ToolCall("raising", {"kind": "nothing"}), "Error: KeyError: 'nothing'"),
        (ToolCall("search", {"query": "x" * 9000}), "\n… 1014 more characters are left out"),
    ],
)
def test_a_call_is_answered_by_its_result_or_by_what_was_wrong(asked, content):
    chat = answers([search, table, raising], asked)
    (message,) = chat.messages
    assert message["role"] == "tool" and content in message["content"], message
    assert len(message["content"]) < 8100


FITS = {
    "words": ([["a"]], [["a", 1]]), "pair": ([[1, "a"]], [[1]]), "table": ([{"a": 1}], [{"a": "b"}]),
    "kind": ([3], ["c", True]), "number": (["a"], [1.5]), "either": ([["a"]], ["a"]), "anything": ([{"a": [None]}], []),
    "rows": ([[{"a": 1}]], [[{"a": "b"}]]), "maybe": ([None], []), "text": ([], [None]), "share": ([1], []),
    "count": ([], [1.5]),
}  # fmt: skip
"""Values that fit and that do not, by the parameter of `everything`."""


@pytest.mark.parametrize("name", FITS)
def test_arguments_are_checked_against_the_annotations(name):
    good = {
        **{"text": "", "count": 1, "share": 0.5, "sure": True, "words": [], "pair": [1, ""], "table": {}, "kind": "a"},
        **{"number": 1, "either": 1, "anything": 0, "rows": [], "color": "red"},
    }
    for fits, values in zip((True, False), FITS[name]):
        for value in values:
            (message,) = answers([everything], ToolCall("everything", good | {name: value})).messages
            assert message["content"].startswith("Error: everything: the argument") != fits, message["content"]


def test_tools_take_turns_and_their_seconds_are_counted():
    def slow(seconds: float) -> str:
        """Sleeps."""
        time.sleep(seconds)
        return "slept"

    chat = answers([slow, search], ToolCall("slow", {"seconds": 0.05}), ToolCall("search", {"query": "q"}))
    assert [m["content"] for m in chat.messages] == ["slept", "3 pages about q"]
    assert set(chat.seconds) == {"slow", "search"} and chat.seconds["slow"] >= 0.05


def test_a_limit_of_time_ends_the_wait_for_a_plain_function_that_hangs():
    def hang() -> str:
        """Hangs."""
        time.sleep(60)
        return ""

    async def run():
        async with asyncio.timeout(0.05):
            await answer_calls(scripted(), Reply("", tool_calls=(ToolCall("hang"),)), [hang])

    began = time.monotonic()
    with pytest.raises(TimeoutError):
        asyncio.run(run())
    assert time.monotonic() - began < 30, "an event loop waits for its own threads when it is closed"


def test_a_tool_may_end_the_conversation():
    async def hang_up() -> str:
        """Ends it."""
        raise ConversationOver

    with pytest.raises(ConversationOver):
        answers([hang_up], ToolCall("hang_up"))
