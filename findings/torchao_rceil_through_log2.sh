#!/usr/bin/env bash
# torchao's rceil scale of an MX block is one too small just above 448 times a power of two, in float32.
#
# Expected: rceil is the smallest power of two with which no number of the block exceeds 448, so a largest magnitude one
# step above 448 * 2^e has the scale 2^(e + 1).
# Seen, torchao 0.18.0: the exponent is the ceiling of a float32 log2, which rounds 1 + 2^-23 to 0 unless the power is
# near 1: most exponents get the scale 2^e, and the largest number of the block saturates. The rowwise float8 recipe,
# which rounds its scale down to a power of two, errs in the same way. In bfloat16, whose steps are larger, neither does.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv env
env/bin/pip install --quiet "torch>=2.13.0,<2.13.1" torchao==0.18.0 numpy 2>/dev/null
env/bin/pip freeze 2>/dev/null | grep -E "^torch(ao)?=="
cat > probe.py <<'PROBE'
import torch
from torchao.float8.float8_utils import ScalingGranularity, tensor_to_scale
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx


def counted(dtype: torch.dtype) -> tuple[int, int]:
    """Exponents of which the block's and the row's scale is too small."""
    blocks = rows = 0
    for exponent in range(-100, 100):
        x = torch.zeros(1, 32, dtype=dtype)
        bits = torch.tensor(448.0 * 2.0**exponent, dtype=dtype).view(torch.int32 if dtype == torch.float32 else torch.int16)
        x[0, 0] = (bits + 1).view(dtype)
        scale = to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)[0].view(torch.uint8).item()
        blocks += scale - 127 < exponent + 1
        if exponent > -30:
            row = tensor_to_scale(
                x, torch.float8_e4m3fn, scaling_granularity=ScalingGranularity.AXISWISE, axiswise_dim=-1,
                round_scales_to_power_of_2=True,
            )
            rows += (x[0, 0].double() * row.double()).item() > 448
    return blocks, rows


found = {str(dtype): counted(dtype) for dtype in (torch.float32, torch.bfloat16)}
print(found)
assert found["torch.float32"][0] > 150 and found["torch.float32"][1] > 50, found
assert found["torch.bfloat16"] == (0, 0), found
PROBE
env/bin/python probe.py 2>/dev/null
