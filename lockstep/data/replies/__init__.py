"""Parses replies in the format of the model's family into reasoning, content and tool calls."""

from lockstep.data.replies.calls import DEEPSEEK, GPT_OSS, LLAMA3, QWEN3, ToolCall, ToolFormat, tool_format
from lockstep.data.replies.form import PLAIN, Piece, ReplyForm, reply_form
from lockstep.data.replies.reader import ReplyParts, ReplyReader, parse_calls, read_reply

__all__ = [
    "DEEPSEEK",
    "GPT_OSS",
    "LLAMA3",
    "PLAIN",
    "QWEN3",
    "Piece",
    "ReplyForm",
    "ReplyParts",
    "ReplyReader",
    "ToolCall",
    "ToolFormat",
    "parse_calls",
    "read_reply",
    "reply_form",
    "tool_format",
]
