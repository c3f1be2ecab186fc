"""mini-swe-agent's command, by tool calls and by code blocks. Arguments: the URL."""

import json
import os
import subprocess
import sys
from pathlib import Path

variables = os.environ | {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"}
found = {}
for config, model_class in (("mini.yaml", "litellm"), ("mini_textbased.yaml", "litellm_textbased")):
    folder = Path(config).with_suffix("")
    folder.mkdir()
    command = [str(Path(sys.executable).with_name("mini")), "-m", "openai/small", "--model-class", model_class]
    command += ["-c", config, "-c", f"model.model_kwargs.api_base={sys.argv[1]}/v1", "-o", "trajectory.json"]
    command += ["-t", "Write what six times seven is to answer.txt.", "--yolo", "--exit-immediately"]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout[-3000:] + done.stderr[-3000:])
    trajectory = json.loads((folder / "trajectory.json").read_text())
    found[model_class] = {
        "answer": (folder / "answer.txt").read_text(),
        "calls": trajectory["info"]["model_stats"]["api_calls"],
        "status": trajectory["info"]["exit_status"],
        "submission": trajectory["info"]["submission"],
        "roles": [message["role"] for message in trajectory["messages"]],
    }
print(json.dumps(found))
