"""A reinforcement run's memory and weight sync, computed in advance for rank 0 on tensors without values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lockstep import ops
from lockstep.checkpoint import folder_if_model
from lockstep.config import ParallelConfig, RLConfig, algorithm_of
from lockstep.generate.draws import LOGITS_ELEMENTS
from lockstep.generate.engine import Engine
from lockstep.hub import named_path
from lockstep.model import Decoder, ModelConfig, ScoringModel, folder_dtype, resolve_dtype
from lockstep.model.shard import local_values
from lockstep.ops.native import pretending
from lockstep.ops.packed_weights import PLAIN
from lockstep.parallel import World, chunks_for, close_world, generator_layout
from lockstep.parallel.refusals import refuse_generators
from lockstep.parallel.world import simulated_world
from lockstep.rl.generators.open import scores_with_policy
from lockstep.rl.generators.refusals import refuse_on_ranks
from lockstep.rl.scoring.reference import AVERAGE, START, reference_is_base
from lockstep.rl.scoring.value_head import ValueHead, train_settings
from lockstep.rl.weights.in_place import materialize
from lockstep.rl.weights.server import versions_to_keep
from lockstep.rl.weights.transfer import TransferEstimate, estimate_transfer
from lockstep.train.dry_run import (
    TRAINING,
    DryRun,
    StageMemory,
    bytes_of,
    on_meta,
    peaks_of,
    resolve_simulated,
    shape_of,
    simulated_step,
    simulated_tensors,
    table,
    whole_shapes_uncounted,
)
from lockstep.train.dry_run_pipeline import simulated_ranks
from lockstep.train.live_memory import LiveMemory
from lockstep.train.packing import PackedRow, pack_scored, predicting_states, target_log_probs
from lockstep.train.setup import with_precision

STAGES = TRAINING, SAMPLING, SYNC = (TRAINING, "sampling", "weight sync")
"""The stages of a step on a rank."""


@dataclass
class RLDryRun:
    """The result. Memory is in bytes, of one rank."""

    trained: DryRun
    memory: StageMemory
    """By purpose, at the peak of each of `STAGES` in which it is allocated."""
    transfer: TransferEstimate | None
    """For a weight sync to what the ranks sample from, or compute values with; None if there is no such copy."""
    laid_out: int
    """Bytes that the rank lays out per version of the weights if generators are separate."""
    generator: StageMemory | None = None
    """As `memory`, for one rank of each separate generator."""

    @property
    def peaks(self) -> dict[str, int]:
        """Total bytes in each of `STAGES`."""
        return peaks_of(self.memory, STAGES)

    def text(self) -> str:
        """Tables for a terminal."""
        lines = self.trained.heading(", if all are full and prompts are not counted")
        stages = STAGES if self.transfer or self.generator else STAGES[:2]
        lines += _with_peak("memory per rank, GiB", self.memory, stages)
        if self.transfer:
            received = self.transfer.received / 2**20
            lines.append(f"a weight sync sends and receives {received:.1f} MiB on that rank")
        elif not self.generator:
            lines.append("no weight sync: the generator reads the trainer's own weights")
        if self.generator:
            sizes = f"{self.laid_out / 2**20:.1f} MiB on the trainer's rank, and a generator's reads"
            lines += ["", *_with_peak("memory per generator rank, GiB", self.generator, STAGES[1:])]
            lines.append(f"a weight sync lays out {sizes} {self.generator['weights'][SYNC] / 2**20:.1f} MiB")
        return "\n".join(lines)


def _with_peak(title: str, memory: StageMemory, stages: Sequence[str]) -> list[str]:
    peaks = peaks_of(memory, stages)
    highest = max(stages, key=peaks.__getitem__)
    return [*table(title, memory, stages), "", f"the peak is {peaks[highest] / 2**30:.3f} GiB, in {highest}"]


def estimate_memory(config: RLConfig) -> RLDryRun:
    """What a rank of `config.dry_run` ranks would need; neither data nor weights are read, so a preset is enough.

    Raises UserError for bad input.
    """
    config, _, why, on_cpu = resolve_simulated(config)
    result = dry_run(config, config.dry_run, on_cpu)
    result.trained.dtype += why
    return result


def dry_run(config: RLConfig, ranks: int, on_cpu: bool) -> RLDryRun:
    """Builds one rank of `ranks`, and runs a micro-batch, an update, and a forward of its generator.

    With a pipeline, it is the rank whose training needs the most memory. With separate generators, the forward is that
    of one of their ranks.

    A micro-batch has `train.tokens_per_microbatch` tokens, all but the first of each completion sampled, or one
    completion if that is longer. Raises UserError if the degrees do not fit the ranks or the model.
    """
    world = simulated_world(config.parallel, ranks)
    try:
        refuse_on_ranks(config, world)
        shape = with_precision(shape_of(config.model, config.lora), config)
        results = [_of_rank(config, shape, rank, on_cpu) for rank in simulated_ranks(world, config.parallel)]
    finally:
        close_world(world)
    result = max(results, key=lambda result: sum(result.trained.memory.values()))
    if config.actors.separate:
        result.generator = _separate_generator(config, shape, on_cpu)
    return result


def _of_rank(config: RLConfig, shape: ModelConfig, world: World, on_cpu: bool) -> RLDryRun:
    """The result for `world`'s rank, without separate generators."""
    fake = simulated_tensors()
    value_head = None
    if algorithm_of(config).advantage == "gae":
        with fake, pretending():
            value_head = ValueHead(shape.dim, "cpu", config.value_detached)
    extra_parameters = value_head.parameters_by_name() if value_head else {}
    settings = replace(config, train=train_settings(config))
    row, share = _microbatch(config), _share(config, world)
    trainer, trained = simulated_step(
        settings, shape, world, fake, row, share, _Loss(config, value_head), extra_parameters
    )
    policy = dict(trainer.model.named_parameters())
    with whole_shapes_uncounted():
        rank = _RankMemory(config, world, fake, on_cpu)
        rank.add_training(trained)
        if config.kl_coefficient and config.kl_reference == AVERAGE:
            rank.add("moving average", bytes_of(trainer.optimizer.masters.values()))
        whole = rank.add_copy(shape, cast(Decoder, trainer.model))
        rank.add_scoring_models()
        if whole and not config.actors.separate:
            rank.add_generator(whole)
        laid_out = sum(local_values(p).numel() for p in policy.values()) * resolve_dtype(config.dtype).itemsize
        if config.actors.separate:
            rank.add("versions laid out, in the host's memory", laid_out * versions_to_keep(config.actors))
        transfer = None
        if whole and world.mesh is not None:
            transfer = estimate_transfer(policy, whole, config.actors.keep_copy)
            rank.add("arriving weights and messages", transfer.buffers, SYNC)
    return RLDryRun(trained, rank.memory, transfer, laid_out)


def _separate_generator(config: RLConfig, shape: ModelConfig, on_cpu: bool) -> StageMemory:
    """The memory of a rank of each of `config.actors.generators`."""
    ranks = config.actors.tensor
    parallel = ParallelConfig(tensor=ranks, data_shard=1, reduction_chunks=config.parallel.reduction_chunks)
    refuse_generators(replace(shape, reduction_chunks=chunks_for(shape.reduction_chunks, parallel)), ranks)
    config = replace(config, parallel=parallel)
    world = simulated_world(parallel, ranks)
    try:
        rank = _RankMemory(config, world, simulated_tensors(), on_cpu, STAGES[1:])
        model = rank.frozen(shape)
        with whole_shapes_uncounted():
            weights = bytes_of(model.parameters())
            rank.add("weights", weights)
            rank.add("arriving weights", weights)  # allocated for the next ones, on every device
            rank.add_generator(model)
    finally:
        close_world(world)
    return rank.memory


class _RankMemory:
    """The memory of a rank by purpose: of training, of its generator, and of other models.

    stages: those that the rank takes part in.
    """

    def __init__(
        self, config: RLConfig, world: World, fake: FakeTensorMode, on_cpu: bool, stages: Sequence[str] = STAGES
    ):
        self.memory: StageMemory = {}
        self._config, self._world, self._fake, self._on_cpu, self._stages = config, world, fake, on_cpu, stages
        self._on_ranks = world.mesh is not None
        self._keeps_copy = config.actors.keep_copy or not self._on_ranks

    def add(self, name: str, size: int, *stages: str) -> None:
        """Bytes that are in use in these stages; none: in all."""
        if size:
            self.memory[name] = dict.fromkeys(stages or self._stages, size)

    def add_training(self, trained: DryRun) -> None:
        """A step's memory, some of which remains allocated in the other stages."""
        remaining = {"weights", "float32 masters", "optimizer state"}
        if "float32 masters" in trained.memory and "sums of micro-batches" not in trained.memory:
            # With bfloat16 weights in one process the float32 sums keep their memory for the next step.
            remaining.add("gradients")
        for name, size in trained.memory.items():
            self.add(name, size, *(STAGES if name in remaining else [TRAINING]))

    def add_copy(self, shape: ModelConfig, policy: Decoder) -> Decoder | None:
        """Returns the model that samples or scores on this rank, as `PolicyReplica`; its own memory is added."""
        samples = not self._config.actors.separate
        if not self._on_ranks:
            return policy if samples else None
        if not samples and not scores_with_policy(self._config):
            return None
        whole = self._layout(shape)
        with self._fake:
            in_place = materialize(whole, dict(policy.named_parameters()), torch.device("cpu"))
        copied = [parameter for name, parameter in whole.named_parameters() if name not in in_place]
        name = "generator's copy" if samples else "copy for values or the reference"
        self.add(name, bytes_of(copied), *(STAGES if self._keeps_copy else (SAMPLING, SYNC)))
        return whole

    def add_scoring_models(self) -> None:
        """The reference, a teacher and a reward model."""
        config = self._config
        if config.kl_coefficient and not reference_is_base(config):
            folder = config.model if config.kl_reference in (START, AVERAGE) else config.kl_reference
            self.add("reference model", bytes_of(self.frozen(shape_of(folder)).parameters()))
        if config.teacher:
            self.add("teacher", bytes_of(self.frozen(shape_of(config.teacher)).parameters()))
        if config.reward_model:
            dtype = folder_dtype(named_path(folder_if_model(config.reward_model)))
            self.add("reward model", bytes_of(Decoder(shape_of(config.reward_model), dtype, "meta").parameters()))

    def add_generator(self, model: Decoder) -> None:
        """An engine with this model, without drafts."""
        with self._fake, pretending():
            engine = Engine(model, replace(self._config.engine, cuda_graphs="none", draft="none"))
        self.add("cache of keys and values", engine.cache.nbytes)
        if engine.delta_cache is not None:
            self.add("states of delta networks", engine.delta_cache.nbytes)
        if self._on_cpu:
            stages = self._stages if self._keeps_copy else (SAMPLING,)
            self.add("weights in a decode step's order", _panels(model), *stages)
        self.add("a generator's step at its peak", _generator_step(engine, self._fake), SAMPLING)

    def frozen(self, shape: ModelConfig) -> Decoder:
        """As `generators.models.frozen_model`, without values."""
        model = self._layout(shape)
        with self._fake:
            return model.to_empty(device="cpu")

    def _layout(self, shape: ModelConfig) -> Decoder:
        config = self._config
        parallel = ParallelConfig(tensor=config.parallel.tensor, reduction_chunks=config.parallel.reduction_chunks)
        return generator_layout(shape, resolve_dtype(config.dtype), on_meta(self._world), parallel)


def _share(config: RLConfig, world: World) -> int:
    """Micro-batches per rank and step if all of them are full."""
    tokens = config.prompts_per_step * config.samples_per_prompt * config.max_new_tokens
    share = -(-tokens // (config.train.tokens_per_microbatch * world.data_size))
    # Idle ones are added until the pipeline schedule fits: twice the number of ranks always does.
    least = 2 * world.degrees["pipeline"] if world.degrees["pipeline"] > 1 else 1
    return -(-share // least) * least


def _microbatch(config: RLConfig) -> PackedRow:
    length = config.max_new_tokens
    count, rest = divmod(config.train.tokens_per_microbatch, length)
    lengths = [length] * max(count, 1) + [rest] * (rest > 0 and count > 0)
    # One token more than is computed: the last one makes no prediction.
    return pack_scored([[0] * (n + 1) for n in lengths], [range(1, n + 1) for n in lengths])


class _Loss:
    """A loss with the same gradients as `PolicyLoss`."""

    def __init__(self, config: RLConfig, value_head: nn.Module | None):
        self.temperature, self.value_head = config.temperature, value_head
        self.of_entropies = config.entropy_coefficient > 0

    def __call__(self, model: ScoringModel, row: PackedRow) -> Tensor:
        states = predicting_states(model, row)
        log_probs, entropies = target_log_probs(model, row, self.temperature, states)
        loss = log_probs.sum() + (entropies.sum() if self.of_entropies else 0.0)
        return loss + self.value_head(states).sum() if self.value_head else loss


def _generator_step(engine: Engine, fake: FakeTensorMode) -> int:
    """Peak bytes of a forward over `engine.max_tokens_per_step` rows, and of sampling from as many logits as are held
    at once."""
    config, model = engine.config, engine.model
    sequences = min(config.max_sequences, config.max_tokens_per_step)
    rows = config.max_tokens_per_step
    lengths = torch.full((sequences,), rows // sequences, dtype=torch.int32)
    lengths[: rows % sequences] += 1
    table, states = torch.zeros(sequences, 1, dtype=torch.int32), torch.zeros(3, sequences, dtype=torch.int32)
    delta = engine.runner.delta_step(states)
    attention = ops.PagedAttention(engine.cache, table, lengths, lengths.clone(), delta)
    attention.slots  # noqa: B018 - computed here from real values, before tensors have none
    drawn = min(sequences, max(1, LOGITS_ELEMENTS // model.config.vocab_size))
    with fake, pretending(), torch.no_grad():
        tokens = torch.zeros(rows, dtype=torch.int64)
        # Weights and cache are counted separately.
        counted = [*model.parameters(), *engine.cache.tensors()]
        counted += engine.delta_cache.tensors() if engine.delta_cache else []
        there = [local_values(tensor) for tensor in counted]
        with LiveMemory(there) as live:
            before = live.nbytes
            hidden = model(tokens, tokens, attention)
            model.logits(hidden[:drawn])
    return live.peak - before


def _panels(model: Decoder) -> int:
    """Bytes of the weights packed for products on a CPU (`ops.PackedWeights`): of all, or those with few rows."""
    layouts = {id(each.weight): ops.FORMATS[each.format].layout for each in model.formatted_weights().values()}
    return sum(
        4 * (layouts.get(id(parameter)) or PLAIN).words(local_values(parameter))
        for name, parameter in model.named_parameters()
        if (parameter.ndim == 2 or id(parameter) in layouts)
        and not name.endswith("bias")
        and not isinstance(parameter, ops.PackedWeight)
        and (model.config.tie_embeddings or not name.startswith("embed_tokens"))
    )
