"""The plots of the examples, one panel each, as a PNG."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from posttrain.types import UserError
from posttrain_study.classic.examples import Example


def draw(examples: Sequence[Example], file: Path) -> None:
    """Write the picture. Raises UserError if the file cannot be written."""
    columns = 1 if len(examples) == 1 else 2
    rows = -(-len(examples) // columns)
    # A figure with its own canvas needs no window system and leaves no global state.
    figure = Figure(figsize=(8 * columns, 4.5 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for i, example in enumerate(examples):
        axes = figure.add_subplot(rows, columns, i + 1)
        for curve in example.curves:
            axes.plot(curve.x, curve.y, label=curve.label)
        axes.set(title=example.title, xlabel=example.x, ylabel=example.y, yscale=example.scale)
        axes.grid(alpha=0.3)
        axes.legend()
    try:
        figure.savefig(file, dpi=100, format="png")
    except OSError as error:
        raise UserError("--plot", f"cannot write {file}: {error.strerror}", "choose another place") from error
