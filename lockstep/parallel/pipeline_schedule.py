"""Pipeline schedules: torch's schedules by name, or one from a CSV file.

torch's schedules are imported only to create a pipeline: they import its compiler, which takes most of a second.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
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

    Raises UserError for settings that the schedule does not support, and for a CSV file that cannot be run.
    """

    def __init__(self, config: ParallelConfig):
        self.config = config
        self.name = config.pipeline_schedule
        self.table = read_table(Path(self.name), config.pipeline) if self.name.endswith(".csv") else None
        if self.splits_backward and config.reshard_after_forward == "always":
            raise UserError(
                f'parallel.reshard_after_forward "always" does not work with pipeline_schedule "{self.name}", whose '
                'two halves of the backward need the same gathered weights; leave it at "default"'
            )

    @property
    def splits_backward(self) -> bool:
        """Whether gradients for inputs and for weights are computed separately."""
        if self.table is not None:
            return any(action.kind == "I" for work in self.table for action in work)
        return SCHEDULES[self.name].splits_backward

    @property
    def keeps_all(self) -> bool:
        """Whether all of a step's micro-batches may be in flight at once."""
        return self.table is not None or self.name == "gpipe"

    @property
    def keeps_sent(self) -> bool:
        """Whether torch keeps sent tensors until the step ends, as it does with several stages per rank."""
        return self.table is not None or SCHEDULES[self.name].stages_per_rank != 1

    @property
    def stages(self) -> int:
        """The number of stages over all ranks."""
        if self.table is not None:
            return 1 + max(action.stage for work in self.table for action in work)
        return self.config.pipeline * (SCHEDULES[self.name].stages_per_rank or self.config.pipeline_stages_per_rank)

    def rank_of(self, stage: int) -> int:
        """The rank of `stage` within the pipeline."""
        ranks = self.config.pipeline
        if self.table is not None:
            return next(rank for rank, work in enumerate(self.table) if any(a.stage == stage for a in work))
        turn, place = divmod(stage, ranks)
        return ranks - 1 - place if SCHEDULES[self.name].v_shaped and turn % 2 else place

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
        if self.table is not None:
            required = 1 + max(action.microbatch for work in self.table for action in work)
            remedy = f"exactly {required}" if count != required else ""
        elif self.name == "1f1b" and count < ranks:
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

        if self.table is not None:
            schedule = schedules._PipelineScheduleRuntime(stages, microbatches, loss_of, scale_grads=False)
            schedule._load_csv(self.name)
            return schedule, self.table
        kind = SCHEDULES[self.name]
        make = getattr(schedules, kind.kind)
        ranks = self.config.pipeline
        if kind.stages_per_rank == 1:
            ahead = [microbatches if self.name == "gpipe" else ranks - rank for rank in range(ranks)]
            table = [_alternating(rank, microbatches, ahead[rank]) for rank in range(ranks)]
            return make(stages[0], microbatches, loss_of, scale_grads=False), table
        schedule = make(stages, microbatches, loss_of, scale_grads=False)
        return schedule, [_actions(schedule.pipeline_order[rank]) for rank in range(ranks)]


def _alternating(stage: int, microbatches: int, ahead: int) -> list[Action]:
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


def read_table(path: Path, ranks: int) -> Table:
    """A schedule from CSV: one line per rank; each field is `<stage><F|B|I|W><microbatch>`, or empty for idle time.

    Raises UserError, naming line and field, for anything that is not an action, and for a table that leaves out work,
    does it twice or out of order, or deadlocks.
    """
    try:
        with path.open(newline="") as file:
            lines = [line for line in csv.reader(file) if line]
    except OSError as error:
        raise UserError(
            f"parallel.pipeline_schedule: {path} cannot be read ({error.strerror}); name a schedule or a CSV file"
        ) from error
    if len(lines) != ranks:
        raise UserError(f"{path} has {len(lines)} lines, but the pipeline has {ranks} ranks; write one line per rank")
    table: Table = [[] for _ in lines]
    for rank, line in enumerate(lines):
        for column, text in enumerate(line):
            match = re.fullmatch(r"(\d+)([FBIW])(\d+)", text.strip())
            if match:
                table[rank].append(Action(int(match[1]), match[2], int(match[3])))
            elif text.strip():
                raise UserError(
                    f'{path}, line {rank + 1}, field {column + 1}: "{text}" is not an action; write the stage, F, B, I '
                    "or W, and the micro-batch, as in 0F3"
                )
    _check(table, path)
    return table


def _check(table: Table, path: Path) -> None:
    work = [action for actions in table for action in actions]
    if not work:
        raise UserError(f"{path} contains no action")
    stages = 1 + max(action.stage for action in work)
    microbatches = 1 + max(action.microbatch for action in work)
    for stage in range(stages):
        if len(ranks := [r + 1 for r, actions in enumerate(table) if any(a.stage == stage for a in actions)]) > 1:
            raise UserError(f"{path}: stage {stage} is on lines {ranks}; a stage's weights are on one rank only")
    done = Counter(work)
    for stage in range(stages):
        for microbatch in range(microbatches):
            count = {kind: done[Action(stage, kind, microbatch)] for kind in "FBIW"}
            if count not in ({"F": 1, "B": 1, "I": 0, "W": 0}, {"F": 1, "B": 0, "I": 1, "W": 1}):
                raise UserError(
                    f"{path}: stage {stage} must run micro-batch {microbatch} forward once (F) and backward once (B, "
                    f"or I and W), but does {count}"
                )
    last = [action.microbatch for action in work if action.stage == stages - 1 and action.kind == "F"]
    if last != sorted(last):
        # torch's runtime assigns losses to micro-batches in the order in which they were computed.
        raise UserError(f"{path}: the last stage must run its forwards in the order of the micro-batches, not {last}")
    try:
        bubble_fraction(table, [1.0] * stages)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


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
            heads = ", ".join(
                f"rank {rank} for {a.stage}{a.kind}{a.microbatch}'s inputs"
                for rank, actions in enumerate(waiting)
                for a in actions[-1:]
            )
            raise ValueError(f"the ranks wait for each other: {heads}; change the order of their work")
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
