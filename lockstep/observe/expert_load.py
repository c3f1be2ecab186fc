"""A plot of the load of a mixture's experts, layer by layer."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import UserError
from lockstep.observe.curves import Curve
from lockstep.observe.run_folder import LOADS, RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

MEANING = (
    "Tokens routed to each expert in the last step, relative to the mean of its layer: 1 is an even load. A dark "
    "expert is rarely chosen and learns little; a layer with one bright expert relies on it."
)
HIGHEST = 3.0
"""Multiple of the mean from which a load has the brightest color."""
MAX_EXPERTS = 4096

Load = list[list[int]]
"""How often each expert was chosen, layer by layer."""


def expert_load_svg(run: Path) -> Curve | None:
    """The load in the run's last step as inline SVG; None if there is none, or its model has no experts."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    loads = _loads(run)
    if not loads:
        return None
    with rc_context({"svg.fonttype": "none", "font.family": "sans-serif"}):
        figure = Figure(figsize=(3.9, 2.3))
        image = _draw(figure.add_axes((0.14, 0.19, 0.72, 0.76)), loads[max(loads)])
        bar = figure.colorbar(image, cax=figure.add_axes((0.88, 0.19, 0.03, 0.76)))
        bar.ax.tick_params(labelsize=7)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True)
    text = buffer.getvalue()
    return Curve("Expert load", text[text.index("<svg") :], MEANING)


def expert_load_png(run: str | Path, path: str | Path) -> None:
    """Plots the run's first, middle and last step side by side. Raises UserError for a run without loads."""
    from matplotlib.figure import Figure

    loads = _loads(Path(run))
    if not loads:
        raise UserError(f"{run}: no {LOADS} with the load of a step; only runs of mixture-of-experts models write it")
    steps = sorted(loads)
    chosen = sorted({steps[0], steps[len(steps) // 2], steps[-1]})
    figure = Figure(figsize=(3.2 * len(chosen) + 0.8, 2.6), layout="constrained")
    columns = figure.subplots(1, len(chosen), squeeze=False)[0]
    for axes, step in zip(columns, chosen):
        axes.set_title(f"step {step}", fontsize=9)
        image = _draw(axes, loads[step])
    bar = figure.colorbar(image, ax=columns)
    bar.set_label("times the layer's mean", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    figure.savefig(path, format="png", dpi=110)


def _draw(axes: Axes, load: Load) -> AxesImage:
    """Draws each expert's share, as a multiple of its layer's mean."""
    layers, experts = len(load), len(load[0])
    shares = [[count * experts / sum(layer) for count in layer] for layer in load]
    axes.set_xlabel("expert", fontsize=8)
    axes.set_ylabel("mixture", fontsize=8)
    axes.set_yticks(range(0, layers, max(1, layers // 6)))
    axes.set_xticks(range(0, experts, max(1, experts // 8)))
    axes.tick_params(labelsize=7)
    # As an embedded image, which is much smaller than thousands of rectangles.
    return axes.imshow(shares, aspect="auto", vmin=0, vmax=HIGHEST, cmap="viridis", interpolation="nearest")


def _loads(run: Path) -> dict[int, Load]:
    """The load of the mixture layers, by step; damaged lines are skipped."""
    file, loads = RunFolder(run).expert_load, {}
    for line in file.read_text(errors="replace").splitlines() if file.is_file() else ():
        try:
            values = json.loads(line)
            mixtures = [[int(count) for count in layer] for layer in values["load"] if sum(layer) > 0]
            if len({len(layer) for layer in mixtures}) == 1 and len(mixtures[0]) <= MAX_EXPERTS:
                loads[int(values["step"])] = mixtures
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue
    return loads
