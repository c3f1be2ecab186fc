"""One rank's rows of each step, the same in total for any number of ranks; several streams in fixed proportions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.data.rows import Piece, Row, Rows
from lockstep.errors import UserError


class MixedRows:
    """Interleaves rows of several streams: at any point each stream is within about one row of its share.

    Shares count tokens without padding, whose amount differs between rows of whole documents. The choice of stream is a
    deterministic function of the weights and of the earlier rows. A stream that has ended is no longer chosen.
    """

    def __init__(self, streams: Sequence[Rows], weights: Sequence[float]):
        self.streams = list(streams)
        self.weights = [weight / sum(weights) for weight in weights]
        self.sequence_length = streams[0].sequence_length
        # Tokens taken from each stream.
        self._taken = [0] * len(streams)

    @property
    def ended(self) -> bool:
        return all(stream.ended for stream in self.streams)

    @property
    def epoch(self) -> float:
        """The epoch of the stream that has been seen most often."""
        return max(stream.epoch for stream in self.streams)

    @property
    def size(self) -> tuple[int, int] | None:
        """Documents and tokens of all streams; None if the length of one is unknown."""
        sizes = [stream.size for stream in self.streams]
        known = [size for size in sizes if size is not None]
        return (sum(n for n, _ in known), sum(n for _, n in known)) if len(known) == len(sizes) else None

    @property
    def counts(self) -> dict[str, int]:
        names = {name for stream in self.streams for name in stream.counts}
        return {name: sum(stream.counts.get(name, 0) for stream in self.streams) for name in sorted(names)}

    def plan(self) -> list[Piece]:
        """The next row of the stream that is furthest behind its share; empty if all have ended."""
        active = [i for i, stream in enumerate(self.streams) if not stream.ended]
        if not active:
            return []
        total = sum(self._taken) + self.sequence_length
        chosen = max(active, key=lambda i: self.weights[i] * total - self._taken[i])
        pieces = self.streams[chosen].plan()
        self._taken[chosen] += sum(piece.size for piece in pieces)
        return pieces

    def targets(self, pieces: list[Piece]) -> int:
        return self.streams[0].targets(pieces)

    def read(self, pieces: list[Piece]) -> Row:
        return self.streams[0].read(pieces)

    def state(self) -> dict[str, Any]:
        streams = [stream.state() for stream in self.streams]
        return {"weights": self.weights, "given": list(self._taken), "streams": streams}

    def restore(self, state: dict[str, Any]) -> None:
        """Raises UserError if the sources or their weights are not those of `state`."""
        if state.get("weights") != self.weights:
            raise UserError(
                f"weights of the data: {state.get('weights')} when the run was saved, {self.weights} now; "
                "resume with the same data, or start over with --overwrite"
            )
        self._taken = [int(tokens) for tokens in state["given"]]
        for stream, stream_state in zip(self.streams, state["streams"], strict=True):
            stream.restore(stream_state)


RowStream = Rows | MixedRows


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

    The rows of a step do not depend on the ranks; `step_rows` splits them. If the data does not fill the last step,
    empty rows do.

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
        return step_rows(self.rows, plans, self.rows_per_microbatch, self.rank, self.ranks)

    def state(self) -> dict[str, Any]:
        """The position, the same on every rank and for any number of ranks; JSON-serializable."""
        return self.rows.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from a position that `state` returned. Raises UserError for another run's state."""
        self.rows.restore(state)


def step_rows(rows: RowStream, plans: list[list[Piece]], rows_per_microbatch: int, rank: int, ranks: int) -> StepRows:
    """A rank's share of planned rows, in micro-batches of consecutive ones: rank r of n has the micro-batches r, n + r,
    2n + r and so on."""
    size = rows_per_microbatch
    return StepRows(
        microbatches=[
            [rows.read(plan) for plan in plans[i : i + size]] for i in range(rank * size, len(plans), ranks * size)
        ],
        tokens=sum(piece.size for plan in plans for piece in plan),
        targets=sum(rows.targets(plan) for plan in plans),
        capacity=len(plans) * rows.sequence_length,
    )


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
