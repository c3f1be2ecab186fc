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


ASK, YES, ONE, SYSTEM = say("user", "a"), say("assistant", "yes"), say("assistant", "one"), say("system", "s")
PARTS = say("user", [{"type": "text", "text": part} for part in ("a", "b")])
TURN_B, TOOL = say("user", "b"), {"type": "function", "function": {"name": "f"}}


def call(*given):
    calls = [{"id": "1", "type": "function", "function": {"name": n, "arguments": a}} for n, a in given]
    return say("assistant", None, tool_calls=calls)


def talk(*messages, **more):
    return {"messages": [*messages], **more}


FLAT = say("assistant", "", tool_calls=[{"name": "f", "arguments": '{"a": 1}'}])
TURNS_OF_SHAREGPT = [{"from": who, "value": said} for who, said in (("human", "a"), ("gpt", "yes"))]
ALPACA = {"instruction": "b", "input": "", "output": "yes", "history": [["a", "one"]]}


@pytest.mark.parametrize(
    ("row", "same"),
    [
        (talk(ASK, call(("f", '{"a": "x"}'), ("g", ""))), talk(ASK, call(("f", {"a": "x"}), ("g", {})))),
        (talk(say("developer", "s"), ASK, YES), talk(SYSTEM, ASK, YES)),
        (
            talk(say("user", [{"type": "text", "text": part} for part in ("a", "b")]), YES),
            talk(say("user", "a\nb"), YES),
        ),
        (talk(ASK, YES | {"tool_calls": []}), talk(ASK, YES)),
        ({"conversations": TURNS_OF_SHAREGPT}, talk(ASK, YES)),
        (talk(*TURNS_OF_SHAREGPT), talk(ASK, YES)),
        ({"conversations": [SYSTEM, ASK, YES]}, talk(SYSTEM, ASK, YES)),
        ({"conversations": TURNS_OF_SHAREGPT, "system": "s"}, talk(SYSTEM, ASK, YES)),
        (talk(ASK, YES, system="s"), talk(SYSTEM, ASK, YES)),
        (talk(SYSTEM, ASK, YES, system="s"), talk(SYSTEM, ASK, YES)),
        (talk(ASK, YES, system=""), talk(ASK, YES)),
        (ALPACA, talk(ASK, ONE, TURN_B, YES)),
        (ALPACA | {"system": "s", "input": "this"}, talk(SYSTEM, ASK, ONE, say("user", "b\n\nthis"), YES)),
        ({"prompt": [ASK], "completion": [YES], "system": "s"}, {"prompt": [SYSTEM, ASK], "completion": [YES]}),
    ],
)
def test_what_files_write_in_other_ways_is_the_same_conversation(row, same):
    expected = text(same)
    assert expected.startswith(("<system>s<user>", "<user>a")) and text(row) == expected
    assert learned(row) == learned(same)


def test_the_template_decides_how_developers_calls_and_parts_are_shown():
    row = talk(say("developer", "Answer in French."), ASK, YES)
    knows = ChatTemplate("{% set roles = 'developer user assistant' %}" + TURNS, {})
    assert text(row, knows).startswith("<developer>Answer in French.")
    refuses = (
        "{% for m in messages if m.role == 'developer' %}{{ raise_exception('unknown role') }}{% endfor %}" + KNOWN
    )
    assert text(row, ChatTemplate(refuses, {})) == text(row) == "<system>Answer in French.<user>a<assistant>yes"
    for between in ("", " "):
        knows = ChatTemplate(
            "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
            f"{{{{ m.content | map(attribute='text') | join('{between}') }}}}{{% endif %}}<|endoftext|>{{% endfor %}}",
            {},
        )
        assert text(talk(PARTS, YES), knows).startswith(f"<user>a{between}b<")
    flat = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ (c.function or c).arguments | tojson }}{% endfor %}{% endfor %}"  # fmt: skip # noqa: E501
    assert text(talk(ASK, FLAT), ChatTemplate(flat, {})) == 'a{"a": 1}'
    counts = ChatTemplate("{% for m in messages %}{{ m.tool_calls is defined }}{{ m.content }}{% endfor %}", {})
    assert text(talk(ASK, YES | {"tool_calls": []}), counts) == "FalseaFalseyes"
    shows = ChatTemplate("{{ tools | tojson }}" + KNOWN, {})
    for names in ({"tools": [TOOL]}, {"tools": None, "tool_defs": [TOOL]}, {"functions": [TOOL["function"]]}):
        assert text(talk(ASK, YES, **names), shows) == json.dumps([TOOL]) + text(talk(ASK, YES))


SILENT = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>{% endfor %}", {})


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (talk(ASK, call(("f", '{"a"'))), "the arguments of a call of 'f' are not JSON"),
        (talk(ASK, call(("f", "[1]"))), "the arguments of a call of 'f' are JSON, but not of an object"),
        (talk(ASK, say("critic", "Bad."), YES), "the chat template does not show the content of the role 'critic'"),
        (talk(ASK, say("assistant", "x", weight=0.5)), "weight of a message is 0.5; it must be"),
        (talk(ASK, say("assistant", "x", train="no")), "train of a message is 'no'"),
        (talk(say("user", "x", train=True), YES), "role 'user' has train True; only"),
        (talk(ASK, say("assistant", "x", weight=0)), "none of its answers is trained on"),
        (talk(ASK, YES, chat_template_kwargs={"think": 1}), "has 'think', which the chat template does not read"),
        (talk(ASK, YES, chat_template_kwargs=[1]), '"chat_template_kwargs" is not an object'),
        (ALPACA | {"history": ["a"]}, '"history" is not a list of pairs of texts'),
        (talk(SYSTEM, ASK, YES, system="other"), 'has "system", but also a message of that role'),
        (talk(ASK, YES, system={"a": 1}), '"system" is not a text'),
        ({"prompt": "a", "completion": "b", "system": "s"}, 'has "system" with a prompt that is a text'),
    ],
)
def test_what_cannot_be_followed_or_is_not_shown_is_refused(row, problem):
    assert problem in text(row)
    assert "does not show tool calls" in text(talk(ASK, call(("f", {})) | {"content": "ok"}), SILENT)
    assert text(talk(ASK, say("user", "b", tool_calls=[]), say("assistant", "  spaces  "))).startswith("<user>a<user>b")


@pytest.mark.parametrize("flag", ["weight", "train", "training", "trainable", "loss", "loss_mask"])
def test_an_answer_that_is_flagged_is_context_and_not_learned(flag):
    marked = ChatTemplate(
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "<|endoftext|>{% endgeneration %}{% else %}{{ m.content }}<|endoftext|>{% endif %}{% endfor %}",
        {},
    )
    for value, template in ((0, TEMPLATE), (False, marked), (1, TEMPLATE), (True, marked), (None, TEMPLATE)):
        row = talk(ASK, ONE | {flag: value}, TURN_B, YES)
        assert learned(row, template) == ("yes" if value in (0, False) else "oneyes") and "one" in text(row, template)
    assert learned(talk(ASK | {flag: False}, YES)) == "yes"
    for value in (0, 1):  # in a prompt it changes nothing, since only the completion is learned
        assert learned({"prompt": [ASK, ONE | {flag: value}, TURN_B], "completion": [YES]}) == "yes"


def test_values_of_a_row_reach_its_template():
    thinks = ChatTemplate("{% if think %}<think>{% endif %}" + KNOWN, {})
    for given in ({"think": True}, '{"think": true}'):
        assert text(talk(ASK, YES, chat_template_kwargs=given), thinks) == f"<think>{text(talk(ASK, YES))}"
    assert text(talk(ASK, YES), thinks) == text(talk(ASK, YES))


def _arguments(draw):
    # `datasets` writes ten digits of a float (findings/).
    kinds = [lambda: draw.choice(["x", "", "é🙂"]), lambda: draw.randrange(9), lambda: 0.25, lambda: True]
    kinds += [lambda: [draw.randrange(9)], lambda: {"deep": draw.choice(["y", 2])}]
    return {name: draw.choice(kinds)() for name in sorted(draw.sample("abc", draw.randrange(3)))}


@pytest.mark.parametrize("writer", ["datasets", "pyarrow"])
def test_parquet_gives_the_tokens_of_the_jsonl_it_was_written_from(tmp_path, writer):
    draw = random.Random(1)
    for round_number in range(5):
        rows = []
        for _ in range(draw.randrange(1, 6)):
            asked = call(*((draw.choice("fgh"), _arguments(draw)) for _ in range(draw.randrange(1, 3))))
            if writer == "pyarrow":  # a column has one type, and the keys of its objects one order
                asked = call(*((name, {f"{name}_says": draw.choice("xy")}) for name in draw.sample("fgh", 2)))
            rows.append(talk(ASK, asked | {"content": draw.choice(["ok", ""])}, say("tool", "42"), YES))
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
            assert np.array_equal(own.tokens, theirs.tokens) and np.array_equal(own.scored, theirs.scored)
