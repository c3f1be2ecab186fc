#!/usr/bin/env bash
# transformers dequantizes fp8 folders with a block size that it infers from the grid of scales: the last, incomplete block
# of rows shifts all others.
#
# Expected: weight_block_size [128, 128] of the settings: of 192 rows the first 128 have the first scale, as in the code
# that DeepSeek-V3 was published with, whose kv_a_proj_with_mqa has 576 rows and 5 rows of scales.
# Seen, transformers 5.24.0: 192 rows / 2 scales are blocks of 96 rows, so rows 96 to 127 get the second scale, without a
# warning; 576 rows / 5 scales do not divide, which raises ValueError.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv env
env/bin/pip install --quiet "torch>=2.13.0,<2.13.1" numpy "transformers==5.24.0" 2>/dev/null
env/bin/pip freeze 2>/dev/null | grep -E "^(torch|transformers|compressed-tensors|gguf)=="
export HF_HUB_OFFLINE=1
cat > probe.py <<'PROBE'
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

dequantize = Fp8Dequantize(None)._dequantize_one
weight = torch.ones(192, 128).to(torch.float8_e4m3fn)
rows = dequantize(weight, torch.tensor([[1.0], [2.0]]), output_dtype=torch.float32)[:, 0]
first = int((rows == 1).sum())
print("192 rows in blocks of 128: rows with the first scale:", first)
assert first == 96, first
try:
    dequantize(torch.ones(576, 256).to(torch.float8_e4m3fn), torch.ones(5, 2))
except ValueError as error:
    print("576 rows:", error)
else:
    raise SystemExit("576 rows in 5 blocks are dequantized now")
PROBE
env/bin/python probe.py 2>/dev/null
