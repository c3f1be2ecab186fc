"""The commands on a real GPU: `generate`, `parity` and `doctor`. Run: make gpu-test PYTHON=python3."""

import json
import subprocess
import sys

import pytest
import torch

from lockstep.data import ByteTokenizer
from lockstep.model import build_model, preset, save_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _run(*arguments):
    pytest.importorskip("tyro")
    return subprocess.run([sys.executable, "-m", "lockstep", *arguments], capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("device", [[], ["--device", "cuda"], ["--device", "cpu"]])
def test_generate_and_parity_run_where_they_are_told(tmp_path, device):
    tokenizer, folder = ByteTokenizer(), str(tmp_path)
    shape = preset("qwen3:micro", tokenizer.vocab_size, (tokenizer.eos_id,))
    save_model(build_model(shape, "bfloat16", seed=1), folder)
    tokenizer.save(tmp_path)
    where = "cpu (" if "cpu" in device else "cuda:0 ("
    result = _run("generate", "--model", folder, "--prompt", "ab", "--max-tokens", "6", "--seed", "1", *device)
    assert result.returncode == 0 and result.stdout.startswith("ab") and where in result.stderr, result.stderr
    result = _run("parity", "--model", folder, "--tokens", "200", *device)
    assert result.returncode == 0 and "Bitwise identical : True" in result.stdout, result.stderr
    assert ("cuda sm_" in result.stdout) == ("cpu" not in device)


def test_the_doctor_knows_the_gpu():
    result = _run("doctor", "--json")
    findings = json.loads(result.stdout)["findings"]
    assert findings["gpu/cuda:0"]["value"]["name"] == torch.cuda.get_device_name(0), result.stderr
