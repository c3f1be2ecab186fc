"""`{% generation %}` and templates by name, against transformers on random templates and folders."""

import json

import pytest

from lockstep.data import ByteTokenizer, load_tokenizer, train_bpe
from lockstep.data.chat import ChatTemplate, load_chat_template
from lockstep.data.conversations import Conversation, ConversationEncoder
from lockstep.errors import UserError

MESSAGES = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
]


SCOPES = """\
{% macro twice(v) %}{{ v }}{{ v }}{% set x = v %}{% endmacro %}{% set space = namespace() %}{% set x = '0' %}\
{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{% set x = x ~ '1' %}{{ x }}\
{% set space.y = (space.y | default('')) ~ x %}{{ twice(x) }}{% for z in [1, 2] %}{% set x = z %}{{ x }}{% endfor %}\
{% generation %}{% set z = 'inner' %}{{ z }}{% endgeneration %}{{ z }}{{ m.content }}{% endgeneration %}{{ x }}{{ z }}\
{% else %}{{ m.content }}{% endif %}{% endfor %}{{ x }}{{ space.y }}"""


def test_what_is_set_within_generation_is_known_where_it_is_in_transformers():
    from transformers.utils.chat_template_utils import render_jinja_template

    (expected,), _ = render_jinja_template([MESSAGES], chat_template=SCOPES)
    assert ChatTemplate(SCOPES, {}).render(MESSAGES, add_generation_prompt=False) == expected
    assert "<assistant>01" in expected


TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
TOOL_USE = "{{ tools | tojson }}" + TURNS
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
ROW = {"messages": MESSAGES[:2]}
FORMS = ("files", "list", "files over the list")


@pytest.fixture(params=FORMS)
def folder(request, tmp_path):
    train_bpe(["a b c"], 300).save(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    sources = {"rag": "-", "default": TURNS, "tool_use": TOOL_USE}
    named = [{"name": name, "template": template} for name, template in sources.items()]
    if request.param != "files":
        listed = named if request.param == "list" else [{"name": "default", "template": "old"}]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": listed}))
    if request.param != "list":
        (tmp_path / "chat_template.jinja").write_text(TURNS)
        (tmp_path / "additional_chat_templates").mkdir()
        for one in named:
            if one["name"] != "default":
                (tmp_path / "additional_chat_templates" / f"{one['name']}.jinja").write_text(one["template"])
    return tmp_path


def _theirs(folder, **values):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder).apply_chat_template(ROW["messages"], tokenize=False, **values)


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_conversation_with_tools_is_rendered_by_the_template_of_that_name(folder, tools):
    template = load_chat_template(folder)
    expected = _theirs(folder, tools=tools)
    assert template.render(ROW["messages"], add_generation_prompt=False, tools=tools) == expected
    (encoded,) = ConversationEncoder(ByteTokenizer(), template).encode([Conversation("line 1", ROW | {"tools": tools})])
    assert not encoded.problem and ("parameters" in ByteTokenizer().decode(encoded.tokens.tolist())) == bool(tools)


def test_a_saved_tokenizer_has_all_of_the_folders_templates(folder, tmp_path_factory):
    copy = tmp_path_factory.mktemp("copy")
    load_tokenizer(folder).save(copy)
    for tools in (None, TOOLS):
        assert _theirs(copy, tools=tools) == _theirs(folder, tools=tools)
        ours = load_chat_template(copy).render(ROW["messages"], add_generation_prompt=False, tools=tools)
        assert ours == _theirs(folder, tools=tools)


def test_templates_without_a_default_are_refused(tmp_path):
    ByteTokenizer().save(tmp_path)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text(TURNS)
    with pytest.raises(UserError, match=r"none named default \(rag\)"):
        load_chat_template(tmp_path)


TWO_MARKS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}t:{{ m.reasoning_content }}"
    "{% endgeneration %}|{% generation %}{{ m.content }}</s>{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize("turns", ["apart", "whole"])
@pytest.mark.parametrize("wanted", [(0,), (1,), (0, 1)])
def test_all_that_is_marked_of_the_answers_that_are_trained_on_is_scored_and_nothing_else(turns, wanted):
    answers = [{"role": "assistant", "content": said, "reasoning_content": why} for said, why in ("bx", "dy")]
    messages = [MESSAGES[0], {**answers[0], "weight": int(0 in wanted)}, MESSAGES[2], {**answers[1], "weight": int(1 in wanted)}]  # fmt: skip # noqa: E501
    encoder = ConversationEncoder(ByteTokenizer(), ChatTemplate(TWO_MARKS, {}), turns)
    (encoded,) = encoder.encode([Conversation("line 1", {"messages": messages})])
    scored = ByteTokenizer().decode(encoded.tokens[encoded.scored].tolist())
    assert not encoded.problem and scored == "".join(("t:xb</s>", "t:yd</s>")[index] for index in wanted)
