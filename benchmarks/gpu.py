"""One NVIDIA GPU, measured: the reference recipe, decoding, prefill and training, and what invariance costs.

Run: make gpu-check PYTHON=python3, or PYTHONPATH=. python benchmarks/gpu.py [--parts decode kernels]. Some 8 minutes.
Each part is a process of its own with a time budget: one that fails or runs out of time leaves the others' numbers.
Results are printed as they come, beside those expected on an H100, and written to benchmarks/results/gpu-DATE.json.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import threading
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]

PARTS: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "kernels": ("gpu_kernels", "costs", {}, 80),
    "experts": ("gpu_kernels", "grouped", {}, 40),
    "precision": ("gpu_precision", "costs", {}, 55),
    "decode": ("gpu_model", "decode", {}, 80),
    "throughput": ("gpu_model", "throughput", {}, 60),
    "train-1b": ("gpu_training", "train", {"size": "1b", "compiled": False}, 25),
    "train-1b-compiled": ("gpu_training", "train", {"size": "1b", "compiled": True}, 45),
    "recipe-eager-graphs": ("gpu_model", "recipe", {"compiled": False, "graphs": "full"}, 40),
    "recipe-compiled-graphs": ("gpu_model", "recipe", {"compiled": True, "graphs": "full"}, 55),
    "transformers": ("gpu_peers", "measured", {}, 40),
    "train-8b": ("gpu_training", "train", {"size": "8b", "compiled": False}, 35),
    "train-8b-compiled": ("gpu_training", "train", {"size": "8b", "compiled": True}, 50),
    "recipe-eager": ("gpu_model", "recipe", {"compiled": False, "graphs": "none"}, 45),
    "recipe-compiled": ("gpu_model", "recipe", {"compiled": True, "graphs": "none"}, 55),
}
"""Module, function and arguments that measure each part, and the seconds that it may take."""
FIRST = [*PARTS][:9]
"""Those measured by default, in 480 s at most."""
EXPECTED = {
    "training 0.6B direct, 8 x 1024": 54_690,
    "training 0.6B eager, 8 x 1024": 78_000,
    "training 0.6B compiled, 8 x 1024": 80_000,
    "training Llama 3 1B eager, 1 x 8192: MFU": 0.45,
    "training Llama 3 1B compiled, 1 x 8192: MFU": 0.46,
    "whole recipe, imports apart": 8.5,
    "bfloat16 / int8, decode, gate and up of 8B, 1 rows": 1.5,
    "bfloat16 / int4, decode, gate and up of 8B, 1 rows": 2.4,
    "bfloat16 / int4_128, decode, gate and up of 8B, 1 rows": 2.5,
    "bfloat16 / float8, training, gate and up of 8B, 8192 rows": 1.4,
    "bfloat16 / float8_rowwise, training, gate and up of 8B, 8192 rows": 1.4,
}
"""On an H100: the first as measured before, the others computed from launches and kernels' times (NOTES.md), those in
low precision from the bytes that they read and write, and the peak of the tensor cores."""
RESULTS = Path(__file__).parent / "results"


def measure(part: str) -> None:
    """The child's side: one JSON object a line."""
    module, function, arguments, _ = PARTS[part]
    for row in getattr(importlib.import_module(module), function)(**arguments):
        print(json.dumps({"part": part, **row}), flush=True)


def run(part: str) -> list[Row]:
    """The parent's side: the rows that came before the part's end, its failure or the end of its time."""
    budget = PARTS[part][-1]
    print(f"\n{part} (at most {budget} s)", flush=True)
    began = time.perf_counter()
    command = [sys.executable, __file__, "--measure", part]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.extend(process.stderr or ()), daemon=True)
    reader.start()
    clock = threading.Timer(budget, process.kill)
    clock.start()
    rows = []
    for line in process.stdout:
        if line.startswith("{"):
            rows.append(json.loads(line))
            print(described(rows[-1]), flush=True)
    code = process.wait()
    clock.cancel()
    reader.join(5)
    seconds = time.perf_counter() - began
    if code:
        reason = f"stopped after {budget} s" if seconds >= budget else "".join(errors)[-3000:] or f"exit code {code}"
        rows.append({"part": part, "name": "error", "error": reason})
        print(described(rows[-1]), flush=True)
    rows.append({"part": part, "name": "process", "value": round(seconds, 1), "unit": "s, start to end"})
    print(described(rows[-1]), flush=True)
    return rows


def described(row: Row) -> str:
    if "error" in row:
        return f"  {row['name']:58} FAILED: {str(row['error']).strip().splitlines()[-1][:150]}"
    goal = f"goal {row['goal']}: {'met' if row['met'] else 'MISSED'}" if "goal" in row else ""
    expected = f"expected {EXPECTED[row['name']]}" if row["name"] in EXPECTED else ""
    return f"  {row['name']:58} {row['value']!s:>10} {row['unit']:18} {goal} {expected}".rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=FIRST)
    parser.add_argument("--measure", choices=list(PARTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU: skipped")
        return
    if options.measure:
        try:
            measure(options.measure)
        except Exception:
            traceback.print_exc()
            sys.exit(1)
        return
    import triton

    now = datetime.now(UTC)
    report: dict[str, Any] = {
        "date": now.isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "rows": [],
    }
    print(f"{report['gpu']}, torch {report['torch']}, triton {report['triton']}")
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"gpu-{now:%Y%m%d-%H%M%S}.json"
    for part in options.parts:
        report["rows"] += run(part)
        path.write_text(json.dumps(report, indent=1) + "\n")
    missed = [f"{r['part']}: {r['name']}" for r in report["rows"] if not r.get("met", True) or "error" in r]
    print(f"\nwritten to {path}" + "".join(f"\n  missed or failed: {m}" for m in missed))


if __name__ == "__main__":
    main()
