#!/usr/bin/env bash
# YaRN added to a folder that transformers 5 saved, under `rope_scaling` as Qwen3's model card says, resets rope_theta.
#
# Expected: rope_theta stays 1000000, as saved, and positions are stretched by YaRN.
# Seen, transformers 5.24.0: `rope_scaling` takes the place of the whole table `rope_parameters`, in which transformers 5
# saves rope_theta, so the base of the frequencies becomes the default of 10000, without a warning. In folders of
# transformers 4, where rope_theta stands at the top level, it stays.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv env
env/bin/pip install --quiet "transformers==5.24.0" 2>/dev/null
env/bin/pip freeze 2>/dev/null | grep -E "^transformers=="
cat > probe.py <<'PROBE'
import json
from pathlib import Path

from transformers import AutoConfig, Qwen3Config

saved = Path("folder/config.json")
Qwen3Config(rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}).save_pretrained("folder")
before = json.loads(saved.read_text())
yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def theta_of(values):
    saved.write_text(json.dumps(values))
    return AutoConfig.from_pretrained("folder").rope_parameters["rope_theta"]


print("as saved:", before["rope_parameters"], "at the top:", before.get("rope_theta"))
added = theta_of(before | {"rope_scaling": yarn})
old = {key: value for key, value in before.items() if key != "rope_parameters"}
beside = theta_of(old | {"rope_theta": 1000000.0, "rope_scaling": yarn})
print("with rope_scaling added:", added)
print("in the form of transformers 4:", beside)
assert (added, beside) == (10000.0, 1000000.0)
PROBE
env/bin/python probe.py
