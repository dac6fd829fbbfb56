"""The report of a run: one HTML file made from the run directory alone.

`write` reads a run directory and writes a page that needs no network, no server and no library:
curves, alarms, the plan, and every token of the rollouts it holds. `curves_svg` draws one metric
of several runs as a small picture. Neither looks at a clock, so equal directories give equal bytes,
and both accept a run that is still running or was killed in the middle of a line.

    record     reads a run directory, tolerating half-written files
    searches   trees/*.jsonl, likewise
    rollouts   samples/*.jsonl, packed and thinned to a size that opens at once
    headline   the few numbers at the top
    alarms     rules that a healthy run keeps
    page       puts the parts above and the files of assets/ into one page
    svg        the static picture
"""

from posttrain.report.page import write
from posttrain.report.svg import curves_svg

__all__ = ["curves_svg", "write"]
