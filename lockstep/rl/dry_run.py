"""A reinforcement run's memory and weight sync, computed in advance for rank 0 on tensors without values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lockstep import ops
from lockstep.checkpoint import folder_if_model
from lockstep.config import ParallelConfig, RLConfig, algorithm_of, validate
from lockstep.generate.draws import LOGITS_ELEMENTS
from lockstep.generate.engine import Engine
from lockstep.model import (
    Decoder,
    ModelConfig,
    ScoringModel,
    choose_dtype,
    folder_dtype,
    is_auto,
    preset,
    read_config,
    resolve_dtype,
)
from lockstep.model.shard import local_values
from lockstep.ops.native import pretending
from lockstep.ops.packed_weights import panel_words
from lockstep.parallel import World, chunks_for, close_world, generator_layout
from lockstep.parallel.refusals import refuse_generators
from lockstep.parallel.world import simulated_world
from lockstep.rl.generators.open import scores_with_policy
from lockstep.rl.generators.refusals import refuse_on_ranks
from lockstep.rl.scoring.reference import AVERAGE, START, reference_is_base
from lockstep.rl.scoring.value_head import ValueHead, train_settings
from lockstep.rl.weights.estimate import TransferEstimate, estimate_transfer, estimate_weight_server
from lockstep.rl.weights.in_place import materialize
from lockstep.rl.weights.server import versions_to_keep
from lockstep.rl.weights.server_memory import memory_bytes
from lockstep.train import Trainer
from lockstep.train.dry_run import (
    DryRun,
    on_meta,
    simulated_step,
    simulated_tensors,
    whole_shapes_uncounted,
)
from lockstep.train.dry_run_pipeline import simulated_ranks
from lockstep.train.live_memory import LiveMemory
from lockstep.train.packing import PackedRow, pack_scored, predicting_states, target_log_probs
from lockstep.train.setup import adapted

STAGES = TRAINING, SAMPLING, SYNC = ("training", "sampling", "weight sync")
"""The stages of a step on a rank."""


@dataclass
class RLDryRun:
    """The result. Memory is in bytes, of one rank."""

    trained: DryRun
    memory: dict[str, dict[str, int]]
    """By purpose, at the peak of each of `STAGES` in which it is allocated."""
    transfer: TransferEstimate | None
    """For a weight sync to what the ranks sample from, or compute values with; None if there is no such copy."""
    generator: GeneratorDryRun | None = None
    """For generators in separate processes."""

    @property
    def peaks(self) -> dict[str, int]:
        """Total bytes in each of `STAGES`."""
        return _peaks(self.memory)

    def text(self) -> str:
        """Tables for a terminal."""
        trained, peaks = self.trained, self.peaks
        stages = STAGES if self.transfer or self.generator else STAGES[:2]
        degrees = ", ".join(f"{axis} {degree}" for axis, degree in trained.world.degrees.items() if degree > 1)
        lines = [
            f"{trained.world.size} ranks ({degrees or 'alone'})",
            f"{trained.parameters / 1e9:.3f} B parameters in {trained.dtype}",
            f"about {trained.microbatches} full micro-batches per rank and step, not counting prompts",
            "",
            *_table("memory per rank, GiB", self.memory, stages),
            "",
        ]
        lines.append(f"the peak is {max(peaks.values()) / 2**30:.3f} GiB, in {max(stages, key=peaks.__getitem__)}")
        if self.transfer:
            sent, received = self.transfer.sent / 2**20, self.transfer.received / 2**20
            lines.append(f"a weight sync sends {sent:.1f} MiB and receives {received:.1f} MiB on that rank")
        if self.generator:
            lines += ["", *self.generator.lines()]
        elif not self.transfer:
            lines.append("no weight sync: the generator reads the trainer's own weights")
        return "\n".join(lines)


@dataclass
class GeneratorDryRun:
    """The result for one rank of each separate generator. Memory and weights are in bytes."""

    ranks: int
    """Ranks of each generator."""
    memory: dict[str, dict[str, int]]
    """As `RLDryRun.memory`, without training."""
    laid_out: int
    """Bytes that the trainer's rank lays out per version of the weights."""
    read: int
    """Bytes that a generator's rank reads, from this and other ranks of the trainer."""

    @property
    def peaks(self) -> dict[str, int]:
        """Total bytes in each of `STAGES`."""
        return _peaks(self.memory)

    def lines(self) -> list[str]:
        """A table for a terminal."""
        laid_out, read = self.laid_out / 2**20, self.read / 2**20
        return [
            *_table(f"memory per generator rank, GiB ({self.ranks} ranks each)", self.memory, STAGES[1:]),
            "",
            f"the peak is {max(self.peaks.values()) / 2**30:.3f} GiB, in {max(STAGES[1:], key=self.peaks.__getitem__)}",
            f"a weight sync lays out {laid_out:.1f} MiB on the trainer's rank, and a generator's reads {read:.1f} MiB",
        ]


def _peaks(memory: dict[str, dict[str, int]]) -> dict[str, int]:
    return {stage: sum(of_stage.get(stage, 0) for of_stage in memory.values()) for stage in STAGES}


def _table(title: str, memory: dict[str, dict[str, int]], stages: Sequence[str]) -> list[str]:
    peaks = _peaks(memory)
    return [
        f"{title:36}" + "".join(f"{stage:>12}" for stage in stages),
        *(f"  {name:34}" + "".join(_gib(sizes.get(stage)) for stage in stages) for name, sizes in memory.items()),
        f"  {'together':34}" + "".join(_gib(peaks[stage]) for stage in stages),
    ]


def _gib(size: int | None) -> str:
    return f"{'':12}" if size is None else f"{size / 2**30:12.3f}"


def estimate_memory(config: RLConfig) -> RLDryRun:
    """What a rank of `config.dry_run` ranks would need; neither data nor weights are read, so a preset is enough.

    Raises UserError for bad input.
    """
    validate(config)
    config = replace(config, model=folder_if_model(config.model))
    # The ranks are assumed to be elsewhere, on GPUs, unless the config says CPU.
    on_cpu = config.device == "cpu" or (config.dry_run == 1 and not config.device and not torch.cuda.is_available())
    dtype, why = choose_dtype(config.dtype, config.model, torch.device("cpu" if on_cpu else "cuda"))
    result = dry_run(replace(config, dtype=dtype), config.dry_run, on_cpu)  # type: ignore[arg-type]
    if is_auto(config.dtype) and why:
        result.trained = replace(result.trained, dtype=f"{dtype} (auto: {why})")
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
        shape = _shape(config.model)
        if config.lora.rank:
            shape = adapted(shape, config.lora, config.model)
        results = [_of_rank(config, shape, rank, on_cpu) for rank in simulated_ranks(world, config.parallel)]
    finally:
        close_world(world)
    result, laid_out = max(results, key=lambda result: sum(result[0].trained.memory.values()))
    if config.actors.separate:
        result.generator = _separate_generator(config, shape, laid_out, on_cpu)
    return result


def _of_rank(config: RLConfig, shape: ModelConfig, world: World, on_cpu: bool) -> tuple[RLDryRun, int]:
    """The result for `world`'s rank, without separate generators, and the bytes that it lays out for those."""
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
    with whole_shapes_uncounted():
        result = _with_generator(_RankMemory(config, shape, world, fake, trainer, on_cpu), trained)
    return result, estimate_weight_server(dict(trainer.model.named_parameters()), resolve_dtype(config.dtype))


def _separate_generator(config: RLConfig, shape: ModelConfig, laid_out: int, on_cpu: bool) -> GeneratorDryRun:
    """The result for a rank of each of `config.actors.generators`."""
    ranks = config.actors.tensor
    parallel = ParallelConfig(tensor=ranks, data_shard=1, reduction_chunks=config.parallel.reduction_chunks)
    refuse_generators(replace(shape, reduction_chunks=chunks_for(shape.reduction_chunks, parallel)), ranks)
    config = replace(config, parallel=parallel)
    world = simulated_world(parallel, ranks)
    try:
        fake = simulated_tensors()
        model = _frozen(shape, config, world, fake)
        with whole_shapes_uncounted():
            with fake, pretending():
                engine = Engine(model, replace(config.engine, cuda_graphs="none"))
            weights = _bytes(model.parameters())
            # Allocated for the next weights, on every device.
            sizes = {"weights": weights, "arriving weights": weights, "cache of keys and values": engine.cache.nbytes}
            if on_cpu:
                sizes["weights in a decode step's order"] = _panels(model)
            memory = {name: dict.fromkeys(STAGES[1:], size) for name, size in sizes.items()}
            memory["a generator's step at its peak"] = {SAMPLING: _generator_step(engine, fake)}
    finally:
        close_world(world)
    return GeneratorDryRun(ranks, memory, laid_out, weights)


class _RankMemory:
    """The memory of a rank that trains, by purpose: of training, of other models, and of its generator."""

    def __init__(
        self, config: RLConfig, shape: ModelConfig, world: World, fake: FakeTensorMode, trainer: Trainer, on_cpu: bool
    ):
        self.memory: dict[str, dict[str, int]] = {}
        self._config, self._world, self._fake, self._trainer, self._on_cpu = config, world, fake, trainer, on_cpu
        self._samples = not config.actors.separate
        self._on_ranks = world.mesh is not None
        self._keeps_copy = config.actors.keep_copy or not self._on_ranks
        self._averages = bool(config.kl_coefficient and config.kl_reference == AVERAGE)
        self._policy = dict(trainer.model.named_parameters())
        in_place = set(self._policy)
        self._whole: Decoder | None = None  # as `PolicyReplica`
        if self._on_ranks and (self._samples or scores_with_policy(config)):
            self._whole = _layout(shape, config, world)
            with fake:
                in_place = materialize(self._whole, self._policy, torch.device("cpu"))
        elif self._samples:
            assert isinstance(trainer.model, Decoder)
            self._whole = trainer.model
        whole = self._whole.named_parameters() if self._whole else ()
        self._copied = [parameter for name, parameter in whole if name not in in_place]
        self._reference: Decoder | None = None

    def add(self, name: str, size: int, *stages: str) -> None:
        """Bytes that are in use in these stages; none: in all."""
        if size:
            self.memory[name] = dict.fromkeys(stages or STAGES, size)

    def add_models(self) -> None:
        """The policy's copies, and the models that score."""
        config = self._config
        if self._averages:
            self.add("moving average", _bytes(self._trainer.optimizer.masters.values()))
        if self._whole:
            name = "generator's copy" if self._samples else "copy for values or the reference"
            self.add(name, _bytes(self._copied), *(STAGES if self._keeps_copy else (SAMPLING, SYNC)))
        if config.kl_coefficient and not reference_is_base(config):
            folder = config.model if config.kl_reference in (START, AVERAGE) else config.kl_reference
            self._reference = _frozen(_shape(folder), config, self._world, self._fake)
            self.add("reference model", _bytes(self._reference.parameters()))
        if config.teacher:
            teacher = _frozen(_shape(config.teacher), config, self._world, self._fake)
            self.add("teacher", _bytes(teacher.parameters()))
        if config.reward_model:
            dtype = folder_dtype(Path(folder_if_model(config.reward_model)))
            self.add("reward model", _bytes(Decoder(_shape(config.reward_model), dtype, "meta").parameters()))

    def add_generator(self) -> None:
        """The generator on this rank, or the weights that it lays out for separate ones."""
        config = self._config
        if self._whole and self._samples:
            with self._fake, pretending():
                engine = Engine(self._whole, replace(config.engine, cuda_graphs="none"))
            self.add("cache of keys and values", engine.cache.nbytes)
            if self._on_cpu:
                stages = STAGES if self._keeps_copy else (SAMPLING,)
                self.add("weights in a decode step's order", _panels(self._whole), *stages)
            self.add("a generator's step at its peak", _generator_step(engine, self._fake), SAMPLING)
        else:
            laid_out = estimate_weight_server(self._policy, resolve_dtype(config.dtype))
            size = memory_bytes(laid_out, versions_to_keep(config.actors))
            self.add("versions laid out, in the host's memory", size)

    def add_transfer(self) -> TransferEstimate | None:
        """The weight sync to the rank's copies; returns that of the policy."""
        transfer, on_ranks = None, self._on_ranks
        if self._whole and on_ranks:
            transfer = estimate_transfer(self._policy, self._whole, self._world, keep=self._config.actors.keep_copy)
            # A CPU keeps this memory for the next sync: the system would clear every newly allocated page.
            stages = STAGES if self._on_cpu and self._keeps_copy else (SYNC,)
            self.add("arriving weights and messages", transfer.buffers, *stages)
        if on_ranks and self._on_cpu and self._averages and self._reference:
            average = estimate_transfer(self._policy, self._reference, self._world, in_place=False)
            self.add("the moving average's, arriving", average.buffers)
        return transfer


def _with_generator(rank: _RankMemory, trained: DryRun) -> RLDryRun:
    """trained: the memory of training alone."""
    training = dict(trained.memory)
    at_peak, gradients = training.pop("a micro-batch at its peak"), training.pop("gradients")
    subtrees = training.pop("sums of micro-batches", 0)
    for name, size in training.items():
        rank.add(name, size)
    rank.add_models()
    rank.add_generator()
    # With bfloat16 weights in one process the float32 sums keep their memory for the next step.
    rank.add("gradients", gradients, *(STAGES if "float32 masters" in training and not subtrees else STAGES[:1]))
    rank.add("sums of micro-batches", subtrees, TRAINING)
    rank.add("a micro-batch at its peak", at_peak, TRAINING)
    transfer = rank.add_transfer()
    return RLDryRun(trained, rank.memory, transfer)


def _shape(model: str) -> ModelConfig:
    folder = Path(folder_if_model(model))
    return read_config(folder) if folder.is_dir() else preset(model)


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


def _frozen(shape: ModelConfig, config: RLConfig, world: World, fake: FakeTensorMode) -> Decoder:
    """As `generators.models.frozen_model`, without values."""
    model = _layout(shape, config, world)
    with fake:
        return model.to_empty(device="cpu")


def _layout(shape: ModelConfig, config: RLConfig, world: World) -> Decoder:
    parallel = ParallelConfig(tensor=config.parallel.tensor, reduction_chunks=config.parallel.reduction_chunks)
    return generator_layout(shape, resolve_dtype(config.dtype), on_meta(world), parallel)


def _generator_step(engine: Engine, fake: FakeTensorMode) -> int:
    """Peak bytes of a forward over `engine.max_tokens_per_step` rows, and of sampling from as many logits as are held
    at once."""
    config, model = engine.config, engine.model
    sequences = min(config.max_sequences, config.max_tokens_per_step)
    rows = config.max_tokens_per_step
    lengths = torch.full((sequences,), rows // sequences, dtype=torch.int32)
    lengths[: rows % sequences] += 1
    attention = ops.PagedAttention(engine.cache, torch.zeros(sequences, 1, dtype=torch.int32), lengths, lengths.clone())
    attention.slots  # noqa: B018 - computed here from real values, before tensors have none
    drawn = min(sequences, max(1, LOGITS_ELEMENTS // model.config.vocab_size))
    with fake, pretending(), torch.no_grad():
        tokens = torch.zeros(rows, dtype=torch.int64)
        # Weights and cache are counted separately.
        there = [local_values(tensor) for tensor in [*model.parameters(), *engine.cache.tensors()]]
        with LiveMemory(there) as live:
            before = live.nbytes
            hidden = model(tokens, tokens, attention)
            model.logits(hidden[:drawn])
    return live.peak - before


def _panels(model: Decoder) -> int:
    """Bytes of the weights packed for products of few rows on a CPU (`ops.PackedWeights`)."""
    return sum(
        4 * panel_words(local_values(parameter))
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2 and (model.config.tie_embeddings or not name.startswith("embed_tokens"))
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local_values(tensor).nbytes for tensor in tensors)
