"""Conversations as tokens: those of transformers, with the assistant's scored; what cannot be learned is named."""

import json
import re
import shutil
from functools import cache

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from lockstep.data import ConversationEncoder, load_tokenizer
from lockstep.data.chat import load_chat_template
from lockstep.data.conversations import Conversation
from lockstep.data.workers import encode_all

MARKED = (
    "{% for message in messages %}"
    "<{{ message.role }}>\n"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content | trim }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content }}{{ eos_token }}{% endif %}"
    "{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
CONVERSATIONS = [
    [("user", "Say one."), ("assistant", "one")],
    [
        ("system", "Be brief. 日本語 🙂"),
        ("user", "Two?"),
        ("assistant", " two 🙂 "),
        ("user", "Three?"),
        ("assistant", "3"),
    ],
    [("user", "<assistant>\nnot said"), ("assistant", "def f(x):\n    return x"), ("user", "and after that")],
]
LINES = [{"messages": [{"role": r, "content": c} for r, c in talk]} for talk in CONVERSATIONS]
ASK, ONE = LINES[0]["messages"]
TOOLS = "{% if tools is not none %}{{ tools | tojson }}{% endif %}{% if documents is not none %}?{% endif %}"
SUM = [{"type": "function", "function": {"name": "sum", "parameters": {"type": "object"}}}]
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "sum", "arguments": {}}}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, bpe_tokenizer):
    folder = tmp_path_factory.mktemp("chat")
    bpe_tokenizer.save(folder)
    (folder / "chat_template.jinja").write_text(MARKED)
    return folder


@pytest.fixture(scope="module")
def theirs(folder):
    return PreTrainedTokenizerFast.from_pretrained(folder)


@cache
def encoder_of(folder, template):
    (folder / "own.jinja").write_text(template or "")
    chat_template = load_chat_template(folder, str(folder / "own.jinja")) if template else None
    return ConversationEncoder(load_tokenizer(folder), chat_template)


def encode(folder, line, template=MARKED):
    (encoded,) = encoder_of(folder, template).encode([Conversation("a.jsonl:1", line)])
    return encoded


def text_of(folder, line, template=MARKED, scored=False):
    """What a line is as tokens, or what of it is scored; or what is wrong."""
    encoded = encode(folder, line, template)
    return encoded.problem or load_tokenizer(folder).decode(
        encoded.tokens[encoded.scored if scored else slice(None)].tolist()
    )


@pytest.mark.parametrize("line", [*LINES, LINES[1] | {"tools": SUM}, LINES[1] | {"tools": json.dumps(SUM)}])
def test_tokens_and_mask_are_those_of_transformers_whether_or_not_the_template_marks_answers(folder, theirs, line):
    expected = theirs.apply_chat_template(
        line["messages"], chat_template=TOOLS + MARKED, tools=SUM if "tools" in line else None,
        tokenize=True, return_dict=True, return_assistant_tokens_mask=True,
    )  # fmt: skip
    for template in (TOOLS + MARKED, TOOLS + PLAIN):
        ours = encode(folder, line, template)
        assert ours.problem == "" and ours.tokens.tolist() == expected["input_ids"]
        assert ours.scored.astype(int).tolist() == expected["assistant_masks"]


def test_of_prompts_and_completions_only_the_completions_answers_are_scored(folder):
    tokenizer, messages = load_tokenizer(folder), LINES[1]["messages"]
    encoded = encode(folder, {"prompt": "3+4=", "completion": "7\n"}, None)
    assert encoded.tokens.tolist() == [*tokenizer.encode("3+4=7\n"), tokenizer.eos_id]
    assert encoded.tokens[encoded.scored].tolist() == [*tokenizer.encode("7\n"), tokenizer.eos_id]
    for template in (MARKED, PLAIN):
        for prompt, said in ((messages[:2], "two 🙂3"), (messages[:4], "3")):
            line = {"prompt": prompt, "completion": messages[len(prompt) :]}
            assert np.array_equal(encode(folder, line, template).tokens, encode(folder, LINES[1]).tokens)
            assert text_of(folder, line, template, scored=True) == said
    calls = """{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}{{ m.content or '' }}\
{% endgeneration %}{% for call in m.tool_calls or [] %}<{{ call.function.name }}>{% endfor %}{% else %}\
{{ m.content }}{% endif %}{% endfor %}"""
    for said in ([CALL], [CALL | {"content": ""}], []):  # what the assistant says in a prompt can be nothing
        prompt = [ASK, *said, {"role": "tool", "content": "7"}]
        assert text_of(folder, {"prompt": prompt, "completion": [ONE]}, calls, scored=True) == "one"
        assert "the assistant says nothing in it" in text_of(folder, {"prompt": prompt, "completion": [CALL]}, calls)


def test_a_call_of_a_tool_needs_no_content_and_is_rendered_as_by_transformers(folder, theirs):
    shows = "{% for m in messages %}{{ m['content'] }}|{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}"  # fmt: skip # noqa: E501
    for call in (CALL, CALL | {"content": ""}, CALL | {"content": None}):
        messages = [ASK, call, {"role": "tool", "content": {"sum": 7}}, ONE]
        expected = theirs.apply_chat_template(messages, chat_template=shows, tokenize=False)
        assert text_of(folder, {"messages": messages}, shows) == expected
    says = MARKED.replace("{{ message.content | trim }}", "{{ message.tool_calls[0].function.name }}")
    assert text_of(folder, {"messages": [ASK, CALL | {"content": None}]}, says, scored=True) == "sum"


@pytest.mark.parametrize(
    "said",
    [{name: why} for name in ("reasoning_content", "thinking", "reasoning") for why in ("2+3 is 5", "")]
    + [{"reasoning": "a", "thinking": "b", "reasoning_content": "c"}]
    + [{"reasoning_content": "2+3 is 5", "content": None}, {"reasoning_content": "2+3 is 5", "content": ""}],
    ids=str,
)
def test_reasoning_is_found_by_the_names_that_transformers_knows_and_can_be_all_of_an_answer(folder, theirs, said):
    shows = (
        "{% for m in messages %}{{ m.reasoning_content is string }} {{ m.reasoning_content }}|{{ m.thinking }}|"
        "{{ m.content }}{% endfor %}"
    )
    messages = [ASK, {"role": "assistant", "content": "one", **said}]
    expected = theirs.apply_chat_template(messages, chat_template=shows, tokenize=False)
    assert "True" in expected and text_of(folder, {"messages": messages}, shows) == expected


def test_an_answer_without_content_has_reasoning_that_the_template_shows(folder):
    shows = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.content }}{% endfor %}"
    thinks = {"role": "assistant", "reasoning_content": "2+3 is 5"}
    for other in ({"reasoning": ""}, {"reasoning": {"x": 1}}, {"reasoning": "a", "role": "user"}):
        for content, lacks in (({}, True), ({"content": None}, True), ({"content": ""}, False)):
            messages = [ASK, thinks, {"role": "assistant", **other, **content}, ASK, thinks]
            assert ("no text as its content" in text_of(folder, {"messages": messages}, shows)) == lacks, other
    assert "no text as its content" in text_of(folder, {"messages": [ASK, thinks | {"content": 7}]}, shows)
    hides = shows.replace("m.reasoning_content", "''")
    said = {"role": "user", "content": "2+3 is 5"}  # so that it is in the text, but not as the reasoning
    hidden = text_of(folder, {"messages": [said, ASK, thinks, ONE]}, hides)
    assert "does not show the reasoning of the role 'assistant'" in hidden
    shouts = shows.replace("m.reasoning_content", "m.reasoning_content | upper")
    assert "2+3 IS 5" in text_of(folder, {"messages": [ASK, thinks]}, shouts)


def test_spaces_at_the_end_count_where_the_tokenizer_trims_offsets(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    file = json.loads((tmp_path / "tokenizer.json").read_text())
    file["post_processor"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    for said in ("yes ", "yes  ", " ", "\n    "):
        answers = {"messages": [ASK | {"content": said}, {"role": "assistant", "content": said}]}
        for line in ({"prompt": "3+4=", "completion": said}, answers):
            found, right = encode(tmp_path, line), encode(folder, line)
            assert found.tokens.tolist() == right.tokens.tolist() and found.scored.tolist() == right.scored.tolist()


@pytest.mark.parametrize("end", ["", "{{ eos_token }}"])
def test_a_mark_that_ends_before_the_line_break_still_has_the_end_of_text_in_the_loss(folder, end):
    template = MARKED.replace("{{ eos_token }}{% endgeneration %}", "{% endgeneration %}" + end)
    tokenizer = load_tokenizer(folder)
    encoded, said = encode(folder, LINES[0], template), [*tokenizer.encode("one"), tokenizer.eos_id]
    assert encoded.tokens[encoded.scored].tolist() == said
    assert encoded.tokens.tolist()[-len(said) - 1 :] == [*said, *tokenizer.encode("\n")]
    # An answer in the middle gets none that the template does not write.
    for line, ends in ((LINES[1], 2 if end else 1), (LINES[2], 1 if end else 0)):
        encoded = encode(folder, line, template)
        assert encoded.tokens[encoded.scored].tolist().count(tokenizer.eos_id) == ends


FORGETS = "{% for m in messages %}{% if m.role != 'user' or loop.index0 > 1 %}[{{ m.content }}]{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("line", "template", "message"),
    [
        (LINES[1], FORGETS, "the chat template does not show the content of the role 'user'"),
        (LINES[0], MARKED.replace("{% for", "{{ raise_exception('not these') }}{% for"), ".*not these"),
        ({"messages": LINES[0]["messages"][:1]}, MARKED, "the assistant says nothing"),
        (
            {"messages": [{"role": "human", "content": "a"}, {"role": "gpt", "content": "b"}]},
            MARKED,
            r"the assistant says nothing in it \(roles here: human, gpt\)",
        ),
        ({"messages": [{"role": "user", "content": 3}]}, MARKED, "a message of the role 'user' has no text"),
        ({"messages": [{"role": "assistant"}]}, MARKED, "a message of the role 'assistant' has no text"),
        (LINES[0] | {"prompt": "a", "completion": "b"}, MARKED, 'has "messages" as well as "completion"'),
        ({"prompt": "a", "completion": LINES[0]["messages"]}, MARKED, 'needs "messages"'),
        ({"prompt": "a", "completion": ""}, MARKED, "the assistant says nothing"),
        ({"text": "a"}, MARKED, r'needs "messages".* \(here: text\)'),
        ({"messages": ["hello"]}, MARKED, 'needs "messages"'),
        ({"conversations": [{"from": "human", "value": "a"}]}, MARKED, "the assistant says nothing in it"),
        ({"conversations": [{"from": "bing", "value": "a"}]}, MARKED, "a turn is from 'bing'; only human, user, gpt"),
        (LINES[0] | {"tools": SUM}, MARKED, 'has "tools", which the chat template does not show'),
        (LINES[0] | {"tools": "sum"}, TOOLS + MARKED, '"tools" is not JSON'),
        (LINES[0] | {"tools": ["sum"]}, TOOLS + MARKED, '"tools" is neither a list of objects'),
        ({"prompt": "a", "completion": "half \ud83d"}, None, ".*half a surrogate pair after 'ahalf '"),
    ],
)
def test_a_conversation_that_cannot_be_learned_from_is_named(folder, line, template, message):
    assert re.match(f"a.jsonl:1: {message}", encode(folder, line, template).problem)


def test_conversations_go_through_worker_processes(folder):
    encoder = ConversationEncoder(load_tokenizer(folder), load_chat_template(folder))
    items = [Conversation(f"a.jsonl:{n}", LINES[n % 3]) for n in range(50)]
    for one, other in zip(encode_all(items, encoder, 0), encode_all(items, encoder, 1), strict=True):
        assert np.array_equal(one.tokens, other.tokens) and np.array_equal(one.scored, other.scored)
