"""What all plots of our pages have in common: SVG that takes its colours from the page. Pure."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Every colour is a stand-in for one of the page's own (`--name`), which differ between light and dark.
NAMES = ("ink", "grid", "active", "held", "cold", "failed", "standby", "changing", "starting", "unknown")
STAND_INS = {name: f"#0f0e{index:02x}" for index, name in enumerate(NAMES)}
WIDTH_IN, DPI = 10.4, 100


def figure(height_in: float, label: str, below: str) -> tuple[Figure, Axes]:
    """An empty plot; all have the same margins, so that they stand below each other.

    Args:
        label, below: what is upwards, and to the right.
    """
    from matplotlib.figure import Figure

    made = Figure(figsize=(WIDTH_IN, height_in), dpi=DPI)
    made.patch.set_alpha(0)
    left, right, top, bottom = 0.62, 0.28, 0.12, 0.5  # inches
    axes = made.add_axes(
        (left / WIDTH_IN, bottom / height_in, 1 - (left + right) / WIDTH_IN, 1 - (top + bottom) / height_in)
    )
    axes.patch.set_alpha(0)
    axes.set_ylabel(label, color=STAND_INS["ink"])
    axes.set_xlabel(below, color=STAND_INS["ink"], loc="right", labelpad=1)
    axes.tick_params(colors=STAND_INS["ink"], which="both", length=3)
    axes.grid(axis="y", color=STAND_INS["grid"], linewidth=0.7)
    axes.set_axisbelow(True)
    for name, spine in axes.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(STAND_INS["grid"])
    return made, axes


def figure_over(height_in: float, end_s: float, label: str) -> tuple[Figure, Axes]:
    """An empty plot over so many seconds."""
    made, axes = figure(height_in, label, "seconds")
    axes.set_xlim(0, end_s)
    return made, axes


def svg(drawn: Figure) -> str:
    """The drawing, in the page's own colours."""
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "serve-app"}):
        drawn.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    drawing = text.getvalue()
    drawing = drawing[drawing.index("<svg") :]
    names = {color: name for name, color in STAND_INS.items()}
    return re.sub("#0f0e[0-9a-f]{2}", lambda found: f"var(--{names[found[0]]})", drawing)
