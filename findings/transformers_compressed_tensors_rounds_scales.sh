#!/usr/bin/env bash
# transformers rounds the float32 scales of a compressed-tensors folder to the model's dtype while it loads it.
#
# Expected: the scales that are in the files, as with dequantize=True: a weight is code times scale, rounded to bfloat16
# once.
# Seen, transformers 5.24.0 with compressed-tensors 0.20.1: opened with the folder's own settings, the scales are
# bfloat16, without a warning, and a quarter of the weights differ from those of dequantize=True after the first forward.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv env
env/bin/pip install --quiet "torch>=2.13.0,<2.13.1" numpy "transformers==5.24.0" "compressed-tensors==0.20.1" 2>/dev/null
env/bin/pip freeze 2>/dev/null | grep -E "^(torch|transformers|compressed-tensors|gguf)=="
export HF_HUB_OFFLINE=1
cat > probe.py <<'PROBE'
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, Qwen3Config, Qwen3ForCausalLM

torch.manual_seed(0)
sizes = dict(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2)
model = Qwen3ForCausalLM(Qwen3Config(**sizes, num_key_value_heads=2, head_dim=32, tie_word_embeddings=False))
folder = Path("int8")
model.bfloat16().save_pretrained(folder)
tensors, expected = {}, {}
for name, weight in load_file(folder / "model.safetensors").items():
    tensors[name] = weight
    if name.endswith("_proj.weight"):
        scale = weight.float().abs().amax(1, keepdim=True) / 127
        codes = (weight.float() / scale).round().to(torch.int8)
        tensors |= {name: codes, name + "_scale": scale}
        expected[name] = (codes * scale).bfloat16()
save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False}
inputs = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
config = json.loads((folder / "config.json").read_text())
config["quantization_config"] = {
    "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
}
(folder / "config.json").write_text(json.dumps(config))
settings = CompressedTensorsConfig(dequantize=True)
read = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=settings).state_dict()
assert all(torch.equal(read[name], weight) for name, weight in expected.items()), "dequantize=True"
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
scale = next(p for name, p in model.named_parameters() if name.endswith("q_proj.weight_scale"))
print("in the file:", tensors["model.layers.0.self_attn.q_proj.weight_scale"].dtype, " in the model:", scale.dtype)
model(torch.tensor([[1, 2, 3]]))
read = model.state_dict()
different = sum(int((read[name] != weight).sum()) for name, weight in expected.items())
share = different / sum(weight.numel() for weight in expected.values())
print(f"weights that differ from code times scale: {share:.0%}")
assert scale.dtype == torch.bfloat16 and share > 0.2, (scale.dtype, share)
PROBE
env/bin/python probe.py 2>/dev/null
