"""Several sources in fixed proportions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.data.loader import RowStream
from lockstep.data.rows import Piece, Row
from lockstep.errors import UserError


def parse_data(data: str) -> list[tuple[str, float]]:
    """`a.jsonl=0.7,b.parquet=0.3` as sources and their weights; the weight defaults to 1.

    Text without `=WEIGHT` is a single source, even with commas. Raises UserError for a weight that is not positive.
    """
    parts = [part.rpartition("=") for part in data.split(",")]
    if not any(equals and _number(weight) is not None for _, equals, weight in parts):
        return [(data, 1.0)]
    sources = []
    for part, (name, equals, text) in zip(data.split(","), parts):
        weight = _number(text) if equals else None
        source, share = (part, 1.0) if weight is None else (name, weight)
        if not 0 < share < float("inf") or not source.strip():
            raise UserError(f"data {part!r}: write PATH=WEIGHT, with a weight above 0, as in a.jsonl=0.7,b.jsonl=0.3")
        sources.append((source.strip(), share))
    return sources


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


class MixedRows:
    """Interleaves rows of several streams: at any point each stream is within about one row of its share.

    Shares count tokens without padding, whose amount differs between rows of whole documents. The choice of stream is a
    deterministic function of the weights and of the earlier rows. A stream that has ended is no longer chosen.
    """

    def __init__(self, streams: Sequence[RowStream], weights: Sequence[float]):
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
