# ruff: noqa: E501
"""Chat templates that behave as the families' public ones do, and what a model of each samples as an answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """A template, and what is sampled after its generation prompt, through the end of the turn."""

    template: str
    sampled: Callable[[Message], str]
    special: tuple[str, ...]
    """Names of its special tokens; the last is the tokenizer's end of text."""
    plain: tuple[str, ...] = ()
    """Names of added tokens that are not special."""
    tools: bool = False
    says_why: bool = False
    """Whether an answer may have content beside calls."""
    reasoning: bool = False
    system: bool = True
    starts: bool = True
    """Whether a conversation may begin with the assistant."""


def _chatml(message: Message) -> str:
    return f"{message['content']}<|im_end|>"


CHATML = Family(
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    _chatml,
    ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
)


def _hermes_calls(message: Message) -> str:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    texts = [f'<tool_call>\n{{"name": "{c["name"]}", "arguments": {json.dumps(c["arguments"], ensure_ascii=False)}}}\n</tool_call>' for c in calls]  # fmt: skip
    return ("\n" if message["content"] and texts else "") + "\n".join(texts)


def _qwen3(message: Message) -> str:
    thought = message.get("reasoning_content", "")
    return f"<think>\n{thought}\n</think>\n\n{message['content']}{_hermes_calls(message)}<|im_end|>"


# Reasoning of answers before the last user's message is dropped; the last answer has a thought, if only an empty one.
_QWEN3_TURNS = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- set found = namespace(user=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set found.user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}
{%- if loop.index0 > found.user and (loop.last or m.reasoning_content) %}{{ '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}{% endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}{% if not loop.first or m.content %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- endif %}{% endfor %}"""

_QWEN_TOKENS = ("<|im_start|>", "<|endoftext|>", "<|im_end|>"), ("<think>", "</think>", "<tool_call>", "</tool_call>")
QWEN3 = Family(
    _QWEN3_TURNS
    + "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    + "{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}",
    _qwen3,
    *_QWEN_TOKENS,
    tools=True,
    says_why=True,
    reasoning=True,
)
QWEN3_THINKING = Family(
    _QWEN3_TURNS + "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}",
    lambda message: _qwen3(message).removeprefix("<think>\n"),
    *_QWEN_TOKENS,
    tools=True,
    says_why=True,
    reasoning=True,
)


def _llama3(message: Message) -> str:
    for call in message.get("tool_calls", ()):
        function = call["function"]
        return f'{{"name": "{function["name"]}", "parameters": {json.dumps(function["arguments"], ensure_ascii=False)}}}<|eot_id|>'
    return f"{message['content'].strip()}<|eot_id|>"


LLAMA3 = Family(
    """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + system }}
{%- if tools is not none %}{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}{% endif %}{{ '<|eot_id|>' }}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{ '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + m.content + '<|eot_id|>' }}
{%- elif m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set call = m.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|eot_id|>' }}
{%- else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + (m.content | trim) + '<|eot_id|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}""",
    _llama3,
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    tools=True,
)


def _gpt_oss(message: Message) -> str:
    thought = message.get("thinking") or message.get("reasoning_content")
    before = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
    for call in message.get("tool_calls", ()):
        function = call["function"]
        header = f" to=functions.{function['name']}<|channel|>commentary json<|message|>"
        return f"{before}{header}{json.dumps(function['arguments'], ensure_ascii=False)}<|call|>"
    return f"{before}<|channel|>final<|message|>{message['content']}<|return|>"


# Reasoning before calls is dropped once a final answer follows; of answers only the last ends with <|return|>.
GPT_OSS = Family(
    """\
{%- set last_call = namespace(name=none) %}
{%- for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls %}
{%- set after = namespace(final=false) %}
{%- for n in messages[loop.index:] %}{% if n.role == 'assistant' and not n.tool_calls %}{% set after.final = true %}{% endif %}{% endfor %}
{%- if m.thinking and not after.final %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}
{%- set call = m.tool_calls[0].function %}{% set last_call.name = call.name %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' + (call.arguments | tojson) + '<|call|>' }}
{%- elif m.role == 'assistant' and loop.last and not add_generation_prompt %}
{%- if m.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}
{%- elif m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
{%- elif m.role == 'tool' %}{% if last_call.name is none %}{{ raise_exception('a result without a call') }}{% endif %}
{{- '<|start|>functions.' + last_call.name + ' to=assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' }}
{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}""",
    _gpt_oss,
    ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"),
    tools=True,
    reasoning=True,
)
DEEPSEEK = Family(
    """\
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'system' %}{{ m.content }}
{%- elif m.role == 'user' %}{{ '<｜User｜>' + m.content }}
{%- else %}{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}""",
    lambda message: message["content"] + "<｜end▁of▁sentence｜>",
    ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    ("<｜User｜>", "<｜Assistant｜>"),
)
MISTRAL = Family(
    """\
{{- bos_token }}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('user and assistant must alternate') }}{% endif %}
{%- if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ ' ' + m.content + '</s>' }}{% endif %}
{%- endfor %}""",
    lambda message: f" {message['content']}</s>",
    ("<s>", "</s>"),
    system=False,
    starts=False,
)
GEMMA = Family(
    """\
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + (m.content | trim) + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}""",
    lambda message: f"{message['content'].strip()}<end_of_turn>",
    ("<bos>", "<start_of_turn>", "<end_of_turn>", "<eos>"),
    system=False,
)
ENDS_ONCE = Family(
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% elif messages[-1].role == 'assistant' %}{{ eos_token }}{% endif %}",
    lambda message: f"{message['content']}\n</s>",
    ("<s>", "</s>"),
)
PHI3 = Family(
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
    lambda message: f"{message['content']}<|end|>",
    ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>"),
)
FAMILIES = {
    "chatml": CHATML, "qwen3": QWEN3, "qwen3_thinking": QWEN3_THINKING, "llama3": LLAMA3, "gpt_oss": GPT_OSS,
    "deepseek": DEEPSEEK, "mistral": MISTRAL, "gemma": GEMMA, "ends_once": ENDS_ONCE, "phi3": PHI3,
}  # fmt: skip
