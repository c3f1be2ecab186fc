"""One rank's rows of each step; the global rows and their order do not depend on the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from lockstep.data.rows import Piece, Row
from lockstep.errors import UserError


@runtime_checkable
class RowStream(Protocol):
    """What the loader needs from `Rows` or `MixedRows`."""

    sequence_length: int

    @property
    def ended(self) -> bool: ...
    @property
    def epoch(self) -> float: ...
    @property
    def size(self) -> tuple[int, int] | None: ...
    @property
    def counts(self) -> dict[str, int]: ...
    def plan(self) -> list[Piece]: ...
    def targets(self, pieces: list[Piece]) -> int: ...
    def read(self, pieces: list[Piece]) -> Row: ...
    def state(self) -> dict[str, Any]: ...
    def restore(self, state: dict[str, Any]) -> None: ...


@dataclass
class StepRows:
    """One rank's micro-batches of a step, and the totals of the step over all ranks."""

    microbatches: list[list[Row]]
    """This rank's; all have the same number of rows, on every rank."""
    tokens: int
    """Tokens over all ranks, without padding."""
    targets: int
    """Tokens that the loss counts, over all ranks."""
    capacity: int
    """Tokens of all rows over all ranks, including padding."""


class RowLoader:
    """Takes rows of `tokens_per_step` tokens from the stream for each step, and splits this rank's share into
    micro-batches.

    The rows of a step do not depend on the ranks: they are split into micro-batches of consecutive rows, and rank r of
    n gets micro-batches r, n + r, 2n + r and so on. If the data does not fill the last step, empty rows do.

    Raises UserError if the step does not divide into rows, ranks and micro-batches.
    """

    def __init__(
        self, rows: RowStream, tokens_per_step: int, tokens_per_microbatch: int, rank: int = 0, ranks: int = 1
    ):
        self.rows, self.rank, self.ranks = rows, rank, ranks
        self.rows_per_step, self.rows_per_microbatch = divide_step(
            rows.sequence_length, tokens_per_step, tokens_per_microbatch, ranks
        )
        self.rows_per_rank = self.rows_per_step // ranks
        self.microbatches = self.rows_per_rank // self.rows_per_microbatch
        """Per step, on each rank."""

    @property
    def ended(self) -> bool:
        """Whether the data has no more steps."""
        return self.rows.ended

    @property
    def epoch(self) -> float:
        """How many times the data has been seen."""
        return self.rows.epoch

    @property
    def counts(self) -> dict[str, int]:
        """Nonzero counts of the data as metrics, such as `data/skipped_lines` and `data/empty_documents`."""
        return {f"data/{name}": count for name, count in self.rows.counts.items() if count}

    def steps_of(self, epochs: float) -> int:
        """Steps, at least one, from here until the data has been seen `epochs` times; the position does not change.

        Raises UserError for data of unknown length and for a number that is not above 0.
        """
        if not epochs > 0:
            raise UserError(f"epochs is {epochs}; it must be above 0")
        before, rows = self.rows.state(), 0
        while self.rows.epoch < epochs and not self.rows.ended:
            self.rows.plan()
            rows += 1
        self.rows.restore(before)
        return max(1, -(-rows // self.rows_per_step))

    def epochs_of(self, steps: int) -> float:
        """How often the data will have been seen after `steps` steps from here; the position does not change."""
        before = self.rows.state()
        for _ in range(steps * self.rows_per_step):
            if not self.rows.ended:
                self.rows.plan()
        epochs = self.rows.epoch
        self.rows.restore(before)
        return epochs

    def peek(self) -> StepRows:
        """The next step, without advancing."""
        before = self.state()
        step = self.next()
        self.restore(before)
        return step

    def next(self) -> StepRows:
        """This rank's rows of the next step. Raises StopIteration if there is none (see `ended`)."""
        if self.ended:
            raise StopIteration("the data has ended")
        plans = [self.rows.plan() for _ in range(self.rows_per_step)]
        size = self.rows_per_microbatch
        starts = range(self.rank * size, self.rows_per_step, self.ranks * size)
        return StepRows(
            microbatches=[[self.rows.read(plan) for plan in plans[i : i + size]] for i in starts],
            tokens=sum(piece.size for plan in plans for piece in plan),
            targets=sum(self.rows.targets(plan) for plan in plans),
            capacity=self.rows_per_step * self.rows.sequence_length,
        )

    def state(self) -> dict[str, Any]:
        """The position, the same on every rank and for any number of ranks; JSON-serializable."""
        return self.rows.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from a position that `state` returned. Raises UserError for another run's state."""
        self.rows.restore(state)


def divide_step(
    length: int, per_step: int, per_microbatch: int, ranks: int, deterministic: bool = False
) -> tuple[int, int]:
    """Rows per step and per micro-batch. Raises UserError, with numbers that work, if they do not divide.

    deterministic: refuse micro-batches that would be smaller because ranks share the step.
    """
    rows, rest = divmod(per_step, length)
    if rest or not rows or rows % ranks:
        unit = length * ranks
        low = max(1, per_step // unit) * unit
        near = f"{low} or {low + unit}" if low < per_step else str(low)
        raise UserError(
            f"tokens_per_step {per_step} does not divide into rows of sequence_length {length} for {ranks} "
            f"data-parallel rank{'s' * (ranks > 1)}, {unit} tokens in total; give tokens_per_step {near}"
        )
    per_rank = rows // ranks
    size = min(max(1, per_microbatch // length), per_rank)
    if deterministic and size < min(max(1, per_microbatch // length), rows):
        raise UserError(
            f"train.deterministic_layout needs the same micro-batches in every layout, but a rank has {per_rank} rows "
            f"per step and train.tokens_per_microbatch {per_microbatch} means {per_microbatch // length}; give "
            f"train.tokens_per_microbatch {per_rank * length} in all layouts"
        )
    if per_rank % size:
        fitting = next(n for n in range(size, 0, -1) if per_rank % n == 0)
        raise UserError(
            f"a rank's {per_rank} rows per step ({per_step} tokens, {ranks} rank{'s' * (ranks > 1)}) do not divide "
            f"into micro-batches of {size} rows (train.tokens_per_microbatch {per_microbatch}); "
            f"give train.tokens_per_microbatch {fitting * length}"
        )
    return rows, size
