#!/usr/bin/env bash
# transformers decompresses a compressed-tensors folder of two schemes with the first one for every layer.
#
# Expected: with dequantize=True each layer is decompressed by the group of config_groups whose targets it matches: here
# attention in 4 bits, and the feed-forward in 8.
# Seen, transformers 5.24.0 with compressed-tensors 0.20.1: the feed-forward's words are unpacked as 4 bits too: its
# weights are wrong in every element but a few, without a warning.
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
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, Qwen3Config, Qwen3ForCausalLM

torch.manual_seed(0)
sizes = dict(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2)
model = Qwen3ForCausalLM(Qwen3Config(**sizes, num_key_value_heads=2, head_dim=32, tie_word_embeddings=False))
folder = Path("mixed")
model.bfloat16().save_pretrained(folder)
tensors, expected = {}, {}
for name, weight in load_file(folder / "model.safetensors").items():
    if not name.endswith("_proj.weight"):
        tensors[name] = weight
        continue
    bits, base = 8 if "mlp" in name else 4, name.removesuffix("weight")
    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), weight.shape, dtype=torch.int8)
    scale = torch.full((weight.shape[0], 1), 0.01).bfloat16()
    tensors |= {base + "weight_packed": pack_to_int32(codes, bits), base + "weight_scale": scale}
    tensors[base + "weight_shape"] = torch.tensor(weight.shape)
    expected[name] = codes.bfloat16() * scale
save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def group(bits: int, target: str) -> dict:
    weights = {"num_bits": bits, "type": "int", "strategy": "channel", "symmetric": True}
    return {"targets": [target], "format": "pack-quantized", "weights": weights}


config = json.loads((folder / "config.json").read_text())
config["quantization_config"] = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": group(4, "re:.*self_attn.*"), "group_1": group(8, "re:.*mlp.*")},
}
(folder / "config.json").write_text(json.dumps(config))
settings = CompressedTensorsConfig(dequantize=True)
read = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=settings).state_dict()
right = {name: torch.equal(read[name], weight) for name, weight in expected.items()}
print(right)
assert right == {name: "self_attn" in name for name in expected}, right
PROBE
env/bin/python probe.py 2>/dev/null
