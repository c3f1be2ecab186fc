#!/usr/bin/env bash
# inspect-ai sends an answer back with a line break before it that the model never wrote, if the answer had reasoning.
#
# Expected: the next request's history has the answer's content as it was, "Yes." (and null or "" for a message of only
# calls): another text is another prompt for templates that do not strip it, and misses a cached prefix.
# Seen, inspect-ai 0.3.285 with openai 3.57.0, provider openai-api: content "Yes." beside reasoning_content comes back as
# "\nYes.", and content null as "\n"; without reasoning "Yes." comes back as it was.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv env
env/bin/pip install --quiet "inspect-ai==0.3.285" "openai==3.57.0" 2>/dev/null
env/bin/pip freeze 2>/dev/null | grep -E "^(inspect.ai|openai)=="
cat > probe.py <<'PROBE'
import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from inspect_ai.model import ChatMessageTool, ChatMessageUser, get_model
from inspect_ai.tool import ToolInfo, ToolParams

CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


class Answers(BaseHTTPRequestHandler):
    """Answers every chat with `message`, and keeps the last request's messages."""

    message, messages = {}, []

    def do_POST(self):
        Answers.messages = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"]
        reason = "tool_calls" if "tool_calls" in self.message else "stop"
        message = {"role": "assistant", "refusal": None, **self.message}
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        answer = {"id": "x", "object": "chat.completion", "created": 1, "model": "x", "usage": usage}
        body = json.dumps(answer | {"choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
threading.Thread(target=server.serve_forever, daemon=True).start()
model = get_model("openai-api/here/x", base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="none")
look = ToolInfo(name="look", description="Looks.", parameters=ToolParams())


async def sent_back(**message):
    """The content of an answer in the history of the next request."""
    Answers.message = message
    history = [ChatMessageUser(content="Well?")]
    first = (await model.generate(history, tools=[look])).message
    said = ChatMessageUser(content="And?")
    if first.tool_calls:
        said = ChatMessageTool(content="4", tool_call_id="call_1", function="look")
    await model.generate([*history, first, said], tools=[look])
    content = Answers.messages[1]["content"]
    print(f"{message}: {content!r}")
    return content


async def probe():
    assert await sent_back(content="Yes.") == "Yes."
    assert await sent_back(content="Yes.", reasoning_content="I think.") == "\nYes."
    assert await sent_back(content=None, reasoning_content="I think.", tool_calls=[CALL]) == "\n"


asyncio.run(probe())
PROBE
env/bin/python probe.py
