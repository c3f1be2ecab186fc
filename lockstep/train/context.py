"""The part of a packed row that one rank computes under context parallelism."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from lockstep.config.parallel import ROW_MULTIPLE
from lockstep.errors import UserError
from lockstep.ops.one_order import SharedRows
from lockstep.parallel.context import ContextAttention
from lockstep.parallel.world import World
from lockstep.train.packing import PackedRow


def shard_row(row: PackedRow, world: World) -> PackedRow:
    """This rank's tokens of `row`, the targets they predict, and attention to all of it; `row` itself without context
    parallelism.

    Targets are the next tokens of the whole sequences: the last token of a piece predicts the first of the next one, on
    whichever rank that is. Every rank of the context group has the same number of rows, including padding. Raises
    UserError for a row with shared prefixes.
    """
    if world.degrees["context"] == 1:
        return row
    if any(row.left_out or ()):
        raise UserError(
            "parallel.context does not work with answers that are sequences of their own; give --turns whole, or "
            "another layout"
        )
    assert world.mesh is not None
    device = row.tokens.device
    attention = ContextAttention(row.lengths, world.mesh.get_group("context"), device, ROW_MULTIPLE)
    attention.predictors = row.predictors
    padding = attention.padded_rows - len(attention.rows)
    place = torch.full_like(row.tokens, -1)
    place[attention.rows] = torch.arange(len(attention.rows), device=device)
    predictors = place[row.predictors]
    local = predictors >= 0
    return replace(
        row,
        tokens=F.pad(row.tokens[attention.rows], (0, padding)),
        positions=F.pad(row.positions[attention.rows], (0, padding)),
        predictors=predictors[local],
        targets=row.targets[local],
        counts=F.pad(row.counts[attention.rows], (0, padding)),
        attention=attention,
    )


def targets_of_others(row: PackedRow) -> SharedRows | None:
    """The ranks that score the rest of a row's targets; None if all are on this rank."""
    shared = getattr(row.attention, "shared_targets", None)
    assert shared is None or isinstance(shared, SharedRows)
    return shared
