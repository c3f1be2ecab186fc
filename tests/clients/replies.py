"""What scripted models say, in Qwen3's format."""

import json


def call(name, arguments, thought=""):
    """A reply that calls a tool, after a thought."""
    reasoning = f"<think>\n{thought}\n</think>\n\n" if thought else ""
    return f"{reasoning}<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
