#!/usr/bin/env bash
# torchao's MX blocks of tiny numbers come back halved or as zeros, and an infinity in a block makes its neighbours zero.
#
# Expected: a block whose scale is the smallest of e8m0, 2^-127, is divided by it; a block with an infinity is NaN, which
# e8m0 has a code for, as a block with a NaN is.
# Seen, torchao 0.18.0: with floor, such a block is divided by 2^-126 but stored with 2^-127, so its numbers come back
# halved; with rceil it is not divided at all, and comes back as zeros. An infinity gives the block a finite scale and
# finite codes: it comes back as a large number, and the others of its block as zeros.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv env
env/bin/pip install --quiet "torch>=2.13.0,<2.13.1" torchao==0.18.0 numpy 2>/dev/null
env/bin/pip freeze 2>/dev/null | grep -E "^torch(ao)?=="
cat > probe.py <<'PROBE'
import torch
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx


def back(x: torch.Tensor, mode: ScaleCalculationMode) -> torch.Tensor:
    scale, codes = to_mx(x, torch.float8_e4m3fn, 32, mode)
    return codes.double() * torch.exp2(scale.view(torch.uint8).double() - 127)


for mode, expected in ((ScaleCalculationMode.FLOOR, 0.5), (ScaleCalculationMode.RCEIL, 0.0)):
    tiny = back(torch.full((1, 32), 2.0**-120), mode)[0, 0].item() / 2.0**-120
    x = torch.ones(1, 32)
    x[0, 0] = torch.inf
    read = back(x, mode)
    print(mode.name, "tiny numbers come back times", tiny, "beside an infinity, 1 comes back as", read[0, 1].item())
    assert tiny == expected and read[0, 1] == 0 and read.isfinite().all(), (tiny, read)
    x[0, 0] = torch.nan
    assert to_mx(x, torch.float8_e4m3fn, 32, mode)[0].view(torch.uint8).item() == 255
PROBE
env/bin/python probe.py 2>/dev/null
