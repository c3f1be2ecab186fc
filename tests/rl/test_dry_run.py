"""A dry run of reinforcement against real ones: the peak of each stage of a step, and the bytes of a weight sync."""

import dataclasses
import os
import subprocess
import sys

import pytest
import torch

from lockstep.checkpoint import load_model
from lockstep.config import ActorsConfig, EngineConfig, ParallelConfig, RewardConfig, RLConfig, TrainConfig
from lockstep.errors import UserError
from lockstep.generate import Engine, SamplingParams
from lockstep.model import arithmetic_of, read_config
from lockstep.model.shard import local_values
from lockstep.parallel import close_world, open_world
from lockstep.rl.dry_run import STAGES, dry_run
from lockstep.rl.generators.models import sampling_model
from lockstep.rl.generators.open import open_policy
from lockstep.rl.weights.server import WeightServer
from lockstep.rl.weights.shard_slices import volume
from lockstep.rl.weights.transfer import WeightTransfer
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


SEPARATE = ActorsConfig(generators=1, threads=1)


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
    return [sum(size * volume(p.shard_slice) for p in pieces if getattr(p, end) == 0) for end in ("source", "target")]


def measured(config):
    """The peak of all tensors in each stage of the last step, and what rank 0 sends and receives in a sync."""
    from lockstep.rl import reinforce as controller
    from lockstep.rl.generators import policy_replica
    from lockstep.rl.rollouts.metrics import Stopwatch
    from tests.parallel.memory import PeakMemory

    os.environ["LOCKSTEP_SHARED_MEMORY"] = "0"
    peaks, sizes = {}, []
    begin, transfer = Stopwatch.begin, policy_replica.WeightTransfer

    def noted(self, lap, *arguments, **keywords):
        torch.zeros(1)  # where a trainer waits for generators, no operator has looked
        peaks[self._lap], peak.nbytes = peak.nbytes, 0  # of the lap that ends here
        begin(self, lap, *arguments, **keywords)

    def kept(*arguments):
        made = transfer(*arguments)
        sizes[:] = sizes or bytes_of_rank_0(made)  # the first is the generator's, the next the reference's
        return made

    with pytest.MonkeyPatch.context() as patched, PeakMemory() as peak:
        patched.setattr(Stopwatch, "begin", noted)
        patched.setattr(policy_replica, "WeightTransfer", kept)
        controller.reinforce(config)
    return {stage: peaks[f"time/{name}"] for stage, name in zip(STAGES, ("train", "generate", "weight_sync"))}, sizes


def estimate(config, ranks):
    found = dry_run(config, ranks, on_cpu=True)
    return found.peaks, found.transfer and [found.transfer.sent, found.transfer.received]


@pytest.mark.parametrize(
    ("ranks", "parallel", "changes"),
    [
        (1, ParallelConfig(), {}),
        pytest.param(
            1,
            ParallelConfig(),
            dict(dtype="float32", kl_coefficient=0.1, entropy_coefficient=0.1),
            marks=pytest.mark.slow,
        ),
        pytest.param(2, ParallelConfig(), dict(kl_coefficient=0.1, kl_reference="average"), marks=pytest.mark.slow),
        pytest.param(2, ParallelConfig(), dict(actors=ActorsConfig(keep_copy=False)), marks=pytest.mark.slow),
        pytest.param(2, ParallelConfig(tensor=2), {}, marks=pytest.mark.slow),
        (2, ParallelConfig(tensor=2), dict(dtype="float32")),  # generators read the trainers' own weights
        pytest.param(2, ParallelConfig(), dict(algorithm="ppo"), marks=pytest.mark.slow),
        pytest.param(2, ParallelConfig(), dict(actors=SEPARATE, algorithm="ppo"), marks=pytest.mark.slow),
        pytest.param(1, ParallelConfig(), dict(actors=SEPARATE, kl_coefficient=0.1), marks=pytest.mark.slow),
        pytest.param(
            2,
            ParallelConfig(),
            dict(actors=SEPARATE, kl_coefficient=0.1, kl_reference="average"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_its_memory_is_the_peak_of_each_stage_of_a_real_step(folder, tmp_path, ranks, parallel, changes):
    config = config_of(folder, tmp_path / "run", parallel, **changes)
    (measured_peaks, sizes), *_ = launch(ranks, measured, config)
    ((peaks, transfer),) = launch(1, estimate, config, ranks)
    assert (transfer or []) == sizes
    for stage in STAGES if transfer or config.actors.separate else STAGES[:2]:
        # CPUs sum gradients by an all-to-all, which takes 1.7 MB more here than a device's reduce-scatter; checksums a
        # MiB or so.
        assert peaks[stage] == pytest.approx(measured_peaks[stage], rel=0.04 if stage == "training" else 0.03), stage


@pytest.mark.slow
def test_a_copy_that_is_dropped_is_not_there_in_training(folder, tmp_path):
    config = config_of(folder, tmp_path / "run", ParallelConfig())
    (kept, _), *_ = launch(2, measured, config)
    dropping = dataclasses.replace(config, output=str(tmp_path / "other"), actors=ActorsConfig(keep_copy=False))
    (dropped, _), *_ = launch(2, measured, dropping)
    copy = 2 * read_config(folder).num_parameters
    # Itself, what had arrived and the messages, and nearly as many bytes in a decode step's order.
    assert kept["training"] - dropped["training"] > 4 * copy
    assert kept["weight sync"] - dropped["weight sync"] > 1.8 * copy


def memory_estimate(config, ranks):
    found = dry_run(config, ranks, on_cpu=True)
    return found.memory, found.text(), found.transfer


def test_ranks_that_compute_values_have_a_whole_copy_though_others_sample(folder, tmp_path):
    config = config_of(folder, tmp_path / "run", ParallelConfig(), actors=SEPARATE, algorithm="ppo")
    ((memory, text, transfer),) = launch(1, memory_estimate, config, 2)
    ((colocated, _, moved),) = launch(1, memory_estimate, dataclasses.replace(config, actors=ActorsConfig()), 2)
    copy = 2 * read_config(folder).num_parameters
    name = "copy for values or the reference"
    assert memory[name] == dict.fromkeys(STAGES, copy) == colocated["generator's copy"]
    assert transfer == moved and "a weight sync sends" in text and "lays out" in text
    ((memory, text, transfer),) = launch(1, memory_estimate, config, 1)  # the trainer's own model is whole
    assert name not in memory and transfer is None and "reads the trainer's" not in text


def real_transfer(config):
    """Bytes that this rank sends and receives in a sync, by the plan of a real one."""
    world = open_world(config.parallel, "cpu")
    policy = open_policy(config, world)
    sampled = sampling_model(policy, world, config.dtype, config.parallel, config.compile)
    transfer = WeightTransfer(dict(policy.named_parameters()), sampled, world)
    close_world(world)
    return bytes_of_rank_0(transfer)


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        (4, ParallelConfig(data_replicate=2)),
        pytest.param(4, ParallelConfig(context=2, tensor=2), marks=pytest.mark.slow),
        (4, ParallelConfig(tensor=2, pipeline=2)),
        pytest.param(3, ParallelConfig(), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_the_bytes_of_a_weight_sync_are_those_of_a_real_one(folder, tmp_path, ranks, parallel, dtype):
    config = config_of(folder, tmp_path / "run", parallel, dtype=dtype)
    sizes, *_ = launch(ranks, real_transfer, config)
    ((_, transfer),) = launch(1, estimate, config, ranks)
    assert transfer == sizes and sizes[1] > 0


def bytes_of_parts(manifest, rank):
    """Of what a rank publishes, in bfloat16."""
    return sum(2 * volume(tuple(map(tuple, bounds))) for _, bounds in manifest["ranks"][rank]["parts"])


def generator_measured(config):
    """The peaks of a rank of a separate generator, and the bytes that it reads of a version."""
    from lockstep.rl.generators import process_engine as generator
    from tests.parallel.memory import PeakMemory

    world = open_world(ParallelConfig(tensor=config.actors.tensor, data_shard=1), "cpu")
    trained = load_model(config.model, dtype=config.dtype, device="cpu")
    weight_server = WeightServer(dict(trained.named_parameters()), trained.dtype, world, bytes(32))
    shape = dataclasses.replace(trained.config, reduction_chunks=world.size)
    welcome = dict(
        model=config.model, shape=generator.plain_shape(shape),
        dtype=config.dtype, reduction_chunks=world.size, arithmetic=arithmetic_of(world.device), name="generator_0",
        engine=dataclasses.asdict(config.engine), compile=dataclasses.asdict(config.compile), host="here", pid=1,
    )  # fmt: skip
    peaks = {}
    with pytest.MonkeyPatch.context() as patched, PeakMemory() as peak:
        patched.setattr(generator, "DriverEngine", Engine)  # all of its ranks are asked here
        reader, engine = generator.open_engine(welcome, bytes(32), world)
        for version in (1, 2):  # the first weights meet an engine that has never sampled
            with torch.no_grad():
                for parameter in trained.parameters():
                    parameter.mul_(1.5)  # what has not changed is not read again
            manifest = weight_server.publish(version)
            peak.nbytes = 0
            assert reader.load(manifest).outcome == "loaded"
            engine.weights_changed(version)
            peaks["weight sync"], peak.nbytes = peak.nbytes, 0
            engine.generate([[1]] * 4, SamplingParams(n=8, max_tokens=8, seed=0))
            peaks["sampling"] = peak.nbytes
    # What stands for the trainer here: its parameters and, on the rank that publishes them, two versions.
    trainers = sum(parameter.nbytes for parameter in trained.parameters())
    trainers += 2 * bytes_of_parts(manifest, world.rank)
    read = sum(local_values(parameter.detach()).nbytes for parameter in engine.model.parameters())
    weight_server.close()
    close_world(world)
    return {stage: size - trainers for stage, size in peaks.items()}, read


def generator_estimate(config, ranks):
    found = dry_run(config, ranks, on_cpu=True).generator
    return found.peaks, found.read


@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_memory_of_a_separate_generator_is_that_of_a_real_one(folder, tmp_path, tensor):
    actors = dataclasses.replace(SEPARATE, tensor=tensor)
    config = config_of(folder, tmp_path / "run", ParallelConfig(), actors=actors)
    (measured_peaks, bytes_read), *_ = launch(tensor, generator_measured, config)
    ((peaks, read),) = launch(1, generator_estimate, config, 2)
    assert read == bytes_read
    for stage in STAGES[1:]:
        assert peaks[stage] == pytest.approx(measured_peaks[stage], rel=0.03), stage


def real_server(config):
    """Bytes of a version that this rank lays out."""
    world = open_world(config.parallel, "cpu")
    policy = open_policy(config, world)
    weight_server = WeightServer(dict(policy.named_parameters()), torch.bfloat16, world, bytes(32))
    size = bytes_of_parts(weight_server.publish(1), 0)
    weight_server.close()
    close_world(world)
    return size


@pytest.mark.parametrize(
    ("ranks", "parallel"), [(1, ParallelConfig()), (3, ParallelConfig()), (4, ParallelConfig(tensor=2, pipeline=2))]
)
def test_the_bytes_that_are_laid_out_are_those_of_a_real_weight_server(folder, tmp_path, ranks, parallel):
    config = config_of(folder, tmp_path / "run", parallel, actors=SEPARATE)
    size, *_ = launch(ranks, real_server, config)
    ((laid_out,),) = [launch(1, weight_server_estimate, config, ranks)]
    assert laid_out == size


def weight_server_estimate(config, ranks):
    return dry_run(config, ranks, on_cpu=True).generator.laid_out


@pytest.mark.slow
def test_the_command_prints_separate_generators_and_refuses_servers():
    command = [sys.executable, "-m", "lockstep", "rl", "--model", "qwen3:micro", "--dry-run", "4"]
    separate = [*command, "--actors.generators", "2", "--actors.tensor", "2"]
    printed = subprocess.run(separate, capture_output=True, text=True, check=True).stdout
    assert "4 ranks (data_shard 4)" in printed and "versions laid out" in printed
    assert "memory per generator rank, GiB (2 ranks each)" in printed and "generator's copy" not in printed
    assert "a weight sync lays out" in printed and "MiB on the trainer's rank, and a generator's reads" in printed
    done = subprocess.run([*command, "--actors.urls", "http://127.0.0.1:1"], capture_output=True, text=True)
    assert done.returncode == 2 and "a dry run cannot inspect the servers in actors.urls" in done.stderr


@pytest.mark.slow
def test_the_command_prints_a_cluster_a_cluster_on_one_process():
    command = [sys.executable, "-m", "lockstep", "rl", "--model", "qwen3:micro"]
    command += ["--kl-coefficient", "0.1", "--parallel.tensor", "2", "--dry-run", "16"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "16 ranks (data_shard 8, tensor 2)" in printed and "0.001 B parameters in bfloat16" in printed
    for said in ("training    sampling weight sync", "generator's copy", "reference model", "the peak is"):
        assert said in printed
    assert "a weight sync sends" in printed
    with pytest.raises(UserError, match="parallel.*= 3 ranks, but 2 are running"):
        dry_run(RLConfig(model="qwen3:micro", dtype="bfloat16", parallel=ParallelConfig(tensor=3)), 2, on_cpu=True)
