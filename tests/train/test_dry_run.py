"""A dry run of pretraining against real steps: the same memory at the peak, the same messages."""

import os
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pytest
import torch

from lockstep.cli import main
from lockstep.config import CompileConfig, ParallelConfig, PretrainConfig, RecomputeConfig, TrainConfig
from lockstep.data import Row
from lockstep.errors import UserError
from lockstep.model import Decoder, Lora, ModelConfig, initialize, preset, resolve_dtype
from lockstep.model.config import DeltaNet
from lockstep.model.shard import local_values
from lockstep.observe.collectives import CollectiveLog
from lockstep.parallel import close_world, open_world, parallel_model
from lockstep.precision import Precision
from lockstep.train import Trainer
from lockstep.train.context import shard_row
from lockstep.train.dry_run import dry_run
from lockstep.train.objective import NextTokenLoss
from lockstep.train.packing import pack_rows
from tests.parallel.launch import launch

SHAPE = replace(preset("llama3:tiny", 512), num_layers=2)
DEEP, WIDE = preset("llama3:tiny", 512), preset("llama3:tiny", 32768)
"""Most of its memory is embedding and head."""
MIXTURES = preset("qwen3_moe:micro", 512), preset("gpt_oss:micro", 512)
ALONE, EACH = ParallelConfig(), ParallelConfig(reduce_gradients="microbatch")


@dataclass
class Case:
    parallel: ParallelConfig = field(default_factory=partial(ParallelConfig, bucket_mib=0.0))
    dtype: str = "float32"
    shape: ModelConfig = SHAPE
    microbatches: int = 2
    train: dict = field(default_factory=dict)
    has_peak: bool = True
    """Whether its peak is compared: a small one, or one of large buckets, has too much of what CPUs alone allocate to
    exchange gradients."""

    def config(self, tokens: int = 512) -> PretrainConfig:
        train = TrainConfig(tokens_per_microbatch=128, **self.train)
        return PretrainConfig(
            dtype=self.dtype, sequence_length=64, tokens_per_step=tokens, parallel=self.parallel, train=train
        )

    def simulated(self, ranks: int):
        """With as many micro-batches on each rank as the real step has."""
        world = self.parallel.tensor * self.parallel.context * self.parallel.pipeline
        tokens = 128 * self.microbatches * ranks // world
        return dry_run(self.config(tokens), self.shape, ranks, NextTokenLoss(126))


def pipeline(schedule, microbatches=16, shape=DEEP):
    parallel = ParallelConfig(pipeline=2, pipeline_schedule=schedule)
    return Case(parallel, shape=shape, microbatches=microbatches)


def real_step(case):
    """Messages of a real step, bytes of the rank's weights and optimizer, and the peak of all tensors."""
    from tests.parallel.memory import PeakMemory

    os.environ["LOCKSTEP_SHARED_MEMORY"] = "0"  # the collectives of other hosts' ranks, which are estimated
    config = case.config()
    world = open_world(case.parallel, "cpu")
    fill = partial(initialize, seed=0)
    with PeakMemory() as peak:
        model = parallel_model(case.shape, resolve_dtype(case.dtype), world, case.parallel, CompileConfig(), fill)
        trainer = Trainer(model, config.train, 1, world)
        row = Row(np.arange(64), [64], np.arange(64) > 0, padding=0)
        with CollectiveLog(world.group_names) as log:
            rows = [shard_row(pack_rows([row, row]), world) for _ in range(case.microbatches)]
            trainer.accumulate(rows, NextTokenLoss(126))
            trainer.optimizer.update(1e-3, 0.0)
    state = sum(local_values(t).nbytes for t in trainer.optimizer.state_tensors().values())
    weights = sum(local_values(p).nbytes for p in model.parameters())
    close_world(world)
    return on_devices(log.traffic), weights, state, peak.nbytes


def on_devices(traffic):
    """With the exchange that sums gradients on CPUs (`ExchangedSum`) counted as the reduce-scatter it stands for."""
    calls, sizes = Counter(), Counter()
    for (axis, kind), messages in traffic.items():
        key = axis, kind if axis == "tensor" else kind.replace("alltoall", "reduce_scatter")
        calls[key] += messages.calls
        sizes[key] += messages.bytes
    return {key: (calls[key], sizes[key]) for key in calls}


EACH_SUMMED = Case(EACH, has_peak=False)
TENSOR, CONTEXT = (Case(ParallelConfig(**{axis: 2}), "bfloat16", has_peak=False) for axis in ("tensor", "context"))
FOUR = ParallelConfig(tensor=2, bucket_mib=0.0)
# Its ranks also exchange scales.
INT8 = replace(TENSOR, shape=replace(SHAPE, precision=Precision("int8", keep=())))
HYBRID = replace(SHAPE, delta=DeltaNet(4, 8, 64, 64), delta_layers=(True, False), attention_gate=True)
STEPS = [
    *((1, Case()), (1, Case(shape=HYBRID)), (1, Case(train={"optimizer": "muon"}))),
    *((2, EACH_SUMMED), (2, TENSOR), (2, pipeline("zbv", 8))),
]
MORE_STEPS = [
    *((1, Case(dtype="bfloat16")), (1, Case(shape=WIDE))),
    (1, Case(microbatches=1, train={"optimizer_in_backward": True, "max_grad_norm": 0.0})),
    *((2, Case(shape=DEEP)), (2, Case(EACH, shape=DEEP)), (2, Case(dtype="bfloat16", shape=DEEP)), (2, CONTEXT)),
    *((2, pipeline("1f1b", shape=WIDE)), (2, pipeline("gpipe")), (2, pipeline("interleaved"))),
    *((2, pipeline("dualpipev")), (2, pipeline("zbv")), (4, Case(FOUR, shape=DEEP)), (4, Case(FOUR, shape=WIDE))),
    *((1, Case(dtype="bfloat16", shape=HYBRID)), (2, replace(TENSOR, shape=HYBRID))),
    *((2, INT8), (2, replace(INT8, shape=replace(SHAPE, precision=Precision("int4"))))),
    (4, Case(ParallelConfig(data_replicate=2, reduce_gradients="microbatch", bucket_mib=0.0), shape=DEEP)),
]


@pytest.mark.parametrize(
    ("ranks", "case"), [*STEPS, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE_STEPS)]
)
def test_a_dry_run_has_the_memory_and_the_messages_of_a_real_step(ranks, case):
    (traffic, weights, state, peak), *others = launch(ranks, real_step, case, fresh=True)
    found = case.simulated(ranks)
    assert found.microbatches == case.microbatches
    if case.parallel.pipeline > 1:  # the rank that needs the most
        peak = max(peak, *(each[-1] for each in others))
    else:
        assert {key: (t.calls, t.bytes) for key, t in found.traffic.items()} == traffic
        assert found.memory["weights"] == weights
        masters = found.memory.get("float32 masters", found.memory["weights"])
        assert masters + found.memory["optimizer state"] == state
    # 0.1 to 1.2 % measured in pipelines, 0.1 % for Muon: a real step also has its rows, and messages on their way.
    if not case.has_peak:
        return
    near = 0.02 if case.parallel.pipeline > 1 else 0.01 if case.train else 0.03
    assert sum(found.memory.values()) == pytest.approx(peak, rel=near), found.memory


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "tensor", "dtype", "shape"), [(2, 1, "bfloat16", DEEP), (4, 2, "float32", WIDE)])
def test_layers_gathered_together_are_counted_within_their_weights_and_gradients(ranks, tensor, dtype, shape):
    case = Case(ParallelConfig(tensor=tensor), dtype, shape)
    (traffic, *_, peak), *_ = launch(ranks, real_step, case, fresh=True)
    found = case.simulated(ranks)
    assert {key: (t.calls, t.bytes) for key, t in found.traffic.items()} == traffic
    layers = sum(parameter.numel() for parameter in Decoder(shape, torch.float32, "meta").layers.parameters()) // tensor
    assert abs(sum(found.memory.values()) - peak) < layers * (resolve_dtype(dtype).itemsize + 4)


@pytest.mark.slow
def test_what_arrives_of_micro_batches_that_are_not_in_flight_takes_no_memory():
    message = 4 * 128 * SHAPE.dim
    for schedule, kept in (("1f1b", 0), ("zbv", 2)):
        few, many = (launch(2, real_step, pipeline(schedule, count), fresh=True) for count in (8, 16))
        for (*_, less), (*_, more) in zip(few, many):
            # Their tokens, positions and the like, and what torch keeps of what is sent where a rank has several
            # stages.
            assert more - less < 8 * message * (kept + 0.2)


def test_gradients_muons_matrices_and_sums_in_one_order_are_counted():
    def found(ranks, tokens=512, **changes):
        case = Case(changes.pop("parallel", ALONE), "bfloat16", changes.pop("shape", SHAPE), train=changes)
        result = dry_run(case.config(tokens), case.shape, ranks, NextTokenLoss(126))
        return result, {kind: t.calls for (_, kind), t in result.traffic.items()}

    # Of two shards a rank has the full gradients until the last micro-batch, unless they are summed with each.
    for parallel, copies in ((ALONE, 2), (EACH, 1), (ParallelConfig(context=2), 2)):
        result, _ = found(2, parallel=parallel)
        assert result.memory["gradients"] == copies * result.memory["weights"]
    assert found(8)[0].microbatches == 1, "no rank has more rows than the step"
    result, calls = found(4, 2048, optimizer="muon", deterministic_layout=True)
    assert result.microbatches == 4 and result.memory["sums of micro-batches"] == 2 * result.memory["gradients"]
    assert calls["alltoall_base"] > 0 and calls["reduce_scatter_base"] == 2 * 2  # of two, for layers and root
    _, calls = found(4, 2048, optimizer="muon", parallel=ParallelConfig(data_replicate=2))
    assert calls["alltoall_base"] > 0
    with pytest.raises(UserError, match="parallel.*= 3 ranks, but 2 are running"):
        found(2, parallel=ParallelConfig(tensor=3))
    with pytest.raises(UserError, match="a step has 4 micro-batches per rank.* needs 6 or more"):
        found(6, parallel=ParallelConfig(pipeline=6), shape=DEEP)


@pytest.mark.parametrize(("ranks", "kept"), [(1, 1), (2, 2)])
def test_layers_inputs_in_host_memory_are_not_counted(ranks, kept):
    """At the peak, in the last layer's backward, the inputs of `kept` layers are on the device."""
    full, offloaded = (
        dry_run(replace(Case().config(), recompute=RecomputeConfig(mode)), DEEP, ranks, NextTokenLoss(126))
        for mode in ("full", "offload")
    )
    peaks = [sum(found.memory.values()) for found in (full, offloaded)]
    assert peaks[0] - peaks[1] == (DEEP.num_layers - kept) * 128 * DEEP.dim * 4


@pytest.mark.parametrize(
    ("linear", "ranks", "model"),
    [("int4", 1, SHAPE), ("int8", 1, SHAPE), ("int4", 2, SHAPE), *(("int4", 1, mixture) for mixture in MIXTURES)],
)
def test_a_packed_base_is_counted_as_its_integers(linear, ranks, model):
    modules = (*(f"layers.{i}.self_attn.o_proj" for i in range(model.num_layers)), "lm_head")
    precision = Precision(linear, keep=("layers.0.*",))
    shape = replace(model, lora=Lora(4, 8.0, modules), precision=precision)
    found = dry_run(Case(dtype="bfloat16").config(), shape, ranks, NextTokenLoss(126)).memory["weights"]
    model = Decoder(shape, torch.bfloat16)
    whole = sum(p.nbytes for p in model.parameters())
    model.pack_frozen()
    assert found == (sum(p.nbytes for p in model.parameters()) if ranks == 1 else whole)  # two ranks' float32 shards


@pytest.mark.parametrize("microbatches", [1, 2])
def test_layers_that_fit_a_bucket_share_its_messages(microbatches):
    """Of DEEP's six layers and the root, which stays gathered; the layers are gathered again for the backward."""
    layer = sum(p.numel() for p in Decoder(DEEP, torch.float32, "meta").layers[0].parameters()) * 4 / 2**20
    sizes = {}
    for mib, buckets in ((0.0, 6), (0.9 * layer, 6), (2 * layer, 3), (5.5 * layer, 2), (32.0, 1)):
        case = Case(ParallelConfig(bucket_mib=mib, reduce_gradients="microbatch"), shape=DEEP)
        traffic = dry_run(case.config(256 * microbatches), DEEP, 2, NextTokenLoss(126)).traffic
        gathered, summed = traffic["data_shard", "allgather_base"], traffic["data_shard", "reduce_scatter_base"]
        assert (gathered.calls, summed.calls) == (microbatches * (2 * buckets + 1), microbatches * (buckets + 1))
        sizes[mib] = gathered.bytes, summed.bytes
    assert len({*sizes.values()}) == 1


@pytest.mark.parametrize("model", ["deepseek_v3:micro", "gpt_oss:micro"])
def test_a_mixture_whose_router_has_a_bias_is_counted(model):
    shape = preset(model)
    for ranks in (1, 2):
        found = dry_run(Case().config(), shape, ranks, NextTokenLoss(126))
        assert found.memory["weights"] * ranks == pytest.approx(4 * shape.num_parameters, rel=1e-3)


def test_the_command_prints_a_cluster_from_one_process(capsys):
    options = ["--model", "llama3:tiny", "--sequence-length", "128", "--tokens-per-step", "8192"]
    options += ["--train.tokens-per-microbatch", "128", "--dry-run", "64", "--parallel.tensor", "4"]
    assert main(["pretrain", *options]) == 0
    printed = capsys.readouterr().out
    assert "64 ranks (data_shard 16, tensor 4)" in printed
    assert " B parameters in bfloat16" in printed and "together" in printed and "reduce_scatter" in printed
