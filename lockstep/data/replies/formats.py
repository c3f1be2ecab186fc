"""The formats in which families of models write tool calls, recognized from their chat templates."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Family = Literal["qwen3", "qwen3_xml", "glm", "llama3", "deepseek", "mistral", "gpt_oss"]


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes calls."""

    family: Family
    arguments: str = "arguments"
    """The key of the arguments if a call is one JSON object with `name`."""
    marks: tuple[str, ...] = ()
    """The tokens that delimit calls; the first one begins them."""
    closes: str = ""
    """The mark that ends each call, if there is one."""
    variant: str = ""
    """Which of the family's two ways its template uses; both are read."""


TOOL_CALL = ("<tool_call>", "</tool_call>")
QWEN3 = ToolFormat("qwen3", marks=TOOL_CALL, closes=TOOL_CALL[1])
"""Any number of `<tool_call>` JSON object `</tool_call>`, after reasoning and text. Also Qwen2.5."""
QWEN3_XML = ToolFormat("qwen3_xml", marks=TOOL_CALL, closes=TOOL_CALL[1])
"""`<function=NAME>` and a `<parameter=KEY>` for each argument between the same tags: Qwen3.5, Qwen3-Coder, Nemotron 3.
Only the tool's schema tells whether an argument is a string."""
GLM = ToolFormat(
    "glm", marks=(*TOOL_CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"), closes=TOOL_CALL[1]
)
"""The name and pairs of key and value between the same tags: GLM-4.5 and later. Strings are written without quotes."""
LLAMA3 = ToolFormat("llama3", "parameters", ("<|python_tag|>",))
"""Only JSON, optionally after `<|python_tag|>`: Llama 3.1 and later; several are separated by semicolons."""
DEEPSEEK_MARKS = (
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
)
DEEPSEEK = ToolFormat("deepseek", marks=DEEPSEEK_MARKS, closes=DEEPSEEK_MARKS[3], variant="fenced")
"""Calls between full-width tokens: DeepSeek V3 and R1 write `function`, separator, name and a fence of JSON."""
DEEPSEEK_V31 = ToolFormat("deepseek", marks=DEEPSEEK_MARKS, closes=DEEPSEEK_MARKS[3])
"""The same tokens with name, separator and JSON: DeepSeek V3.1."""
MISTRAL_MARKS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
MISTRAL = ToolFormat("mistral", marks=MISTRAL_MARKS, variant="list")
"""`[TOOL_CALLS]` and a JSON list of calls: Mistral 7B v0.3 to Small 3.1."""
MISTRAL_ARGS = ToolFormat("mistral", marks=MISTRAL_MARKS)
"""`[TOOL_CALLS]`, name, `[ARGS]` and JSON, for each call: Magistral, Devstral, Ministral 3 and later."""
GPT_OSS = ToolFormat("gpt_oss")
"""A message to `functions.NAME`; parsed by `channels.py`, since every reply of the family consists of messages."""


def tool_format(template_source: str) -> ToolFormat | None:
    """The format in which a chat template writes calls; None if it has no tools, or uses another format.

    The published template of Gemma 3 has no tools; Gemma 4 has calls of its own, which are not read.
    """
    # Templates have JSON in strings with either kind of quotes, so the quotes of the JSON may be escaped.
    keys = set(re.findall(r'\\?"(name|arguments|parameters)\\?"', template_source))
    if "<tool_call>" in template_source:
        if "<arg_key>" in template_source and "<arg_value>" in template_source:
            return GLM
        if "<function=" in template_source and "<parameter=" in template_source:
            return QWEN3_XML
        return QWEN3 if {"name", "arguments"} <= keys else None
    if "<|start_header_id|>" in template_source and {"name", "parameters"} <= keys:
        return LLAMA3
    if all(mark in template_source for mark in DEEPSEEK_MARKS[1:4]):
        return DEEPSEEK if "```json" in template_source else DEEPSEEK_V31
    if "[TOOL_CALLS]" in template_source:
        return MISTRAL_ARGS if "[ARGS]" in template_source else MISTRAL
    if "<|channel|>" in template_source and "<|call|>" in template_source:
        return GPT_OSS
    return None
