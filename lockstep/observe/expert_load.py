"""The load of a mixture's experts, layer by layer, as a picture."""

from __future__ import annotations

import io
import json
from pathlib import Path

from lockstep.observe.curves import Curve

MEANING = (
    "Choices of each expert in the newest checkpoint's step, against the mean of its layer: 1 is an even load. A dark "
    "expert is rarely chosen and learns little; a layer with one bright expert leans on it."
)
HIGHEST = 3.0
"""Times the mean, from which on a load has the brightest colour."""


MOST_EXPERTS = 4096


def expert_load(run: Path) -> Curve | None:
    """Of the run's newest checkpoint; None where it has none, or its model no experts."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    load = _newest_load(run)
    if not load:
        return None
    layers, experts = len(load), len(load[0])
    shares = [[count * experts / max(1, sum(layer)) for count in layer] for layer in load]
    with rc_context({"svg.fonttype": "none", "font.family": "sans-serif"}):
        figure = Figure(figsize=(3.9, 2.3))
        axes = figure.add_axes((0.14, 0.19, 0.72, 0.76))
        # As a picture of its own: thousands of rectangles would not be small.
        image = axes.imshow(shares, aspect="auto", vmin=0, vmax=HIGHEST, cmap="viridis", interpolation="nearest")
        axes.set_xlabel("expert", fontsize=8)
        axes.set_ylabel("layer", fontsize=8)
        axes.set_yticks(range(0, layers, max(1, layers // 6)))
        axes.set_xticks(range(0, experts, max(1, experts // 8)))
        axes.tick_params(labelsize=7)
        bar = figure.colorbar(image, cax=figure.add_axes((0.88, 0.19, 0.03, 0.76)))
        bar.ax.tick_params(labelsize=7)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True)
    text = buffer.getvalue()
    return Curve("Load of the experts", text[text.index("<svg") :], MEANING)


def _newest_load(run: Path) -> list[list[int]]:
    """Of the layers that are mixtures."""
    for state in sorted(run.glob("checkpoints/step_*/state.json"), reverse=True):
        try:
            load = json.loads(state.read_text())["expert_load"]
            mixtures = [layer for layer in load if sum(layer)]
            if len({len(layer) for layer in mixtures}) == 1 and len(mixtures[0]) <= MOST_EXPERTS:
                return mixtures
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
    return []
