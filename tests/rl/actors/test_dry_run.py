"""A dry run of reinforcement against real ones: the peak of each stage of a step, and the bytes of a weight sync."""

import dataclasses
import os
import subprocess
import sys

import pytest

from lockstep.config import EngineConfig, ParallelConfig, RewardConfig, RLConfig, TrainConfig
from lockstep.errors import UserError
from lockstep.parallel import close_world, open_world
from lockstep.rl.actors.boxes import volume
from lockstep.rl.actors.models import policy_model, sampling_model
from lockstep.rl.actors.weights import WeightTransfer
from lockstep.rl.dry_run import STAGES, dry_run
from tests.parallel.launch import launch

TASK = """
import lockstep.rl as rl

class Letters(rl.Environment):
    def examples(self, split):
        for letter in "abcdefgh":
            yield rl.Example(prompt=letter, answer="")
    def reward(self, example, completion):
        return {"length": float(len(completion) % 3)}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that never ends a completion, so that micro-batches are full; and a task with prompts of one token."""
    from lockstep.data import named_tokenizer
    from lockstep.model import build_model, preset, save_model

    folder = tmp_path_factory.mktemp("model")
    shape = dataclasses.replace(preset("llama3:tiny", 512), num_layers=3)
    save_model(build_model(shape, dtype="bfloat16", seed=1), folder)
    named_tokenizer("byte", ()).save(folder)
    (folder / "task.py").write_text(TASK)
    return folder


def config_of(folder, output, parallel, **changes):
    settings = dict(
        output=str(output), model=str(folder), environment=f"{folder}/task.py:Letters", steps=2, prompts_per_step=4,
        samples_per_prompt=8, max_new_tokens=8, validation_examples=2, parallel=parallel, dtype="bfloat16",
        train=TrainConfig(tokens_per_microbatch=64), rewards=RewardConfig(isolate="never"), device="cpu",
        engine=EngineConfig(max_tokens_per_step=32, max_sequences=32, cache_tokens=1024, prefix_cache=False),
    )  # fmt: skip
    return RLConfig(**(settings | changes))


def bytes_of_rank_0(transfer):
    """What it sends to other ranks, and what it receives from them."""
    pieces = [p for of_tensor in transfer.pieces.values() for p in of_tensor if p.source != p.target]
    size = transfer.model.dtype.itemsize
    return [sum(size * volume(p.box) for p in pieces if getattr(p, end) == 0) for end in ("source", "target")]


def measured(config):
    """The peak of all tensors in each stage of the last step, and what rank 0 sends and receives in a sync."""
    from lockstep.rl import controller
    from lockstep.rl.actors import generators
    from lockstep.rl.bookkeeping import Stopwatch
    from tests.parallel.memory import PeakMemory

    os.environ["LOCKSTEP_SHARED_MEMORY"] = "0"
    peaks, sizes = {}, []
    begin, transfer = Stopwatch.begin, generators.WeightTransfer

    def noted(self, lap, *arguments, **keywords):
        peaks[self._lap], peak.nbytes = peak.nbytes, 0  # of the lap that ends here
        begin(self, lap, *arguments, **keywords)

    def kept(*arguments):
        made = transfer(*arguments)
        sizes[:] = sizes or bytes_of_rank_0(made)  # the first is the generator's, the next the reference's
        return made

    with pytest.MonkeyPatch.context() as patched, PeakMemory() as peak:
        patched.setattr(Stopwatch, "begin", noted)
        patched.setattr(generators, "WeightTransfer", kept)
        controller.reinforce(config)
    return {stage: peaks[f"time/{name}"] for stage, name in zip(STAGES, ("train", "generate", "weight_sync"))}, sizes


def foreseen(config, ranks):
    found = dry_run(config, ranks, on_cpu=True)
    return found.peaks, found.transfer and [found.transfer.sent, found.transfer.received]


@pytest.mark.parametrize(
    ("ranks", "parallel", "changes"),
    [
        (1, ParallelConfig(), {}),
        (1, ParallelConfig(), dict(dtype="float32", kl_coefficient=0.1, entropy_coefficient=0.1)),
        (2, ParallelConfig(), dict(kl_coefficient=0.1, kl_reference="average")),
        (2, ParallelConfig(tensor=2), {}),
        (2, ParallelConfig(tensor=2), dict(dtype="float32")),  # generators read the trainers' own weights
    ],
)
def test_its_memory_is_the_peak_of_each_stage_of_a_real_step(folder, tmp_path, ranks, parallel, changes):
    config = config_of(folder, tmp_path / "run", parallel, **changes)
    (measured_peaks, sizes), *_ = launch(ranks, measured, config)
    ((peaks, transfer),) = launch(1, foreseen, config, ranks)
    assert (transfer or []) == sizes
    for stage in STAGES if transfer else STAGES[:2]:
        # CPUs sum gradients by an all-to-all, which takes more than a device's reduce-scatter; checksums a MiB or so.
        assert peaks[stage] == pytest.approx(measured_peaks[stage], rel=0.03), stage


def real_transfer(config):
    """Bytes that this rank sends and receives in a sync, by the plan of a real one."""
    world = open_world(config.parallel, "cpu")
    policy = policy_model(config, world)
    transfer = WeightTransfer(dict(policy.named_parameters()), sampling_model(config, world, policy), world)
    close_world(world)
    return bytes_of_rank_0(transfer)


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        (4, ParallelConfig(data_replicate=2)),
        (4, ParallelConfig(context=2, tensor=2)),
        (4, ParallelConfig(tensor=2, pipeline=2)),
        (3, ParallelConfig()),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_bytes_of_a_weight_sync_are_those_of_a_real_one(folder, tmp_path, ranks, parallel, dtype):
    config = config_of(folder, tmp_path / "run", parallel, dtype=dtype)
    sizes, *_ = launch(ranks, real_transfer, config)
    ((_, transfer),) = launch(1, foreseen, config, ranks)
    assert transfer == sizes and sizes[1] > 0


def test_the_command_prints_a_cluster_on_one_process():
    command = [sys.executable, "-m", "lockstep", "rl", "--model", "qwen3:micro", "--algorithm", "ppo"]
    command += ["--kl-coefficient", "0.1", "--parallel.tensor", "2", "--dry-run", "16"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "16 ranks (data_shard 8, tensor 2)" in printed and "0.001 B parameters in bfloat16" in printed
    for said in ("training    sampling weight sync", "generator's copy", "reference model", "the peak is"):
        assert said in printed
    assert "a weight sync sends" in printed
    with pytest.raises(UserError, match="parallel.*= 3 ranks, but 2 run"):
        dry_run(RLConfig(model="qwen3:micro", dtype="bfloat16", parallel=ParallelConfig(tensor=3)), 2, on_cpu=True)
