"""Start the server, ask it over HTTP with OpenAI's routes, and score the answer again: the same bits.

python examples/serve_and_ask.py --model DIR
"""

import argparse
import json
import re
import subprocess
import sys
import urllib.request

import torch

import lockstep

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", required=True)
arguments = parser.parse_args()

command = [sys.executable, "-m", "lockstep", "serve", "--model", arguments.model, "--port", "0", "--model-name", "mine"]
server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
try:
    assert server.stderr is not None
    address = next(found[0] for line in server.stderr if (found := re.search(r"http://[\d.]+:\d+", line)))
    prompt = [72, 101, 108, 108, 111]
    body = {"model": "mine", "prompt": prompt, "max_tokens": 16, "logprobs": 1, "return_token_ids": True}
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        choice = json.load(response)["choices"][0]
finally:
    server.terminate()
    server.wait()

print(choice["text"])
# On the server's device: GPUs have other bits than CPUs.
model = lockstep.load_model(arguments.model, device="cuda" if torch.cuda.is_available() else "cpu")
scored = lockstep.score(model, [prompt + choice["token_ids"]])[0][len(prompt) - 1 :].cpu()
served = torch.tensor(choice["logprobs"]["token_logprobs"])
print(f"{len(served)} log-probabilities, {int((scored != served).sum())} differ from the trainer's")
