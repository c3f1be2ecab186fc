#!/usr/bin/env bash
# transformers ignores `truncate` of YaRN in configurations with rotary parameters for each kind of layer.
#
# Expected: `truncate: false` in the parameters of a kind of layer leaves the ends of the interpolated frequencies where
# they are, between two pairs of features, as it does in a configuration with one set of parameters.
# Seen, transformers 5.24.0: the frequencies of OLMo 3 are the same for true and false. It is looked up beside
# the kinds, where a configuration has only the kinds.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv env
env/bin/pip install --quiet "torch>=2.13.0,<2.13.1" numpy "transformers==5.24.0" 2>/dev/null
env/bin/pip freeze 2>/dev/null | grep -E "^(torch|transformers)=="
export HF_HUB_OFFLINE=1
cat > probe.py <<'PROBE'
import torch
from transformers import Olmo3Config, Qwen3Config
from transformers.models.olmo3.modeling_olmo3 import Olmo3RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

FULL, SLIDING = "full_attention", "sliding_attention"
sizes = dict(hidden_size=512, num_attention_heads=4, num_hidden_layers=4, head_dim=128, max_position_embeddings=32768)


def yarn(truncate):
    return {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 4096,
        "truncate": truncate,
    }


def by_kind(truncate):
    return {FULL: yarn(truncate), SLIDING: {"rope_type": "default", "rope_theta": 10000.0}}


for name, config, embedding, parameters, buffer in (
    ("one set (Qwen3)", Qwen3Config, Qwen3RotaryEmbedding, yarn, "inv_freq"),
    ("for each kind (OLMo 3)", Olmo3Config, Olmo3RotaryEmbedding, by_kind, f"{FULL}_inv_freq"),
):
    found = [getattr(embedding(config(**sizes, rope_parameters=parameters(t))), buffer) for t in (True, False)]
    equal = torch.equal(*found)
    print(f"{name}: frequencies {'are the same for true and false' if equal else 'differ'}")
    assert equal == ("kind" in name)
PROBE
env/bin/python probe.py 2>/dev/null
