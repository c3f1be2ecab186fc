"""`lockstep parity --matrix`: trainer and generator in every layout compared with each other, on this machine.

A small model of each shape samples a mixed load in every layout of the generator, and every layout of the trainer
scores what was sampled, in a real training step. Every pair must agree in every bit. For each number of ranks, that
many processes work through their jobs (`parity_worker`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lockstep.config import ParallelConfig
from lockstep.model import ModelConfig
from lockstep.model.config import DeltaNet, ExpertsConfig, Norms
from lockstep.model.ropes import LinearRope, LongQueries, Rope
from lockstep.ops import Routing
from lockstep.precision import HEAD, Precision
from lockstep.progress import Progress

CHUNKS = 4
"""Reduction chunks: as many as the largest tensor degree here."""
Recompute = Literal["none", "full", "selective"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "full", "selective")
DTYPES = ("float32", "bfloat16")
Backend = Literal["none", "inductor"]
BACKENDS: tuple[Backend, ...] = ("none", "inductor")
"""Compilation: both sides eager, or both compiled."""
GENERATORS = (1, 2, 4)
"""Tensor degrees."""
# Widths that four ranks can divide and compiled loops handle evenly; a vocabulary that they cannot divide; in one shape
# fewer key-value heads than ranks, in one a cache of integers.
_SMALL: dict[str, Any] = dict(
    vocab_size=259, dim=64, num_layers=4, head_dim=32, intermediate_size=128, max_positions=256, tie_embeddings=False
)
SHAPES = {
    "llama3": ModelConfig("llama3", num_heads=8, num_kv_heads=4, **_SMALL),
    "qwen3, tied head": ModelConfig(
        "qwen3", num_heads=8, num_kv_heads=2, qk_norm="head", **(_SMALL | {"tie_embeddings": True})
    ),
    "int8 cache, grouped heads 3:1": ModelConfig(
        "llama3", num_heads=12, num_kv_heads=4, precision=Precision(cache="int8"), **_SMALL
    ),
}
MIXTURE = "mixture of experts"
QUANTIZED: dict[str, tuple[str, ...]] = {"int8": (), "int4": (), "float8_rowwise": (HEAD,), "mxfp8": (HEAD,)}
"""Shapes named after what their layers compute in, and the layers that do not."""
BLOCKS = {
    "norms around, two rotations": ModelConfig(
        "gemma3", num_heads=8, num_kv_heads=4, qk_norm="head", norm_offset=True, activation="gelu_tanh", mlp_bias=True,
        norms=Norms("norm_1", "norm_2", "norm_3", "norm_4"), windows=(20, 0), window_rope=Rope(10_000.0),
        embedding_scale=8.0, residual_scale=0.7, logits_scale=0.5, rotated_features=32, rope_interleaved=True,
        **(_SMALL | {"head_dim": 64}),
    ),
    "norms after, fused, capped": ModelConfig(
        "olmo2", num_heads=8, num_kv_heads=4, qk_norm="all heads", norms=Norms("", "norm_1", "", "norm_2"),
        fused=("qkv_proj", "gate_up_proj"), long_queries=LongQueries(0.1, 16), rotated=(True, False), qkv_bias=False,
        output_bias=True, logits_softcap=15.0, **_SMALL,
    ),
    "norms without weights, no gate": ModelConfig(
        "nanochat", num_heads=8, num_kv_heads=4, qk_norm="head", plain_norms=True, embedding_norm=True,
        activation="relu_squared", rope_scaling=LinearRope(-1.0), **_SMALL,
    ),
    "linear attention, gated attention": ModelConfig(
        "qwen3", num_heads=8, num_kv_heads=4, qk_norm="head", attention_gate=True, delta=DeltaNet(4, 8, 16, 32),
        delta_layers=(True, True, True, False), **_SMALL,
    ),
}  # fmt: skip
"""Shapes with what a block can have elsewhere than Llama's, in combinations that no family has."""
MODELS = (
    SHAPES
    | BLOCKS
    | {
        MIXTURE: ModelConfig(
            "qwen3_moe",
            num_heads=8,
            num_kv_heads=4,
            qk_norm="head",
            # One layer with a dense feed-forward, and experts that four ranks can divide.
            experts=ExpertsConfig(8, 32, Routing(2), dense_layers=(1,)),
            **_SMALL,
        ),
        **{
            linear: ModelConfig("llama3", num_heads=8, num_kv_heads=4, precision=Precision(linear, keep), **_SMALL)
            for linear, keep in QUANTIZED.items()
        },
    }
)


@dataclass(frozen=True)
class Layout:
    """A layout of the trainer."""

    name: str
    ranks: int
    parallel: ParallelConfig = field(hash=False)


P = ParallelConfig
LAYOUTS = (
    Layout("1", 1, P()),
    Layout("FSDP 2", 2, P()),
    Layout("HSDP 2 x 2", 4, P(data_replicate=2)),
    Layout("TP 2", 2, P(tensor=2)),
    Layout("TP 4", 4, P(tensor=4)),
    Layout("CP 2", 2, P(context=2)),
    Layout("PP 2, 1F1B", 2, P(pipeline=2)),
    Layout("PP 2, interleaved", 2, P(pipeline=2, pipeline_schedule="interleaved")),
    Layout("PP 2, ZBV", 2, P(pipeline=2, pipeline_schedule="zbv")),
    Layout("FSDP 2 x TP 2", 4, P(tensor=2)),
    Layout("CP 2 x TP 2", 4, P(context=2, tensor=2)),
    Layout("TP 2 x PP 2", 4, P(tensor=2, pipeline=2)),
    Layout("full DTensor: CP 2 x TP 2", 4, P(context=2, tensor=2, full_dtensor=True)),
)

EXPERT_LAYOUTS = (
    Layout("expert 2", 2, P(expert=2)),
    Layout("FSDP 2 x expert 2", 4, P(expert=2)),
    Layout("HSDP 2 x expert 2", 4, P(data_replicate=2, expert=2)),
    Layout("expert 2 x TP 2", 4, P(expert=2, tensor=2)),
    Layout("CP 2, expert 2", 2, P(context=2, expert=2)),
    Layout("PP 2 x expert 2", 4, P(pipeline=2, expert=2)),
)
"""Only for mixtures, and never compiled. With context parallelism the ranks of a sequence share the experts."""


@dataclass(frozen=True)
class Generating:
    """An engine that samples the load."""

    shape: str
    dtype: str
    backend: Backend
    ranks: int


@dataclass(frozen=True)
class Scoring:
    """A training step on what was sampled."""

    shape: str
    dtype: str
    backend: Backend
    layout: Layout
    recompute: Recompute
    generators: tuple[int, ...] = GENERATORS
    """Tensor degrees of the engines that it is compared with."""

    @property
    def ranks(self) -> int:
        return self.layout.ranks

    def sampled_by(self, ranks: int) -> Generating:
        """The engine with this many ranks that made the samples."""
        return Generating(self.shape, self.dtype, self.backend, ranks)

    def engines(self) -> list[Generating]:
        return [self.sampled_by(ranks) for ranks in self.generators]


Job = Generating | Scoring
Results = Mapping[tuple[Job, int], Any]
"""What `parity_worker.sample` and `score` return, by job and rank."""


def scoring_jobs(covering: bool) -> list[Scoring]:
    """All combinations of the trainer's settings or, if `covering`, enough that every pair of settings occurs."""
    jobs = _covering() if covering else _full()
    # ZBV's split backward is refused for compiled layers.
    return [j for j in jobs if not (j.backend == "inductor" and j.layout.parallel.pipeline_schedule == "zbv")]


def _full() -> Iterator[Scoring]:
    for shape, dtype, backend, layout, recompute in product(SHAPES | BLOCKS, DTYPES, BACKENDS, LAYOUTS, RECOMPUTE):
        yield Scoring(shape, dtype, backend, layout, recompute)
    for linear, dtype, backend, layout in product(QUANTIZED, DTYPES, BACKENDS, LAYOUTS):
        yield Scoring(linear, dtype, backend, layout, "none")
    for dtype, backend, layout, recompute in product(DTYPES, BACKENDS, LAYOUTS + EXPERT_LAYOUTS, RECOMPUTE):
        if backend == "none" or layout in LAYOUTS:
            yield Scoring(MIXTURE, dtype, backend, layout, recompute)


def _covering() -> Iterator[Scoring]:
    shapes = list(SHAPES)
    for row, layout in enumerate(LAYOUTS):
        for column, recompute in enumerate(RECOMPUTE):
            # A Latin square of recompute modes and shapes; each layout has both dtypes.
            dtype = DTYPES[(row + (column == 1)) % 2]
            yield Scoring(shapes[(row + column) % 3], dtype, "none", layout, recompute)
        # Every rank compiles every shape and dtype separately, which takes time: only one of them over ranks.
        yield Scoring("qwen3, tied head", "float32", "inductor", layout, RECOMPUTE[row % 3])
    yield Scoring("llama3", "bfloat16", "inductor", LAYOUTS[0], "full", (1,))
    yield Scoring("int8 cache, grouped heads 3:1", "float32", "inductor", LAYOUTS[0], "selective", (1,))
    for row, layout in enumerate(LAYOUTS + EXPERT_LAYOUTS):
        yield Scoring(MIXTURE, DTYPES[row % 2], "none", layout, RECOMPUTE[row % 3])
    yield Scoring(MIXTURE, "float32", "inductor", LAYOUTS[3], "none", (1, 2))
    for row, layout in enumerate(LAYOUTS):
        for column, block in enumerate(BLOCKS):
            yield Scoring(block, DTYPES[(row + column) % 2], "none", layout, RECOMPUTE[row % 3])
    for block in BLOCKS:
        yield Scoring(block, "bfloat16", "inductor", LAYOUTS[3], "none", (1, 2))
    formats = list(QUANTIZED)
    for row, layout in enumerate(LAYOUTS):
        yield Scoring(formats[row % 4], DTYPES[row // 4 % 2], "none", layout, "none")
    yield Scoring("int8", "bfloat16", "inductor", LAYOUTS[0], "none", (1,))
    for layout in (LAYOUTS[0], LAYOUTS[3]):
        yield Scoring("int8", "float32", "inductor", layout, "none", (1, 2))


@dataclass
class Cell:
    """A layout of the trainer compared with one of the generator."""

    trainer: Scoring
    generator: int
    checked: int = 0
    different: int = 0
    largest: float = 0.0

    def as_json(self) -> dict[str, Any]:
        own = {"trainer": self.trainer.layout.name, "recompute": self.trainer.recompute, "generator": self.generator}
        own |= {
            "model": self.trainer.shape,
            "dtype": self.trainer.dtype,
            "compiled": self.trainer.backend == "inductor",
        }
        return own | {"checked": self.checked, "different": self.different, "max_delta": self.largest}


def run_jobs(scoring: Sequence[Scoring]) -> Results:
    """The results of every rank of every job, and of the engines that it needs.

    Raises torch.multiprocessing.spawn.ProcessException with the traceback of a rank that fails.
    """
    from lockstep.rl.scoring.parity_worker import run_ranks

    jobs: list[Job] = list(dict.fromkeys(engine for job in scoring for engine in job.engines()))
    jobs += scoring
    results: dict[tuple[Job, int], Any] = {}
    with Progress("parity", len(jobs), "layout") as bar:
        # One process first: all trainers score what it has sampled.
        for ranks in sorted({job.ranks for job in jobs}):
            for job, rank, result in run_ranks(ranks, [job for job in jobs if job.ranks == ranks], results):
                results[job, rank] = result
                bar.reach(bar.done + (rank == 0))
    return results


def compare(results: Results, scoring: Sequence[Scoring]) -> list[Cell]:
    """Every layout of the trainer with every layout of the generator."""
    return [_cell(results, job, generator) for job in scoring for generator in job.generators]


def _cell(results: Results, job: Scoring, generator: int) -> Cell:
    cell = Cell(job, generator)
    sampled = _bits_sampled(results, job.sampled_by(generator))
    # The trainer has scored what one process sampled: a different token counts like a different number.
    reference = _bits_sampled(results, job.sampled_by(1))
    cell.checked = len(reference)
    if sampled.shape != reference.shape or (sampled[:, 0] != reference[:, 0]).any():
        cell.different, cell.largest = cell.checked, float("inf")
        return cell
    seen = np.zeros(cell.checked, dtype=bool)
    wrong = np.zeros(cell.checked, dtype=bool)
    for rank in range(job.ranks):
        result = results[job, rank]
        tokens = np.array(result["tokens"], dtype=np.int64)
        bits = np.array(result["bits"], dtype=np.int32)
        theirs = sampled[tokens, 1].astype(np.int32)
        seen[tokens] = True
        wrong[tokens] |= (bits != theirs) | ~np.isfinite(bits.view(np.float32))
        with np.errstate(invalid="ignore"):
            delta = np.abs(bits.view(np.float32) - theirs.view(np.float32))
        cell.largest = max([cell.largest, *np.nan_to_num(delta[bits != theirs], nan=np.inf).tolist()])
        cell.different += result["replays_different"]
    cell.different += int((wrong | ~seen).sum())
    return cell


def _bits_sampled(results: Results, engine: Generating) -> Any:
    """`[tokens, 2]`: token and the log-probability's bits, from rank 0 if all ranks agree; empty otherwise."""
    found = []
    for rank in range(engine.ranks):
        samples = [c for request in results[engine, rank] for c in request["completions"]]
        found.append(np.array([pair for c in samples for pair in zip(c["tokens"], c["bits"])], dtype=np.int64))
    different = [other for other in found[1:] if not np.array_equal(other, found[0])]
    return different[0][:0] if different else found[0]


def table(cells: list[Cell]) -> str:
    """The cells as text: `checked / different` by layouts and dtype, summed over shapes and recompute modes."""
    columns = [(dtype, generator) for dtype in DTYPES for generator in GENERATORS]
    heads = [f"{dtype}, " + (f"TP {generator}" if generator > 1 else "1") for dtype, generator in columns]
    rows = [["trainer \\ generator", *heads]]
    for backend, layout in product(BACKENDS, LAYOUTS + EXPERT_LAYOUTS):
        if backend == "inductor" and layout in EXPERT_LAYOUTS:
            continue
        own = [cell for cell in cells if cell.trainer.layout is layout and cell.trainer.backend == backend]
        row = [layout.name + (", compiled" if backend == "inductor" else "")]
        for column in columns:
            of = [cell for cell in own if (cell.trainer.dtype, cell.generator) == column]
            row.append(f"{sum(c.checked for c in of)} / {sum(c.different for c in of)}" if of else "-")
        rows.append(row)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in rows)


def write_results(cells: list[Cell], folder: Path) -> None:
    """Writes `parity.json` with every cell, and `parity.png`, the table in color."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "reduction_chunks": CHUNKS,
        "layouts": {each.name: asdict(each.parallel) for each in LAYOUTS + EXPERT_LAYOUTS},
    }
    (folder / "parity.json").write_text(json.dumps(settings | {"cells": [c.as_json() for c in cells]}, indent=1))
    _draw(cells, folder / "parity.png")


def _draw(cells: list[Cell], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    lines = [line.split("  ") for line in table(cells).splitlines()]
    rows = [[text.strip() for text in line if text.strip()] for line in lines]
    figure, axes = pyplot.subplots(figsize=(11, 0.24 * len(rows)))
    axes.axis("off")
    colours = [
        ["white", *("#cfead6" if text.endswith("/ 0") else "#eeeeee" if text == "-" else "#f3b3a7" for text in row[1:])]
        for row in rows[1:]
    ]
    drawn = axes.table(rows[1:], colLabels=rows[0], cellColours=colours, loc="center", cellLoc="center")
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(8)
    drawn.auto_set_column_width(list(range(len(rows[0]))))
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)
