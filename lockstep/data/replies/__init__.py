"""Parses replies in the format of the model's family into reasoning, content and tool calls."""

from lockstep.data.replies.calls import ToolCall, WrittenCall
from lockstep.data.replies.form import PLAIN, Piece, ReplyForm, reply_form
from lockstep.data.replies.formats import (
    DEEPSEEK,
    DEEPSEEK_V31,
    GLM,
    GPT_OSS,
    LLAMA3,
    MISTRAL,
    MISTRAL_ARGS,
    QWEN3,
    QWEN3_XML,
    ToolFormat,
    tool_format,
)
from lockstep.data.replies.growing import CallPart
from lockstep.data.replies.reader import ReplyParts, ReplyReader, last_mark, parse_calls, read_reply

__all__ = [
    "DEEPSEEK",
    "DEEPSEEK_V31",
    "GLM",
    "GPT_OSS",
    "LLAMA3",
    "MISTRAL",
    "MISTRAL_ARGS",
    "PLAIN",
    "QWEN3",
    "QWEN3_XML",
    "CallPart",
    "Piece",
    "ReplyForm",
    "ReplyParts",
    "ReplyReader",
    "ToolCall",
    "ToolFormat",
    "WrittenCall",
    "last_mark",
    "parse_calls",
    "read_reply",
    "reply_form",
    "tool_format",
]
