#!/usr/bin/env bash
# A float32 layer converted to rowwise float8 by torchao gives outputs with the precision of bfloat16.
#
# Expected: a float32 module whose products are float8 returns float32 numbers: sums of float8 products need more bits
# than bfloat16 has, and the same layer with one scale per tensor, or with emulate=True, returns them.
# Seen, torchao 0.18.0 on a CPU: the rowwise product is computed with bfloat16 as the output's dtype, and cast to float32.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv env
env/bin/pip install --quiet "torch>=2.13.0,<2.13.1" torchao==0.18.0 numpy 2>/dev/null
env/bin/pip freeze 2>/dev/null | grep -E "^torch(ao)?=="
cat > probe.py <<'PROBE'
import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training


def rounds(recipe: str, emulate: bool = False) -> bool:
    """Whether every output is a bfloat16 number."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False))
    config = Float8LinearConfig.from_recipe_name(recipe)
    if emulate:
        object.__setattr__(config, "emulate", True)
    out = convert_to_float8_training(model, config=config)(torch.randn(32, 64))
    assert out.dtype == torch.float32
    return torch.equal(out, out.bfloat16().float())


found = {"rowwise": rounds("rowwise"), "rowwise, emulated": rounds("rowwise", True), "tensorwise": rounds("tensorwise")}
print(found)
assert found == {"rowwise": True, "rowwise, emulated": False, "tensorwise": False}
PROBE
env/bin/python probe.py 2>/dev/null
