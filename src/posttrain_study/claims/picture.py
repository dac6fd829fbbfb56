"""Pictures of experiments, as SVG files that are the same for the same figures."""

from collections.abc import Callable
from pathlib import Path

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure


def save(draw: Callable[[Figure], None], size: tuple[float, float], path: Path) -> None:
    """Draw into a figure of this size, in inches, and save it."""
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasSVG(figure)
    draw(figure)
    for axes in figure.axes:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    # text as text is smaller than its outlines
    with matplotlib.rc_context({"svg.hashsalt": "posttrain", "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", metadata={"Date": None})
