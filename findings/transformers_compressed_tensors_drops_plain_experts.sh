#!/usr/bin/env bash
# transformers does not load a compressed-tensors folder in integers whose experts are not quantized.
#
# Expected: experts that config_groups do not target and `ignore` names are loaded as they are stored, as they are if the
# format is float-quantized.
# Seen, transformers 5.24.0 with compressed-tensors 0.20.1: in int-quantized and pack-quantized, all experts are looked
# for as packed weights. The plain ones are dropped, and from_pretrained raises RuntimeError, also with dequantize=True.
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
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

torch.manual_seed(0)
sizes = dict(vocab_size=96, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_experts=4)
heads = dict(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=32)
model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, num_experts_per_tok=2, tie_word_embeddings=False))
result = {}
for kind, form, dtype, largest in (
    ("int", "int-quantized", torch.int8, 127),
    ("float", "float-quantized", torch.float8_e4m3fn, 448),
):
    folder = Path(form)
    model.bfloat16().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    experts = {name: tensor for name, tensor in tensors.items() if ".experts." in name}
    for name in [name for name in tensors if "self_attn" in name and name.endswith("_proj.weight")]:
        scale = (tensors[name].abs().amax(1, keepdim=True) / largest).bfloat16()
        codes = (tensors[name] / scale).clamp(-largest, largest)
        tensors |= {name: (codes.round() if kind == "int" else codes).to(dtype), name + "_scale": scale}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    numbers = {"num_bits": 8, "type": kind, "symmetric": True}
    group = {
        "targets": ["re:.*self_attn.*_proj"],
        "weights": numbers | {"strategy": "channel", "dynamic": False},
        "input_activations": numbers | {"strategy": "token", "dynamic": True},
    }
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mlp.*"], "config_groups": {"group_0": group},
    }
    (folder / "config.json").write_text(json.dumps(config))
    for settings in (None, CompressedTensorsConfig(dequantize=True)):
        options = {} if settings is None else {"quantization_config": settings}
        try:
            read = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options).state_dict()
            down = [experts[f"model.layers.0.mlp.experts.{i}.down_proj.weight"] for i in range(4)]
            found = torch.equal(read["model.layers.0.mlp.experts.down_proj"], torch.stack(down))
            result[form, settings is not None] = "the experts that are stored" if found else "other experts"
        except RuntimeError as error:
            result[form, settings is not None] = str(error)
for (form, dequantized), outcome in result.items():
    print(f"{form}, {'dequantize=True' if dequantized else 'its own settings'}: {outcome}")
    expected = "We encountered some issues" if form == "int-quantized" else "the experts that are stored"
    assert outcome.startswith(expected), outcome
PROBE
env/bin/python probe.py 2>/dev/null
