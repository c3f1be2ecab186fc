"""Tool calls as models write them: `lockstep.data.replies`, under the name that environments know."""

from lockstep.data.replies import DEEPSEEK, GPT_OSS, LLAMA3, QWEN3, ToolCall, ToolFormat, parse_calls, tool_format

__all__ = ["DEEPSEEK", "GPT_OSS", "LLAMA3", "QWEN3", "ToolCall", "ToolFormat", "parse_calls", "tool_format"]
