"""Same seed, same run: one digest in fresh processes, whatever the threads and instruction sets, ours or a library's.

`python -m tests.rl.test_digest FOLDER` prints the digests of a small pretraining and a small reinforcement run.
"""

import hashlib
import json
import os
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lockstep.ops.native.instruction_sets import supported
from lockstep.rl.environments.digit_sum import DigitSum

ROOT = Path(__file__).parents[2]
EXPECTED = {
    "pretrain": "89431d3be430b2b06e99edba222f6e7894c71802903d96a3a16e9d0c1970c1b1",
    "narrow heads": "7a6234fe4a70d47119934b0d0d2d73acc51eb918b2ccf5319771ed9b3be98afd",
    "rl": "48848300ca74f64e16a2814539f2519e67bc7920191a68cf6a1100c11060e3c3",
    "rollouts": "c87cbaa6912ada0efdcd406491888bb82b7f0da84fe79c43bafedca4dda165cf",
}
"""Of every processor, compiler and number of threads. What changes a bit of a float32 run changes it."""

SETS = [each.name for each in supported() if not each.emulated]
VARIATIONS = [
    # Plain vectors of torch's own operators too: whatever of a library depends on the width of a vector shows here.
    {"OMP_NUM_THREADS": "1", "LOCKSTEP_ISA": SETS[-1], "ATEN_CPU_CAPABILITY": "default"},
    {"OMP_NUM_THREADS": "3", "ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    {"OMP_NUM_THREADS": "2", "LOCKSTEP_ISA": SETS[max(len(SETS) - 2, 0)]},
]


class Digits(DigitSum):
    """Sums of digits, where any digit earns something: a model that can add nothing yet has something to learn."""

    def reward(self, example, completion):
        digits = sum(c.isdigit() for c in completion) / max(1, len(completion))
        return super().reward(example, completion)["correct"] + digits


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of both runs' losses and gradient norms, and of the rollouts' tokens and log-probabilities."""
    from lockstep.config import EngineConfig, PretrainConfig, RLConfig, TrainConfig
    from lockstep.data import ByteTokenizer
    from lockstep.model import ModelConfig, build_model, save_model
    from lockstep.observe import report
    from lockstep.rl.environments.digit_sum import pretraining_text
    from lockstep.rl.reinforce import reinforce
    from lockstep.train.pretrain import pretrain

    report.curves_svg = lambda *arguments: []  # pictures, a fifth of the time, have no part in the digests
    folder.mkdir(parents=True, exist_ok=True)
    text = list(pretraining_text(400, error_rate=0.45, seed=0))
    for name, head_dim, steps in (("pretrain", 16, 10), ("narrow heads", 40, 3)):
        shape = ModelConfig(
            family="qwen3", vocab_size=258, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=head_dim,
            intermediate_size=160, qk_norm="head",
        )  # fmt: skip
        fresh = folder / f"{name}, fresh"
        save_model(build_model(shape, dtype="float32", seed=0), fresh)
        ByteTokenizer().save(fresh)
        first = PretrainConfig(
            output=str(folder / name), model=str(fresh), steps=steps, tokens_per_step=1024,
            sequence_length=128, dtype="float32", train=TrainConfig(learning_rate=1e-2, warmup_steps=2),
        )  # fmt: skip
        pretrain(first, text)
    second = RLConfig(
        output=str(folder / "rl"), model=str(folder / "pretrain" / "checkpoints" / "step_00000010"),
        environment=f"{__file__}:Digits", steps=8, prompts_per_step=4, samples_per_prompt=4, max_new_tokens=8,
        temperature=0.85, top_p=0.95, kl_coefficient=0.05, updates_per_batch=2, validation_examples=8, dtype="float32",
        train=TrainConfig(learning_rate=3e-3, warmup_steps=0, tokens_per_microbatch=128),
        engine=EngineConfig(max_tokens_per_step=64, max_sequences=8, cache_tokens=1024),
    )  # fmt: skip
    reinforce(second)
    return {
        "pretrain": _of_metrics(folder / "pretrain", ("loss", "grad_norm")),
        "narrow heads": _of_metrics(folder / "narrow heads", ("loss", "grad_norm")),
        "rl": _of_metrics(folder / "rl", ("loss", "grad_norm", "policy/kl", "policy/entropy", "reward/mean")),
        "rollouts": _of_rollouts(folder / "rl"),
    }


def digests_of_a_process(folder: Path, **environment: str) -> dict[str, str]:
    """`digests` in a fresh process with these variables set."""
    command = [sys.executable, "-m", "tests.rl.test_digest", str(folder)]
    result = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


def _of_metrics(run: Path, names: tuple[str, ...]) -> str:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return _sha256([float(line[name]) for line in lines for name in names if name in line])


def _of_rollouts(run: Path) -> str:
    values: list[float] = []
    for path in sorted((run / "rollouts").iterdir()):
        for line in path.read_text().splitlines():
            rollout = json.loads(line)
            values += [*rollout["token_ids"], *rollout["log_probs"], rollout["advantage"]]
    return _sha256(values)


def _sha256(values: list[float]) -> str:
    assert len(values) > 0
    return hashlib.sha256(struct.pack(f"<{len(values)}d", *values)).hexdigest()


def test_processes_beside_each_other_with_other_threads_and_instruction_sets_are_one_run(tmp_path):
    folders = [tmp_path / "0", tmp_path / "1"]  # of the lowest instruction set, and of this processor's
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(lambda folder, env: digests_of_a_process(folder, **env), folders, VARIATIONS))
    assert results == [EXPECTED] * 2


@pytest.mark.slow
def test_twelve_processes_beside_other_work_are_one_run(tmp_path):
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        for index in range(12):
            variation = VARIATIONS[index % len(VARIATIONS)] if index % 4 < 2 else {}
            environment = variation | {"OMP_NUM_THREADS": str(1 + index % 4)}
            digest = digests_of_a_process(tmp_path / str(index), **environment)
            assert digest == EXPECTED, f"process {index}"
    finally:
        neighbour.kill()
        neighbour.wait()


LIBRARIES = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "default"}
LOWER = [each.name for each in supported()][1:]
PARITY = "tests/rl/scoring/test_parity.py"


def run_tests_with(name, folder, *arguments):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", str(folder), *arguments]
    # It is no worker of the tests that run here, which have one thread each.
    own = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment = own | LIBRARIES | {"LOCKSTEP_ISA": name, "OMP_NUM_THREADS": "2"}
    ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-3000:]


def test_trainer_and_generator_agree_with_narrower_vectors(tmp_path):
    """The runs with digests, which compare every token too, are of this processor's own and of the lowest set."""
    if "avx2" not in LOWER:
        pytest.skip("this processor has nothing above AVX2")
    run_tests_with("avx2", tmp_path, "-m", "slow or not slow", "-k", "agree", PARITY)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOWER)
def test_engine_and_parity_hold_on_every_lower_instruction_set(name, tmp_path):
    """Their whole files but for slow tests, as on a machine that has no more."""
    files = "tests/generate/test_engine.py", PARITY, "tests/ops/test_linear.py"
    run_tests_with(name, tmp_path, *files)


if __name__ == "__main__":
    print(json.dumps(digests(Path(sys.argv[1]))))
