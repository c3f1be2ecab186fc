"""The demo, shortened: what it leaves behind, and what it needs."""

import json
import subprocess
import sys

import pytest

SHORT_DEMO = """
import sys
from pathlib import Path
from lockstep.recipes import demo

recipe = demo.digit_sum
def short():
    second = recipe()
    second.steps, second.validation_every = 3, 0
    return second

demo.digit_sum, demo.PRETRAIN_STEPS = short, 15
demo.run_demo(demo.DemoConfig(output=sys.argv[1]))
# Not getrusage: its peak is inherited from the process that started this one.
status = Path("/proc/self/status").read_text()
print("peak MiB", int(status.partition("VmHWM:")[2].split()[0]) // 1024)
"""
PEAK = 800
"""MiB. The libraries take 400 of them; the demo is to stay below 1.2 GB however long it runs."""


@pytest.mark.slow
def test_a_demo_stays_small_and_reports_both_stages(tmp_path):
    arguments = [sys.executable, "-c", SHORT_DEMO, str(tmp_path / "run")]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    peak = int(result.stdout.split()[-1])
    assert peak < PEAK, peak
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["parity_tokens_different"] == 0 < summary["parity_tokens_checked"]
    assert summary["seconds"].keys() == {"pretrain", "rl"}
    assert summary["tokens"].keys() == {"pretrained", "generated", "trained"}
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Loss in pretraining" in page and "The same prompts, before and after" in page and len(page) < 5e6
