"""Where text ends: the union of what four files say, and never a token that only ends a part of an answer."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from lockstep.data import ends_of_text, load_tokenizer
from lockstep.data.chat import load_chat_template
from tests.rl.conversations.families import FAMILIES, rendering_of, template_source, write_family

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|end|>", "<|start|>", "<|return|>"]  # from 256 on
TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' and m.thinking %}analysis"
    "{{ m.thinking }}<|end|><|start|>assistant{% endif %}{{ m.content }}"
    "{% if m.role == 'assistant' and loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def write_tokenizer(folder, template=None, eos="<|endoftext|>", special=SPECIAL, plain=(), **settings):
    """Bytes, special tokens, and added ones that are not special."""
    alphabet = {each: number for number, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name) for name in special])
    tokenizer.add_tokens([AddedToken(name, special=False) for name in plain])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings |= {"eos_token": eos} | ({"chat_template": template} if template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def ends(folder, of_model=()):
    return ends_of_text(of_model, load_tokenizer(folder), load_chat_template(folder))


@pytest.mark.parametrize(
    "template, end",
    [
        (TURNS, "<|im_end|>"),
        (HARMONY, "<|return|>"),
        (TURNS.replace("<|im_end|>", "\n<|im_end|>"), "<|im_end|>"),
        (TURNS.replace("<|im_end|>", "{{ eos_token }}"), "<|endoftext|>"),
        (TURNS.replace("<|im_end|>", ""), None),
        (TURNS.replace("<|im_end|>", "END<|im_end|>"), None),
        ("{{ messages[0].content }}", None),
        ("{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}" + TURNS, "<|im_end|>"),
        ("{{ raise_exception('no') }}", None),
    ],
)
def test_the_special_token_right_after_the_last_answer_ends_a_turn(tmp_path, template, end):
    write_tokenizer(tmp_path, template)
    found = ends(tmp_path)
    assert found == tuple(dict.fromkeys([256, *([256 + SPECIAL.index(end)] if end else [])]))


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_published_templates_end_turns_with_their_familys_token(tmp_path, bpe_tokenizer, name):
    write_family(tmp_path, name, bpe_tokenizer)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.eos_id = None  # as if only the template said it
    found = ends_of_text([], tokenizer, load_chat_template(tmp_path))
    assert found == (tokenizer.vocabulary()[settings["eos_token"]],) == rendering_of(tmp_path).end_ids


@pytest.mark.parametrize(
    "name, end",
    [
        ("gptoss", "<|return|>"),
        ("gptoss_training", "<|return|>"),
        ("deepseekv3", "<｜end▁of▁sentence｜>"),
        ("gemma3", "<end_of_turn>"),
        ("phi3", "<|end|>"),
        ("glm4moe", None),
    ],
)
def test_so_do_others_whatever_else_they_write(tmp_path, name, end):
    special = ["<|end|>", "<|return|>", "<|call|>", "<|start|>", "<end_of_turn>", "<｜end▁of▁sentence｜>", "<|user|>"]
    write_tokenizer(tmp_path, template_source(name), eos="<|user|>", special=special)
    assert ends(tmp_path)[1:] == ((256 + special.index(end),) if end else ())


def test_a_turn_may_end_with_an_added_token_that_is_not_special(tmp_path):
    write_tokenizer(tmp_path, TURNS.replace("<|im_end|>", "<|end_of_turn|>"), plain=["<|end_of_turn|>"])
    assert ends(tmp_path) == (256, 262)


def test_the_models_own_come_first_and_each_once(tmp_path):
    write_tokenizer(tmp_path, TURNS, eos="<|end|>")
    assert ends(tmp_path, [7, 258, 7]) == (7, 258, 259)
    assert load_tokenizer(tmp_path).eos_id == AutoTokenizer.from_pretrained(tmp_path).eos_token_id == 259
