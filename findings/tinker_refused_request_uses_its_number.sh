#!/usr/bin/env bash
# A training request that the server refuses has used up its number, which the tinker client never sends again.
#
# Expected: requests of a model are numbered so that a server runs them in order whatever the order of arrival; one that
# was refused (400) was not run, so that the next one has its number, or the client is of no use any more and says so.
# Seen, tinker 0.38.0: optim_step with a refused setting raises BadRequestError and the client goes on with the next
# number. A server that waits for each number in turn waits for ever, and the client asks for its result without end:
# a refusal of a request that can be read has to be an answer to its number.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv env
env/bin/pip install --quiet "tinker==0.38.0" 2>/dev/null
env/bin/pip freeze 2>/dev/null | grep "^tinker=="
cat > probe.py <<'PROBE'
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import tinker
from tinker import types

numbers = []


class Server(BaseHTTPRequestHandler):
    """As much of a server as it takes: refuses a negative learning rate, and promises everything else."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        route, status = self.path.removeprefix("/api/v1/"), 200
        answer = {"request_id": route, "model_id": "s:train:0"}
        if route == "create_session":
            answer = {"session_id": "s"}
        elif route == "telemetry":
            answer = {"status": "accepted"}
        elif route == "get_info":
            answer = {"model_id": "s:train:0", "model_data": {"model_name": "m"}}
        elif route == "retrieve_future":
            answer = {"type": "create_model", "model_id": "s:train:0", "metrics": {}}
        elif route == "optim_step":
            numbers.append(body["seq_id"])
            status = 400 if body["adam_params"]["learning_rate"] < 0 else 200
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
service = tinker.ServiceClient(base_url=f"http://127.0.0.1:{server.server_port}", api_key="tml-none")
training = service.create_lora_training_client(base_model="m").result(timeout=60)
for rate in (0.1, -1.0, 0.1):
    try:
        training.optim_step(types.AdamParams(learning_rate=rate)).result(timeout=60)
        print(f"rate {rate}: done")
    except tinker.BadRequestError:
        print(f"rate {rate}: BadRequestError")
print("numbers sent:", numbers)
assert numbers == [1, 2, 3]
PROBE
timeout 120 env/bin/python probe.py
