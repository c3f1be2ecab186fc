"""Rows of held-out data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from lockstep.config import PretrainConfig
from lockstep.data import DataSource, Encoder, StepRows, open_rows
from lockstep.data.rows import Piece, Rows
from lockstep.errors import UserError
from lockstep.parallel import World
from lockstep.train.read_once import read_once


def validation_rows(
    config: PretrainConfig,
    sources: Sequence[tuple[DataSource, float]],
    encoder: Encoder,
    world: World,
    kind: type[Rows] = Rows,
) -> StepRows | None:
    """This rank's share of the rows that every validation measures; None if there are no `sources`.

    The same `validation_tokens` tokens each time, or all there are, for any number of ranks: micro-batches are filled
    up with rows without documents, since every rank must have equally many. Raises UserError for data without a target.
    """
    if not sources:
        return None
    length = config.sequence_length
    share = partial(read_once, world)
    rows = open_rows(sources, encoder, replace(config.loader, repeat=False), length, seed=0, share=share, kind=kind)
    plans: list[list[Piece]] = []
    while not rows.ended and len(plans) < max(1, config.validation_tokens // length):
        plans.append(rows.plan())
    targets = sum(rows.targets(plan) for plan in plans)
    if not targets:
        name = f"validation_data {config.validation_data}" if config.validation_data else "validation_share"
        raise UserError(f"{name}: contains nothing to predict; give other data")
    # A loss's bits depend on the micro-batches, which are the same in all layouts with `deterministic_layout`.
    most = len(plans) if config.train.deterministic_layout else -(-len(plans) // world.data_size)
    size = min(max(1, config.train.tokens_per_microbatch // length), most)
    together = size * world.data_size
    padded = plans + [[]] * (-len(plans) % together)
    return StepRows(
        microbatches=[
            [rows.read(plan) for plan in padded[i : i + size]]
            for i in range(world.data_rank * size, len(padded), together)
        ],
        tokens=sum(piece.size for plan in plans for piece in plan),
        targets=targets,
        capacity=len(padded) * length,
    )
