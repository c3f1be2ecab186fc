#!/usr/bin/env bash
# litellm knows an overflow of the context by the message's words for one provider, by the error's code for another.
#
# Expected: a 400 with OpenAI's code `context_length_exceeded` is a ContextWindowExceededError whatever the provider's name
# and the message's words are: callers cut their prompts when they catch that class, and give up on a BadRequestError.
# Seen, litellm 1.110.2 with openai 3.57.0, the same answer of one server: `hosted_vllm/x` raises
# ContextWindowExceededError, `openai/x` a plain BadRequestError: the code is looked for as the text
# `"code": "context_length_exceeded"`, and on openai/x only the message is looked through. With "prompt is too long" in
# the message both raise ContextWindowExceededError.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv env
env/bin/pip install --quiet "litellm==1.110.2" "openai==3.57.0" 2>/dev/null
env/bin/pip freeze 2>/dev/null | grep -E "^(litellm|openai)=="
cat > probe.py <<'PROBE'
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import litellm

litellm.suppress_debug_info = True


class Refuses(BaseHTTPRequestHandler):
    """Answers every request as OpenAI's API does if the context is exceeded."""

    words = ""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        error = {"message": self.words, "type": "invalid_request_error", "code": "context_length_exceeded"}
        body = json.dumps({"error": error | {"param": "messages"}}).encode()
        self.send_response(400)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Refuses)
threading.Thread(target=server.serve_forever, daemon=True).start()


def raised(provider, words):
    Refuses.words = words
    try:
        litellm.completion(
            model=f"{provider}/x",
            api_base=f"http://127.0.0.1:{server.server_port}/v1",
            api_key="none",
            messages=[{"role": "user", "content": "hi"}],
            max_retries=0,
        )
    except litellm.BadRequestError as error:
        print(f"{provider}, {words!r}: {type(error).__name__}")
        return type(error)


plain, known = "9 tokens do not fit into 8", "the prompt is too long: 9 tokens do not fit into 8"
assert raised("hosted_vllm", plain) is litellm.ContextWindowExceededError
assert raised("openai", plain) is litellm.BadRequestError
assert raised("hosted_vllm", known) is litellm.ContextWindowExceededError
assert raised("openai", known) is litellm.ContextWindowExceededError
PROBE
LITELLM_LOCAL_MODEL_COST_MAP=True env/bin/python probe.py
