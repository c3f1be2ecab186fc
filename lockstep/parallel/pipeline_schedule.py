"""Pipelines: the layers of each stage, and torch's schedules by name.

torch's schedules are imported only to create a pipeline: they import its compiler, which takes most of a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from lockstep.config import CompileConfig, ParallelConfig
from lockstep.errors import UserError


class Action(NamedTuple):
    """A unit of work; `kind`: F is a forward, B a backward, I and W are its halves for inputs and weights."""

    stage: int
    kind: str
    microbatch: int


Table = list[list[Action]]
"""The actions of every rank, in order."""


@dataclass(frozen=True)
class _Schedule:
    kind: str
    """The name of torch's class."""
    stages_per_rank: int
    """0: as configured."""
    v_shaped: bool = False
    """Rank 0 has the first and the last stage; otherwise stages are assigned round-robin."""
    splits_backward: bool = False
    """The backwards for inputs and for weights are separate units of work."""


SCHEDULES = {
    "gpipe": _Schedule("ScheduleGPipe", 1),
    "1f1b": _Schedule("Schedule1F1B", 1),
    "interleaved": _Schedule("ScheduleInterleaved1F1B", 0),
    "zbv": _Schedule("ScheduleZBVZeroBubble", 2, v_shaped=True, splits_backward=True),
    "dualpipev": _Schedule("ScheduleDualPipeV", 2, v_shaped=True, splits_backward=True),
}


class PipelinePlan:
    """A config's schedule: the stages of each rank, and the order of its work.

    Raises UserError for settings that the schedule does not support.
    """

    def __init__(self, config: ParallelConfig):
        self.config = config
        self.name = config.pipeline_schedule
        self.schedule = SCHEDULES[self.name]
        if self.splits_backward and config.reshard_after_forward == "always":
            raise UserError(
                f'parallel.reshard_after_forward "always" does not work with pipeline_schedule "{self.name}", whose '
                'two halves of the backward need the same gathered weights; leave it at "default"'
            )

    @property
    def splits_backward(self) -> bool:
        """Whether gradients for inputs and for weights are computed separately."""
        return self.schedule.splits_backward

    @property
    def keeps_all(self) -> bool:
        """Whether all of a step's micro-batches may be in flight at once."""
        return self.name == "gpipe"

    @property
    def keeps_sent(self) -> bool:
        """Whether torch keeps sent tensors until the step ends, as it does with several stages per rank."""
        return self.schedule.stages_per_rank != 1

    @property
    def stages(self) -> int:
        """The number of stages over all ranks."""
        return self.config.pipeline * (self.schedule.stages_per_rank or self.config.pipeline_stages_per_rank)

    def rank_of(self, stage: int) -> int:
        """The rank of `stage` within the pipeline."""
        ranks = self.config.pipeline
        turn, place = divmod(stage, ranks)
        return ranks - 1 - place if self.schedule.v_shaped and turn % 2 else place

    def check_compile(self, compiled: CompileConfig) -> None:
        """Raises UserError if the schedule does not support compiled blocks."""
        if self.splits_backward and compiled.backend != "none":
            raise UserError(
                f'compile.backend "{compiled.backend}" does not work with pipeline_schedule "{self.name}": a compiled '
                'block has one backward, not one for inputs and one for weights; set compile.backend = "none", or use '
                'the schedule "interleaved"'
            )

    def check_microbatches(self, count: int) -> None:
        """Raises UserError if the schedule cannot run with `count` micro-batches per step."""
        ranks, remedy = self.config.pipeline, ""
        if self.name == "1f1b" and count < ranks:
            remedy = f"{ranks} or more"
        elif self.name == "dualpipev" and count < self.stages:
            remedy = f"{self.stages} or more"
        elif self.name == "interleaved" and (count < ranks or count % (count // ranks)):
            remedy = f"a multiple of {ranks}"
        if remedy:
            raise UserError(
                f'a step has {count} micro-batches per rank, but pipeline_schedule "{self.name}" on {ranks} ranks '
                f"needs {remedy}; change train.tokens_per_microbatch or tokens_per_step"
            )

    def make(self, stages: list[Any], microbatches: int, loss_of: Callable[..., Any]) -> tuple[Any, Table]:
        """torch's schedule for this rank's stages, and the table of all ranks. Losses are summed, not averaged."""
        self.check_microbatches(microbatches)
        from torch.distributed.pipelining import schedules

        make, ranks = getattr(schedules, self.schedule.kind), range(self.config.pipeline)
        if self.schedule.stages_per_rank == 1:
            # Not the schedule's own table, which in torch 2.13 does not have the order that it runs.
            ahead = [microbatches if self.name == "gpipe" else len(ranks) - rank for rank in ranks]
            table = [alternating(rank, microbatches, ahead[rank]) for rank in ranks]
            return make(stages[0], microbatches, loss_of, scale_grads=False), table
        schedule = make(stages, microbatches, loss_of, scale_grads=False)
        return schedule, [_actions(schedule.pipeline_order[rank]) for rank in ranks]


def alternating(stage: int, microbatches: int, ahead: int) -> list[Action]:
    """One forward, one backward, with `ahead` forwards before the first backward."""
    order: list[Action] = []
    for step in range(microbatches + ahead):
        if step < microbatches:
            order.append(Action(stage, "F", step))
        if step >= ahead - 1 and step - ahead + 1 < microbatches:
            order.append(Action(stage, "B", step - ahead + 1))
    return order


def _actions(order: Sequence[Any]) -> list[Action]:
    """The compute actions of torch's order; overlapping pairs become consecutive actions."""
    actions: list[Action] = []
    for action in order:
        for part in (action.sub_actions or (action,)) if action is not None else ():
            if part.computation_type.value in ("F", "B", "I", "W"):
                actions.append(Action(part.stage_index, part.computation_type.value, part.microbatch_index))
    return actions


def passes_in_flight(work: Sequence[Action]) -> int:
    """The most forwards of a rank's stages whose backward has not run."""
    in_flight = most = 0
    for action in work:
        in_flight += {"F": 1, "I": 0, "B": -1, "W": -1}[action.kind]
        most = max(most, in_flight)
    return most


def bubble_fraction(table: Table, work: Sequence[float]) -> float:
    """The share of time that ranks wait, if a backward takes twice as long as a forward and sending takes no time.

    `work` is the time of each stage's forward. Raises ValueError if the ranks would deadlock.
    """
    finished: dict[Action, float] = {}
    clocks = [0.0] * len(table)
    waiting = [list(reversed(actions)) for actions in table]
    while any(waiting):
        before = len(finished)
        for rank, actions in enumerate(waiting):
            while actions and (ready := _ready(actions[-1], finished, len(work))) is not None:
                action = actions.pop()
                time = work[action.stage] * (2 if action.kind == "B" else 1)
                clocks[rank] = finished[action] = max(clocks[rank], ready) + time
        if len(finished) == before:
            raise ValueError(f"the ranks of the pipeline wait for each other, after {before} of its actions")
    busy = sum(work[a.stage] * (2 if a.kind == "B" else 1) for a in finished)
    return 1 - busy / (len(table) * max(clocks))


def _ready(action: Action, finished: dict[Action, float], stages: int) -> float | None:
    """The time at which the inputs of `action` are available; None if they are not computed yet."""
    stage, kind, microbatch = action
    needs: list[tuple[Action, ...]] = []
    if kind == "F" and stage > 0:
        needs = [(Action(stage - 1, "F", microbatch),)]
    elif kind in "BI":
        needs = [(Action(stage, "F", microbatch),)]
        if stage < stages - 1:
            needs.append((Action(stage + 1, "B", microbatch), Action(stage + 1, "I", microbatch)))
    elif kind == "W":
        needs = [(Action(stage, "I", microbatch),)]
    times = [next((finished[a] for a in either if a in finished), None) for either in needs]
    return None if None in times else max((t for t in times if t is not None), default=0.0)


def split_layers(num_layers: int, stages: int, config: ParallelConfig) -> list[range]:
    """Consecutive layers for each stage: from `pipeline_split`, otherwise of about equal work.

    Raises UserError if there are fewer layers than stages, or if `pipeline_split` names layers that cannot begin a
    stage.
    """
    if num_layers < stages:
        raise UserError(
            f"a pipeline of {stages} stages needs at least as many layers, but the model has {num_layers}; lower "
            "parallel.pipeline, or use a schedule with fewer stages per rank"
        )
    starts = _named(config.pipeline_split, num_layers, stages) if config.pipeline_split else None
    if starts is None:
        sizes = _balanced(num_layers, stages, config.pipeline_embedding_layers, config.pipeline_head_layers)
        starts = [sum(sizes[:stage]) for stage in range(stages)]
    return [range(*ends) for ends in pairwise([*starts, num_layers])]


def stage_work(layers: list[range], config: ParallelConfig) -> list[float]:
    """The work of each stage, in layers; the config has the weights of embedding and head."""
    work = [float(len(stage)) for stage in layers]
    work[0] += config.pipeline_embedding_layers
    work[-1] += config.pipeline_head_layers
    return work


def _balanced(num_layers: int, stages: int, embedding: float, head: float) -> list[int]:
    sizes = [1] * stages
    work = [1.0] * stages
    work[0] += embedding
    work[-1] += head
    # Each layer goes to the stage with the least work, which minimizes the work of the heaviest stage. Ties go to the
    # last stage, which has fewer micro-batches in flight.
    for _ in range(num_layers - stages):
        least = max(stage for stage in range(stages) if work[stage] == min(work))
        sizes[least] += 1
        work[least] += 1
    return sizes


def _named(split: str, num_layers: int, stages: int) -> list[int]:
    names = [name.strip() for name in split.split(",")]
    starts_by_name = {f"layers.{index}": index for index in range(1, num_layers)}
    for name in names:
        if name not in starts_by_name:
            raise UserError(
                f'parallel.pipeline_split: no stage can begin with "{name}"; name layers.1 to layers.{num_layers - 1}'
            )
    starts = [0, *(starts_by_name[name] for name in names)]
    if len(starts) != stages or any(a >= b for a, b in pairwise(starts)):
        raise UserError(
            f'parallel.pipeline_split = "{split}" does not make {stages} stages; name the {stages - 1} layers that '
            "begin the later stages, in ascending order"
        )
    return starts
