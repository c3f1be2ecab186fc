#!/usr/bin/env bash
# transformers reads neither Llama 3's scaling of the rotary frequencies nor YaRN from a GGUF file, nor Qwen3's head size.
#
# Expected: llama.cpp stores Llama 3.1's scaling as the tensor rope_freqs.weight, YaRN as rope.scaling.*, and the head size
# as attention.key_length; a model loaded from the file has them all.
# Seen, transformers 5.24.0: the tensor and the YaRN keys are dropped without a warning (rope type default), so long texts
# have other positions than in llama.cpp; qwen3.attention.key_length is ignored (128 instead of 64).
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv env
env/bin/pip install --quiet "torch>=2.13.0,<2.13.1" numpy "transformers==5.24.0" "gguf==0.19.0" 2>/dev/null
env/bin/pip freeze 2>/dev/null | grep -E "^(torch|transformers|compressed-tensors|gguf)=="
export HF_HUB_OFFLINE=1
cat > probe.py <<'PROBE'
import gguf
import numpy as np
from transformers import AutoConfig


def write(path: str, architecture: str) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in {
        "vocab_size": 32, "context_length": 131072, "embedding_length": 64, "block_count": 1, "feed_forward_length": 64,
        "head_count": 2, "head_count_kv": 2, "layer_norm_rms_eps": 1e-5, "rope_freq_base": 500000.0, "key_length": 64,
        "value_length": 64,
    }.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_tensor("token_embd.weight", np.zeros((32, 64), np.float32))
    if architecture == "llama":
        writer.add_rope_dimension_count(64)
        writer.add_tensor("rope_freqs.weight", np.array([1.0] * 16 + [8.0] * 16, np.float32))
    else:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32768)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()


write("llama.gguf", "llama")
write("qwen3.gguf", "qwen3")
llama, qwen3 = (AutoConfig.from_pretrained(".", gguf_file=f"{name}.gguf") for name in ("llama", "qwen3"))
print("Llama:", llama.rope_parameters, "Qwen3:", qwen3.rope_parameters, "head_dim", qwen3.head_dim)
assert llama.rope_parameters["rope_type"] == "default" and qwen3.rope_parameters["rope_type"] == "default"
assert qwen3.head_dim == 128
PROBE
env/bin/python probe.py 2>/dev/null
