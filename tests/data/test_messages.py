"""Messages as people's files have them: OpenAI's wire format, flags, other layouts, what a template does not show."""

import json
import random

import datasets
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from lockstep.data import ByteTokenizer, ConversationEncoder, ConversationSource
from lockstep.data.chat import ChatTemplate
from lockstep.data.conversations import Conversation

TOKENIZER = ByteTokenizer()
TURNS = """{% for m in messages %}{% if m.role in roles.split() %}<{{ m.role }}>{{ m.content or '' }}\
{% for c in m.tool_calls or [] %}[{{ c.function.name }}{{ c.function.arguments | tojson }}]{% endfor %}\
{{ '<|endoftext|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
KNOWN = "{% set roles = 'system user assistant tool' %}" + TURNS
TEMPLATE = ChatTemplate(KNOWN, {})
MARKED = ChatTemplate(
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|endoftext|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|endoftext|>{% endif %}{% endfor %}",
    {},
)


def encoded(row, template=TEMPLATE):
    return ConversationEncoder(TOKENIZER, template).encode([Conversation("line 1", row)])[0]


def text(row, template=TEMPLATE):
    found = encoded(row, template)
    return found.problem or TOKENIZER.decode(found.tokens.tolist())


def learned(row, template=TEMPLATE):
    found = encoded(row, template)
    return found.problem or TOKENIZER.decode(found.tokens[found.scored].tolist())


def say(role, content, **more):
    return {"role": role, "content": content, **more}


ASK, YES = say("user", "a"), say("assistant", "yes")


def calls(*given):
    return [{"id": "1", "type": "function", "function": {"name": n, "arguments": a}} for n, a in given]


def test_arguments_that_are_json_on_the_wire_are_rendered_as_objects():
    wire = [ASK, say("assistant", None, tool_calls=calls(("f", '{"a": "x"}'), ("g", "")))]
    plain = [ASK, say("assistant", None, tool_calls=calls(("f", {"a": "x"}), ("g", {})))]
    assert text({"messages": wire}) == text({"messages": plain}) == '<user>a<assistant>[f{"a": "x"}][g{}]'
    for bad, problem in (('{"a"', "are not JSON"), ("[1]", "are JSON, but not of an object")):
        found = text({"messages": [ASK, say("assistant", None, tool_calls=calls(("f", bad)))]})
        assert f"the arguments of a call of 'f' {problem}" in found


def test_the_developer_is_the_system_where_the_template_knows_no_developer():
    row = {"messages": [say("developer", "Answer in French."), ASK, YES]}
    assert text(row) == "<system>Answer in French.<user>a<assistant>yes"
    knows = ChatTemplate("{% set roles = 'developer user assistant' %}" + TURNS, {})
    assert text(row, knows).startswith("<developer>Answer in French.")
    refuses = ChatTemplate(
        "{% for m in messages if m.role == 'developer' %}{{ raise_exception('unknown role') }}{% endfor %}" + KNOWN, {}
    )
    assert text(row, refuses) == text(row)


@pytest.mark.parametrize(
    ("message", "hidden"),
    [
        (say("critic", "Bad."), "the content of the role 'critic'"),
        (say("user", "b", tool_calls=[]), ""),
        (say("assistant", "  spaces  "), ""),
    ],
)
def test_a_message_that_the_template_does_not_show_is_refused(message, hidden):
    found = text({"messages": [ASK, message, YES]})
    assert (f"the chat template does not show {hidden}" in found) == bool(hidden)


def test_tool_calls_that_the_template_does_not_show_are_refused():
    silent = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>{% endfor %}", {})
    row = {"messages": [ASK, say("assistant", "ok", tool_calls=calls(("f", {})))]}
    assert "the chat template does not show tool calls" in text(row, silent)


@pytest.mark.parametrize("flag", ["weight", "train", "training", "trainable", "loss", "loss_mask"])
@pytest.mark.parametrize("template", [TEMPLATE, MARKED], ids=["prefixes", "marks"])
def test_an_answer_that_is_flagged_is_context_and_not_learned(flag, template):
    for value in (0, False):
        row = {"messages": [ASK, say("assistant", "WRONG", **{flag: value}), say("user", "b"), YES]}
        assert learned(row, template) == "yes" and "WRONG" in text(row, template)
    for value in (1, True, None):
        row = {"messages": [ASK, say("assistant", "one", **{flag: value}), say("user", "b"), YES]}
        assert learned(row, template) == "oneyes"


def test_flags_that_cannot_be_followed_are_refused():
    assert "weight of a message is 0.5; it must be" in text({"messages": [ASK, say("assistant", "x", weight=0.5)]})
    assert "train of a message is 'no'" in text({"messages": [ASK, say("assistant", "x", train="no")]})
    assert "role 'user' has train True; only" in text({"messages": [say("user", "x", train=True), YES]})
    assert "none of its answers is trained on" in text({"messages": [ASK, say("assistant", "x", weight=0)]})
    assert learned({"messages": [say("user", "x", train=False), YES]}) == "yes"


def test_flags_in_a_prompt_change_nothing_since_only_the_completion_is_learned():
    for value in (0, 1):
        prompt = [ASK, say("assistant", "one", weight=value), say("user", "b")]
        assert learned({"prompt": prompt, "completion": [YES]}) == "yes"


def test_values_of_a_row_reach_its_template_and_others_are_refused():
    thinks = ChatTemplate("{% if think %}<think>{% endif %}" + KNOWN, {})
    row = {"messages": [ASK, YES], "chat_template_kwargs": {"think": True}}
    assert text(row, thinks).startswith("<think>") and text({"messages": [ASK, YES]}, thinks).startswith("<user>")
    assert text({**row, "chat_template_kwargs": '{"think": true}'}, thinks) == text(row, thinks)
    assert "has 'think', which the chat template does not read" in text(row)
    assert '"chat_template_kwargs" is not an object' in text({**row, "chat_template_kwargs": [1]}, thinks)


@pytest.mark.parametrize("key", ["conversations", "messages"])
def test_sharegpts_and_alpacas_layouts_are_read(key):
    turns = [("system", "s"), ("human", "a"), ("gpt", "one"), ("human", "b"), ("gpt", "yes")]
    shared = {key: [{"from": who, "value": said} for who, said in turns]}
    ours = {"messages": [say("system", "s"), ASK, say("assistant", "one"), say("user", "b"), YES]}
    assert text(shared) == text(ours) and learned(shared) == learned(ours) == "oneyes"
    assert text({"conversations": ours["messages"]}) == text(ours)
    for given, asked in (("", "Do."), ("this", "Do.\n\nthis")):
        row = {"instruction": "Do.", "input": given, "output": "yes"}
        assert text(row) == text({"messages": [say("user", asked), YES]})


def test_a_rows_system_and_history_come_first():
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "yes"}]
    expected = {"messages": [say("system", "s"), say("user", "a"), YES]}
    for row in ({"conversations": turns}, {"messages": expected["messages"][1:]}, {"messages": expected["messages"]}):
        assert text({**row, "system": "s"}) == text(expected)
        assert text({**row, "system": ""}) == text(row)
    row = {"instruction": "b", "input": "", "output": "yes", "system": "s", "history": [["a", "one"]]}
    whole = {"messages": [say("system", "s"), say("user", "a"), say("assistant", "one"), say("user", "b"), YES]}
    assert text(row) == text(whole) and learned(row) == learned(whole) == "oneyes"
    assert '"history" is not a list of pairs of texts' in text({**row, "history": ["a"]})
    assert 'has "system", but also a message of that role' in text({**expected, "system": "other"})
    assert '"system" is not a text' in text({"messages": [ASK, YES], "system": {"a": 1}})


def test_a_rows_system_comes_before_a_prompt_of_messages_and_is_refused_beside_texts():
    row = {"prompt": [say("user", "a")], "completion": [YES], "system": "s"}
    assert text(row) == text({"prompt": [say("system", "s"), say("user", "a")], "completion": [YES]})
    assert 'has "system" with a prompt that is a text' in text({"prompt": "a", "completion": "b", "system": "s"})


def test_tools_under_their_other_names_reach_the_template():
    shows = ChatTemplate("{{ tools | tojson }}" + TURNS, {})
    tool = {"type": "function", "function": {"name": "f"}}
    expected = text({"messages": [ASK, YES], "tools": [tool]}, shows)
    for others in ({"tools": None, "tool_defs": [tool]}, {"functions": [tool["function"]]}):
        assert text({"messages": [ASK, YES], **others}, shows) == expected


def test_calls_without_a_function_and_empty_lists_of_calls_are_those_of_the_wire():
    asked = say("assistant", "", tool_calls=calls(("f", '{"a": 1}')))
    flat = say("assistant", "", tool_calls=[{"name": "f", "arguments": '{"a": 1}'}])
    shows = ChatTemplate(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ (c.function or c).arguments | tojson }}{% endfor %}<|endoftext|>{% endfor %}",
        {},
    )
    assert text({"messages": [ASK, flat, say("tool", "1"), YES]}, shows) == text(
        {"messages": [ASK, asked, say("tool", "1"), YES]}, shows
    )
    assert '{"a": 1}' in text({"messages": [ASK, flat]}, shows)
    counts = ChatTemplate("{% for m in messages %}{{ m.tool_calls is defined }}{{ m.content }}{% endfor %}", {})
    assert text({"messages": [ASK, {**YES, "tool_calls": []}]}, counts) == text({"messages": [ASK, YES]}, counts)


def test_texts_in_parts_are_joined_as_the_template_joins_them():
    parts = [{"type": "text", "text": part} for part in ("a", "b")]
    row = {"messages": [say("user", parts), YES]}
    assert text(row).startswith("<user>a\nb<")  # a template that knows no parts
    for between in ("", " "):
        knows = ChatTemplate(
            "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
            f"{{{{ m.content | map(attribute='text') | join('{between}') }}}}{{% endif %}}<|endoftext|>{{% endfor %}}",
            {},
        )
        assert text(row, knows).startswith(f"<user>a{between}b<")


def _arguments(draw):
    # `datasets` writes ten digits of a float (findings/).
    kinds = [lambda: draw.choice(["x", "", "é🙂"]), lambda: draw.randrange(9), lambda: 0.25, lambda: True]
    kinds += [lambda: [draw.randrange(9)], lambda: {"deep": draw.choice(["y", 2])}]
    return {name: draw.choice(kinds)() for name in sorted(draw.sample("abc", draw.randrange(3)))}


@pytest.mark.parametrize("writer", ["datasets", "pyarrow"])
def test_parquet_gives_the_tokens_of_the_jsonl_it_was_written_from(tmp_path, writer):
    draw = random.Random(1)
    for round_number in range(20):
        rows = []
        for _ in range(draw.randrange(1, 6)):
            asked = calls(*((draw.choice("fgh"), _arguments(draw)) for _ in range(draw.randrange(1, 3))))
            if writer == "pyarrow":  # a column has one type, and the keys of its objects one order
                asked = calls(*((name, {f"{name}_says": draw.choice("xy")}) for name in draw.sample("fgh", 2)))
            answer = say("assistant", draw.choice(["ok", ""]), tool_calls=asked)
            rows.append({"messages": [ASK, answer, say("tool", "42"), YES]})
        lines, table = tmp_path / f"{round_number}.jsonl", tmp_path / f"{round_number}.parquet"
        lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
        if writer == "datasets":
            cache = str(tmp_path / "cache")
            datasets.load_dataset("json", data_files=str(lines), split="train", cache_dir=cache).to_parquet(str(table))
        else:
            parquet.write_table(pyarrow.Table.from_pylist(rows), table)
        sources = [ConversationSource(str(file)) for file in (lines, table)]
        found = [ConversationEncoder(TOKENIZER, TEMPLATE).encode(list(source.read())) for source in sources]
        for own, theirs in zip(*found, strict=True):
            assert not own.problem and not theirs.problem, (own.problem, theirs.problem)
            assert TOKENIZER.decode(own.tokens.tolist()) == TOKENIZER.decode(theirs.tokens.tolist())
            assert np.array_equal(own.tokens, theirs.tokens) and np.array_equal(own.scored, theirs.scored)
