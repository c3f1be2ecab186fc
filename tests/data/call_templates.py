# ruff: noqa: E501
"""Templates of every format of tool calls: the public ones, and, where none is installed, shortened ones of the same
form (Mistral's two, and DeepSeek V3.1's, whose published one does not read `tools`)."""

import json
from dataclasses import dataclass

from tests.rl.conversations.families import DEEPSEEK, DEEPSEEK_CALLS, GPT_OSS, LLAMA, QWEN, QWEN_WORDS, template_source

MISTRAL = """\
{{- bos_token }}
{%- if tools %}{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for m in messages %}
{%- if m.role in ('user', 'system') %}{{ '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS] {"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- elif m.tool_calls is defined %}
{{- '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('Tool call IDs must have 9 characters') }}{% endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + ('' if loop.last else ', ') }}
{%- endfor %}
{{- ']' + eos_token }}
{%- else %}{{ m.content + eos_token }}{% endif %}
{%- endfor %}"""
MISTRAL_ARGS = """\
{{- bos_token }}
{%- if tools %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for m in messages %}
{%- if m.role in ('user', 'system') %}{{ '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
{%- else %}
{{- m.content or '' }}
{%- for call in m.tool_calls or [] %}
{%- set arguments = call.function.arguments if call.function.arguments is string else call.function.arguments | tojson %}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + arguments }}
{%- endfor %}
{{- eos_token }}
{%- endif %}
{%- endfor %}"""
DEEPSEEK_V31 = """\
{{- bos_token }}
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for m in messages %}
{%- if m.role in ('user', 'system') %}{{ '<｜User｜>' + m.content }}
{%- elif m.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- else %}
{{- '<｜Assistant｜></think>' + (m.content or '') }}
{%- if m.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}
{%- for call in m.tool_calls %}
{{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments + '<｜tool▁call▁end｜>' }}
{%- endfor %}{{ '<｜tool▁calls▁end｜>' }}{% endif %}
{{- '<｜end▁of▁sentence｜>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜></think>' }}{% endif %}"""

# V3's and R1's, with a type and a fence around the JSON.
DEEPSEEK_FENCED = DEEPSEEK_V31.replace(
    "call.function.name + '<｜tool▁sep｜>' + call.function.arguments + '<",
    "'function<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' + call.function.arguments + '\\n```<",
)


@dataclass(frozen=True)
class CallFamily:
    special: tuple[str, ...]
    """Names of special tokens; the last one ends the turn."""
    words: tuple[str, ...] = ()
    """Names of added tokens that are not special."""
    source: str = ""
    """The template; empty: the public one of this name."""
    many: bool = True
    """Whether a message may have several calls."""
    says_why: bool = True
    """Whether a message may have content beside calls."""


GLM_WORDS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")  # fmt: skip
MISTRAL_TOKENS = ("<s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")  # fmt: skip
DEEPSEEK_TOKENS = (DEEPSEEK[0], *DEEPSEEK[2:], DEEPSEEK[1])
DEEPSEEK_WORDS = ("<think>", "</think>", *(f"<｜{name}｜>" for name in DEEPSEEK_CALLS))
CALL_FAMILIES = {
    "qwen3": CallFamily(tuple(QWEN), tuple(QWEN_WORDS)),
    "qwen3_5_think": CallFamily(tuple(QWEN), tuple(QWEN_WORDS)),
    "glm4moe": CallFamily(
        ("[gMASK]", "<sop>", "<|system|>", "<|assistant|>", "<|observation|>", "<|endoftext|>", "<|user|>"), GLM_WORDS
    ),
    "llama3_1": CallFamily(tuple(LLAMA), ("<|python_tag|>",), many=False, says_why=False),
    "mistral": CallFamily((*MISTRAL_TOKENS, "</s>"), source=MISTRAL, says_why=False),
    "mistral_args": CallFamily((*MISTRAL_TOKENS, "[ARGS]", "[CALL_ID]", "</s>"), source=MISTRAL_ARGS),
    "deepseek_v31": CallFamily(DEEPSEEK_TOKENS, DEEPSEEK_WORDS, DEEPSEEK_V31),
    "deepseek_fenced": CallFamily(DEEPSEEK_TOKENS, DEEPSEEK_WORDS, DEEPSEEK_FENCED),
    "gptoss": CallFamily(
        tuple(f"<|{name}|>" for name in [*GPT_OSS[1:], GPT_OSS[0]]), many=False, says_why=False
    ),
}  # fmt: skip


def call_template(name: str) -> str:
    return CALL_FAMILIES[name].source or template_source(name)


def write_call_family(folder, name: str, bpe_tokenizer) -> None:
    """Writes tokenizer and template."""
    family = CALL_FAMILIES[name]
    folder.mkdir(parents=True, exist_ok=True)
    bpe_tokenizer.save(folder)
    (folder / "chat_template.jinja").write_text(call_template(name))
    known = bpe_tokenizer.vocabulary()
    new = [(token, token in family.special) for token in (*family.special, *family.words) if token not in known]
    added = {
        str(len(known) + index): {"content": token, "special": is_special, "normalized": False}
        for index, (token, is_special) in enumerate(new)
    }
    settings = {"added_tokens_decoder": added, "eos_token": family.special[-1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"bos_token": family.special[0]}))


PARAMETERS = {
    "search": {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "limit": {"type": "integer", "minimum": 1, "maximum": 50},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "either": {"type": ["string", "integer"]},
        },
        "required": ["query"],
        "additionalProperties": False,
    },
    "look_up": {
        "type": "object",
        "properties": {
            "words": {"type": "array", "items": {"type": "string"}},
            "deep": {"type": "object"},
            "on": {"type": "boolean"},
        },
        "required": ["on"],
        "additionalProperties": False,
    },
}
