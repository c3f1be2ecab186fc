"""The commands on a real GPU: `rl`, `generate` and `parity`. Run: make gpu-test PYTHON=python3."""

import json
import subprocess
import sys
import tomllib

import pytest
import torch

from lockstep.config import RLConfig, TrainConfig
from lockstep.data import ByteTokenizer
from lockstep.model import build_model, preset, save_model
from lockstep.rl.reinforce import reinforce

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _folder(path, dtype):
    tokenizer = ByteTokenizer()
    save_model(build_model(preset("qwen3:micro", tokenizer.vocab_size, (tokenizer.eos_id,)), dtype, seed=1), path)
    tokenizer.save(path)
    return path


def _run(*arguments):
    pytest.importorskip("tyro")
    return subprocess.run([sys.executable, "-m", "lockstep", *arguments], capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("device", ["", "cuda:0"])
def test_rl_trains_and_samples_on_the_gpu_with_every_bit_compared(tmp_path, capsys, dtype, device):
    pytest.importorskip("matplotlib")
    config = RLConfig(
        output=str(tmp_path / "run"), model=str(_folder(tmp_path / "model", dtype)), steps=2, prompts_per_step=4,
        samples_per_prompt=4, max_new_tokens=8, updates_per_batch=2, kl_coefficient=0.1, validation_examples=4,
        temperature=0.85, device=device, train=TrainConfig(learning_rate=1e-3, warmup_steps=0),
    )  # fmt: skip
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    folder = reinforce(config)
    assert torch.cuda.max_memory_allocated() > before, "nothing was computed on the GPU"
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][1:]
    assert [m["step"] for m in steps] == [1, 2] and all(m["parity/tokens_checked"] > 0 for m in steps)
    assert all(m["parity/tokens_different"] == 0 and m["policy/ratio_first_max"] == 1.0 for m in steps)
    assert tomllib.loads((folder / "config.toml").read_text())["dtype"] == dtype
    state = json.loads((folder / "checkpoints" / "step_00000002" / "state.json").read_text())
    major, minor = torch.cuda.get_device_capability()
    assert state["arithmetic"] == f"cuda sm_{major}{minor}"
    said = capsys.readouterr().err
    assert "| cuda:0 (" in said and f"{dtype}, cuda sm_" in said


@pytest.mark.parametrize("device", [[], ["--device", "cuda"], ["--device", "cpu"]])
def test_generate_and_parity_run_where_they_are_told(tmp_path, device):
    folder = str(_folder(tmp_path / "model", "bfloat16"))
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
