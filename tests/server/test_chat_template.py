"""Chat templates render as transformers renders them."""

import json
import shutil

import pytest

from lockstep.checkpoint import model_folder
from lockstep.config import PretrainConfig
from lockstep.data.chat import ChatTemplateError, load_chat_template
from lockstep.errors import UserError
from lockstep.train.pretrain import pretrain

MESSAGES = [
    {"role": "system", "content": "  Be brief <&> ünïcode. "},
    {"role": "user", "content": "What is\n2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3+3?"},
]
TEMPLATE = """{%- set ns = namespace(first=true) %}
{{ bos_token or '' }}
{% for message in messages %}
    {% if message.content is none %}{% continue %}{% endif %}
    {%- if message['role'] == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}
    {% if message.role == 'assistant' %}
{% generation %}[{{ message.content | tojson }}]{% endgeneration %}
    {% else %}
<{{ message.role }} {{ message | tojson(indent=1) }}>
    {% endif %}
    {% set ns.first = false %}
{% endfor %}
{% if add_generation_prompt %}{{ strftime_now('%Y')[:2] }}<assistant>{{ eos_token }}{% endif %}"""


def _put(folder, where, template):
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    if where == "file":
        (folder / "chat_template.jinja").write_text(template)
        return
    path = folder / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": template}]
    value = {"chat_template": template if where == "settings" else named}
    path.write_text(json.dumps(json.loads(path.read_text()) | value))


@pytest.mark.parametrize("where", ["file", "settings", "named settings"])
def test_a_rendering_equals_that_of_transformers(tmp_path, chat_folder, where):
    from transformers import PreTrainedTokenizerFast

    shutil.copytree(chat_folder, tmp_path, dirs_exist_ok=True)
    _put(tmp_path, where, TEMPLATE)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(MESSAGES, chat_template=TEMPLATE, tokenize=False, add_generation_prompt=True)
    assert load_chat_template(tmp_path).render(MESSAGES) == expected


def test_what_a_template_refuses_or_may_not_is_named_and_a_folder_may_have_none(tmp_path):
    assert load_chat_template(tmp_path) is None
    for template, error, message in (
        (TEMPLATE, ChatTemplateError, "system comes first"),
        ("{{ ''.__class__.__mro__ }}", ChatTemplateError, "unsafe"),
        ("{% for %}", UserError, "chat template cannot be read"),
    ):
        _put(tmp_path, "file", template)
        with pytest.raises(error, match=message):
            load_chat_template(tmp_path).render([MESSAGES[1], MESSAGES[0]])


def test_the_checkpoint_of_a_run_from_a_chat_models_folder_chats_as_that_did(tmp_path, chat_folder):
    start = tmp_path / "start"
    shutil.copytree(chat_folder, start)
    _put(start, "file", TEMPLATE)
    (start / "special_tokens_map.json").write_text('{"bos_token": {"content": "<|endoftext|>"}}')
    config = PretrainConfig(
        output=str(tmp_path / "run"), model=str(start), steps=1, tokens_per_step=64, sequence_length=64
    )
    checkpoint = model_folder(str(pretrain(config, ["a text of a few words " * 20])))
    rendered = load_chat_template(checkpoint).render(MESSAGES)
    assert rendered == load_chat_template(start).render(MESSAGES) and rendered.startswith("<|endoftext|>")
