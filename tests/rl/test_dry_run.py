"""A dry run of reinforcement against real ones: the peak of each stage of a step, and the bytes of a weight sync."""

import dataclasses
import os

import pytest
import torch

from lockstep.cli import main
from lockstep.config import (
    ActorsConfig,
    EngineConfig,
    ParallelConfig,
    PrecisionConfig,
    RewardConfig,
    RLConfig,
    TrainConfig,
)
from lockstep.errors import UserError
from lockstep.model import read_config
from lockstep.parallel import close_world, open_world
from lockstep.rl.dry_run import STAGES, dry_run
from lockstep.rl.generators.models import sampling_model
from lockstep.rl.generators.open import open_policy
from lockstep.rl.weights.server import WeightServer
from lockstep.rl.weights.shard_slices import read_slice, volume
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


def peaks_of_run(config):
    """The peak of all tensors in each stage of a real run's last step."""
    from lockstep.rl.reinforce import reinforce
    from lockstep.rl.rollouts.metrics import Stopwatch
    from tests.parallel.memory import PeakMemory

    os.environ["LOCKSTEP_SHARED_MEMORY"] = "0"
    peaks, begin = {}, Stopwatch.begin

    def noted(self, lap, *arguments, **keywords):
        torch.zeros(1)  # where a trainer waits for generators, no operator has looked
        peaks[self._lap], peak.nbytes = peak.nbytes, 0  # of the lap that ends here
        begin(self, lap, *arguments, **keywords)

    with pytest.MonkeyPatch.context() as patched, PeakMemory() as peak:
        patched.setattr(Stopwatch, "begin", noted)
        reinforce(config)
    return {stage: peaks[f"time/{name}"] for stage, name in zip(STAGES, ("train", "generate", "weight_sync"))}


def estimated(config, ranks):
    found = dry_run(config, ranks, on_cpu=True)
    return found.peaks, found.transfer is not None


KL = dict(kl_coefficient=0.1)
EACH_LAYER = ParallelConfig(bucket_mib=0.0)
"""Without what CPUs alone allocate to exchange the gradients of several layers at once."""
RUNS = [(2, ParallelConfig(tensor=2), dict(dtype="float32"))]
MORE_RUNS = [
    (1, ParallelConfig(), dict(dtype="float32", entropy_coefficient=0.1, **KL)),
    (1, ParallelConfig(), dict(actors=SEPARATE, **KL)),
    (1, ParallelConfig(), dict(precision=PrecisionConfig(cache="int8"))),
    (2, EACH_LAYER, dict(kl_reference="average", **KL)),
    (2, EACH_LAYER, dict(actors=ActorsConfig(keep_copy=False))),
    (2, EACH_LAYER, dict(algorithm="ppo")),
    (2, EACH_LAYER, dict(actors=SEPARATE, algorithm="ppo")),
    (2, EACH_LAYER, dict(actors=SEPARATE, kl_reference="average", **KL)),
]


@pytest.mark.parametrize(
    ("ranks", "parallel", "changes"), [*RUNS, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE_RUNS)]
)
def test_a_dry_run_has_the_peak_of_each_stage_of_a_real_step(folder, tmp_path, ranks, parallel, changes):
    config = config_of(folder, tmp_path / "run", parallel, **changes)
    peaks, *_ = launch(ranks, peaks_of_run, config, fresh=True)
    ((estimates, syncs),) = launch(1, estimated, config, ranks, fresh=True)
    for stage in STAGES if syncs or config.actors.separate else STAGES[:2]:
        # CPUs sum gradients by an all-to-all, which takes 1.7 MB more here than a device's reduce-scatter; checksums a
        # MiB or so.
        assert estimates[stage] == pytest.approx(peaks[stage], rel=0.04 if stage == "training" else 0.03), stage


def test_copies_are_counted_where_they_are_allocated(folder, tmp_path):
    def found(ranks, **changes):
        return dry_run(config_of(folder, tmp_path / "run", ParallelConfig(), **changes), ranks, on_cpu=True)

    copy = 2 * read_config(folder).num_parameters
    values, colocated = found(2, actors=SEPARATE, algorithm="ppo"), found(2, algorithm="ppo")
    name = "copy for values or the reference"
    assert values.memory[name] == dict.fromkeys(STAGES, copy) == colocated.memory["generator's copy"]
    assert values.transfer == colocated.transfer and "a weight sync sends" in values.text()
    assert "lays out" in values.text()
    alone = found(1, actors=SEPARATE, algorithm="ppo")  # the trainer's own model is whole
    assert name not in alone.memory and alone.transfer is None and "reads the trainer's" not in alone.text()

    dropped = found(2, actors=ActorsConfig(keep_copy=False))
    # Itself, and nearly as many bytes in a decode step's order.
    assert colocated.peaks["training"] - dropped.peaks["training"] > 1.8 * copy

    # A separate generator samples as one on a trainer's rank does, whose memory the test above measures.
    names = ("cache of keys and values", "weights in a decode step's order", "a generator's step at its peak")
    own = found(1).memory
    for name in names:
        assert alone.generator[name]["sampling"] == own[name]["sampling"]
    assert alone.generator["weights"] == alone.generator["arriving weights"] == dict.fromkeys(STAGES[1:], copy)
    integers = found(1, precision=PrecisionConfig(cache="int8")).memory[names[0]]
    width = read_config(folder).head_dim  # a byte per number and one per scale, instead of two per number
    assert integers["sampling"] * 2 * width == own[names[0]]["sampling"] * (width + 1)
    halves = found(1, actors=dataclasses.replace(SEPARATE, tensor=2)).generator
    assert copy / 2 < halves["weights"]["sampling"] < 0.51 * copy


def real_sizes(config):
    """The bytes that this rank receives in a sync, and lays out for generators."""
    world = open_world(config.parallel, "cpu")
    policy = open_policy(config, world)
    tensors = dict(policy.named_parameters())
    sampled = sampling_model(policy, world, config.dtype, config.parallel, config.compile)
    pieces = [piece for each in WeightTransfer(tensors, sampled, world).pieces.values() for piece in each]
    received = sum(volume(piece.shard_slice) for piece in pieces if piece.target == 0 != piece.source)
    server = WeightServer(tensors, sampled.dtype, world, bytes(32))
    laid_out = sum(volume(read_slice(bounds)) for _, bounds in server.publish(1)["ranks"][0]["parts"])
    server.close()
    close_world(world)
    return [received * sampled.dtype.itemsize, laid_out * sampled.dtype.itemsize]


@pytest.mark.parametrize(
    ("ranks", "layout", "dtype"),
    [
        (2, {}, "float32"),
        pytest.param(4, dict(tensor=2, pipeline=2), "bfloat16", marks=pytest.mark.slow),
        pytest.param(4, dict(data_replicate=2), "float32", marks=pytest.mark.slow),
        pytest.param(4, dict(context=2, tensor=2), "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_the_bytes_of_a_weight_sync_are_those_of_a_real_one(folder, tmp_path, ranks, layout, dtype):
    config = config_of(folder, tmp_path / "run", ParallelConfig(**layout), dtype=dtype)
    sizes, *_ = launch(ranks, real_sizes, config)
    found = dry_run(config, ranks, on_cpu=True)
    assert [found.transfer.received, found.laid_out] == sizes and sizes[0] > 0


def test_the_command_prints_ranks_and_separate_generators_from_one_process(capsys):
    command = ["rl", "--model", "qwen3:micro", "--dry-run"]
    assert main([*command, "16", "--kl-coefficient", "0.1", "--parallel.tensor", "2"]) == 0
    printed = capsys.readouterr().out
    assert "16 ranks (data_shard 8, tensor 2)" in printed and "0.001 B parameters in bfloat16" in printed
    for said in ("training    sampling weight sync", "generator's copy", "reference model", "the peak is"):
        assert said in printed
    assert "a weight sync sends" in printed
    assert main([*command, "4", "--actors.generators", "2", "--actors.tensor", "2"]) == 0
    printed = capsys.readouterr().out
    assert "4 ranks (data_shard 4)" in printed and "versions laid out" in printed
    assert "memory per generator rank, GiB" in printed and "generator's copy" not in printed
    assert "a weight sync lays out" in printed and "MiB on the trainer's rank, and a generator's reads" in printed
    assert main([*command, "4", "--actors.urls", "http://127.0.0.1:1"]) == 2
    assert "a dry run cannot inspect the servers in actors.urls" in capsys.readouterr().err
    with pytest.raises(UserError, match="parallel.*= 3 ranks, but 2 are running"):
        dry_run(RLConfig(model="qwen3:micro", dtype="bfloat16", parallel=ParallelConfig(tensor=3)), 2, on_cpu=True)
