# ruff: noqa: E501
"""Chat templates of families, most of them the public ones, and what a model of each samples as an answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.rl.conversations.families import template_source

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


CHATML = Family(
    template_source("qwen2_5"), lambda m: f"{m['content']}<|im_end|>", ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
)


def _hermes_calls(message: Message) -> str:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    texts = [f'<tool_call>\n{{"name": "{c["name"]}", "arguments": {json.dumps(c["arguments"], ensure_ascii=False)}}}\n</tool_call>' for c in calls]  # fmt: skip
    return ("\n" if message["content"] and texts else "") + "\n".join(texts)


def _qwen3(message: Message) -> str:
    thought = message.get("reasoning_content", "")
    return f"<think>\n{thought}\n</think>\n\n{message['content']}{_hermes_calls(message)}<|im_end|>"


QWEN3 = Family(
    template_source("qwen3"),
    _qwen3,
    ("<|im_start|>", "<|endoftext|>", "<|im_end|>"),
    ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    tools=True,
    says_why=True,
    reasoning=True,
    starts=False,
)


def _llama3(message: Message) -> str:
    for call in message.get("tool_calls", ()):
        function = call["function"]
        return f'{{"name": "{function["name"]}", "parameters": {json.dumps(function["arguments"], ensure_ascii=False)}}}<|eot_id|>'
    return f"{message['content'].strip()}<|eot_id|>"


LLAMA3 = Family(
    template_source("llama3_1"),
    _llama3,
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    tools=True,
    starts=False,
)


def _gpt_oss(message: Message) -> str:
    thought = message.get("thinking") or message.get("reasoning_content")
    before = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
    for call in message.get("tool_calls", ()):
        function = call["function"]
        header = f" to=functions.{function['name']}<|channel|>commentary json<|message|>"
        return f"{before}{header}{json.dumps(function['arguments'], ensure_ascii=False)}<|call|>"
    return f"{before}<|channel|>final<|message|>{message['content']}<|return|>"


GPT_OSS = Family(
    template_source("gptoss"),
    _gpt_oss,
    ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>"),
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
    template_source("gemma"),
    lambda message: f"{message['content'].strip()}<end_of_turn>",
    ("<bos>", "<start_of_turn>", "<end_of_turn>", "<eos>"),
    system=False,
    starts=False,
)
ENDS_ONCE = Family(
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% elif messages[-1].role == 'assistant' %}{{ eos_token }}{% endif %}",
    lambda message: f"{message['content']}\n</s>",
    ("<s>", "</s>"),
)
PHI3 = Family(
    template_source("phi3"),
    lambda message: f"{message['content']}<|end|>",
    ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>"),
)
FAMILIES = {
    "chatml": CHATML, "qwen3": QWEN3, "llama3": LLAMA3, "gpt_oss": GPT_OSS, "deepseek": DEEPSEEK, "mistral": MISTRAL,
    "gemma": GEMMA, "ends_once": ENDS_ONCE, "phi3": PHI3,
}  # fmt: skip
