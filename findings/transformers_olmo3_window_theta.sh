#!/usr/bin/env bash
# transformers gives OLMo 3's layers with a sliding window another rotary base than config.json says.
#
# Expected: `rope_theta` in an OLMo 3 folder of the older form, which has one for all layers, is the base of all of them,
# as it is in OLMo 2. Only `rope_scaling` is for the layers without a window.
# Seen, transformers 5.24.0: it is that of the layers without a window. The others keep the default, 500000, whatever
# the folder says; the logits are those of a folder that says so for each kind.
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
from transformers import Olmo2Config, Olmo3Config, Olmo3ForCausalLM

FULL, SLIDING = "full_attention", "sliding_attention"
sizes = dict(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=2)
sizes |= dict(sliding_window=8, pad_token_id=0, eos_token_id=1, max_position_embeddings=128)


def logits(**settings):
    torch.manual_seed(0)
    model = Olmo3ForCausalLM(Olmo3Config(**sizes, **settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 1.0)
        return model(torch.arange(40)[None]).logits


config = Olmo3Config(**sizes, rope_theta=10000.0)
bases = {kind: config.rope_parameters[kind]["rope_theta"] for kind in (FULL, SLIDING)}
print("OLMo 2:", Olmo2Config(**sizes, rope_theta=10000.0).rope_parameters["rope_theta"])
print("OLMo 3:", bases)
assert bases == {FULL: 10000.0, SLIDING: 500000.0}


def tables(full, sliding):
    return {FULL: {"rope_type": "default", "rope_theta": full}, SLIDING: {"rope_type": "default", "rope_theta": sliding}}


one = logits(rope_theta=10000.0)
assert torch.equal(one, logits(rope_parameters=tables(10000.0, 500000.0)))
apart = (one - logits(rope_parameters=tables(10000.0, 10000.0))).abs().max().item()
print(f"largest difference of logits from those with 10000 in all layers: {apart:.2f}")
assert apart > 0.5
PROBE
env/bin/python probe.py 2>/dev/null
