#!/usr/bin/env bash
# A null `layer_types` makes transformers read a Mistral folder as another class, which may not load it.
#
# Expected: a key that is null means what a missing key means, as it does for `layer_types` in Qwen2, Qwen3 and SmolLM3.
# Seen, transformers 5.24.0: AutoConfig looks whether the key is there. With null it returns MinistralConfig, whose
# missing `head_dim` stays null, and building the model raises TypeError; without the key it is MistralConfig, and works.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv env
env/bin/pip install --quiet "torch>=2.13.0,<2.13.1" numpy "transformers==5.24.0" 2>/dev/null
env/bin/pip freeze 2>/dev/null | grep -E "^(torch|transformers)=="
export HF_HUB_OFFLINE=1
cat > probe.py <<'PROBE'
import json
from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM

plain = {
    "model_type": "mistral", "architectures": ["MistralForCausalLM"], "vocab_size": 96, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "sliding_window": 32, "rope_theta": 10000.0,
}
result = {}
for name, values in (("no layer_types", plain), ("layer_types null", plain | {"layer_types": None})):
    folder = Path(name.replace(" ", "_"))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    config = AutoConfig.from_pretrained(folder)
    try:
        outcome = type(AutoModelForCausalLM.from_config(config)).__name__
    except TypeError as error:
        outcome = f"TypeError: {error}"
    print(f"{name}: {type(config).__name__}, {outcome}")
    result[name] = type(config).__name__, outcome.split(":")[0]
assert result["no layer_types"] == ("MistralConfig", "MistralForCausalLM"), result
assert result["layer_types null"] == ("MinistralConfig", "TypeError"), result
PROBE
env/bin/python probe.py 2>/dev/null
