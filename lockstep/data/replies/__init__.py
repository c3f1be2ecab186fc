"""Parses replies in the format of the model's family into reasoning, content and tool calls."""

from lockstep.data.replies.calls import DEEPSEEK, GPT_OSS, LLAMA3, QWEN3, ToolCall, ToolFormat, tool_format
from lockstep.data.replies.form import PLAIN, ReplyForm, reply_form
from lockstep.data.replies.from_text import parse_calls
from lockstep.data.replies.reader import ReplyParts, ReplyReader, read_reply
from lockstep.data.replies.sections import Piece

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
