"""The learning rate of every step: warm-up and a shape, or the numbers in a file."""

from __future__ import annotations

import csv
import math
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path

from lockstep.config import TrainConfig
from lockstep.errors import UserError
from lockstep.ops.elementary import cosine

Schedule = Callable[[int], float]
"""Maps a step, counted from 0, to its learning rate."""


def make_schedule(config: TrainConfig, total_steps: int) -> Schedule:
    """The schedule that `config` names, over `total_steps`. Raises UserError for a file that cannot be used."""
    if config.schedule == "csv":
        points = read_points(Path(config.schedule_file))
        return lambda step: interpolated(step + 1, points)
    return lambda step: config.learning_rate * _relative(step, total_steps, config)


def _relative(step: int, total_steps: int, config: TrainConfig) -> float:
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    start, shape = config.warmup_steps, str(config.schedule)
    if shape == "constant":
        return 1.0
    if shape == "wsd":
        start, shape = max(start, total_steps - round(config.decay_share * total_steps)), config.decay_shape
    progress = max(0.0, (step - start) / max(1, total_steps - start))
    final = config.final_learning_rate_ratio
    return final + (1.0 - final) * SHAPES[shape](progress)


SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + cosine(math.pi * progress)),
    "sqrt": lambda progress: 1.0 - math.sqrt(progress),
}
"""From 1 at progress 0 to 0 at progress 1."""


def interpolated(step: int, points: list[tuple[int, float]]) -> float:
    """Linear interpolation of `points` at `step`, constant before the first and after the last."""
    index = bisect_right(points, step, key=lambda point: point[0])
    if index == 0:
        return points[0][1]
    if index == len(points):
        return points[-1][1]
    (left, low), (right, high) = points[index - 1], points[index]
    return low + (high - low) * (step - left) / (right - left)


def read_points(path: Path) -> list[tuple[int, float]]:
    """The `(step, learning rate)` lines of a CSV file. Raises UserError, naming file and line, for anything else."""
    try:
        with path.open(newline="") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"train.schedule_file {path}: cannot be read ({error}); give a CSV file of step,learning_rate"
        ) from error
    if not rows or [cell.strip() for cell in rows[0]] != ["step", "learning_rate"]:
        raise UserError(f"{path}, line 1: the header must be step,learning_rate")
    points: list[tuple[int, float]] = []
    for line, row in enumerate(rows[1:], 2):
        if not row:
            continue
        try:
            step, rate = int(row[0]), float(row[1])
        except (ValueError, IndexError):
            step, rate = -1, math.nan
        if len(row) != 2 or not 0 <= rate < math.inf or (points and step <= points[-1][0]):
            raise UserError(
                f"{path}, line {line}: {','.join(row)!r} is not a later step and its learning rate of 0 or more"
            )
        points.append((step, rate))
    if not points:
        raise UserError(f"{path}: has no steps; add lines such as 1,0.001")
    return points
