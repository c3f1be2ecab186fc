"""Trainer against generator as on other machines than this one: lower instruction sets, ours and the libraries'."""

import json
import os
import subprocess
import sys

import pytest

from lockstep.ops.native.instruction_sets import supported
from tests.rl.test_digest import ROOT

# Lone prompts are what a library's one-row product got wrong; the mixed load has everything else.
PROGRAM = """
import json, sys
import torch
from lockstep import Engine, EngineConfig, SamplingParams, build_model, ops, score
from lockstep.model import ModelConfig
from lockstep.rl.scoring.parity_check import check_parity

shape = ModelConfig(
    family="qwen3", vocab_size=258, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    intermediate_size=160, qk_norm=True,
)
different = {}
for dtype in ("float32", "bfloat16"):
    model = build_model(shape, dtype=dtype, seed=1)
    parity, _ = check_parity(model, tokens=100)
    engine = Engine(model, EngineConfig())
    wrong = parity.tokens_different
    for length in (1, 5, 17):
        prompt = list(range(3, 3 + length))
        completion = engine.generate([prompt], SamplingParams(max_tokens=12, temperature=0.85, seed=length))[0][0]
        trainer = score(model, [prompt + completion.token_ids], 0.85)[0][length - 1 :]
        wrong += int((torch.tensor(completion.logprobs) != trainer).sum())
    different[dtype] = wrong
print(json.dumps([ops.instruction_set(), different]))
"""
LIBRARIES = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "default"}
NAMES = [each.name for each in supported()]


QUICK = ("avx2",)
"""The runs of `test_digest`, which compare every token too, are of this processor's own and of the lowest."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name not in QUICK else ()) for name in NAMES]
)
def test_trainer_and_generator_agree_on_every_instruction_set(name):
    environment = {**os.environ, **LIBRARIES, "LOCKSTEP_ISA": name, "OMP_NUM_THREADS": "2"}
    result = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    assert json.loads(result.stdout.splitlines()[-1]) == [name, {"float32": 0, "bfloat16": 0}]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES[1:])
def test_engine_and_parity_hold_on_every_lower_instruction_set(name, tmp_path):
    """Their whole files, as on a machine that has no more."""
    files = ["tests/generate/test_engine.py", "tests/rl/scoring/test_parity.py", "tests/ops/test_linear.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", str(tmp_path), *files]
    # It is no worker of the tests that run here, which have one thread each.
    own = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment = own | LIBRARIES | {"LOCKSTEP_ISA": name, "OMP_NUM_THREADS": "2"}
    ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-3000:]
