"""The report of a run: one HTML file made from the run directory alone.

`write` reads a run directory and writes a page that needs no network, no server and no library:
curves, alarms, the plan, and every token of the rollouts it holds. `curves_svg` draws one metric
of several runs as a small picture. Neither looks at a clock, so equal directories give equal bytes,
and neither minds a run that is still going or was killed in the middle of a line.

    record     what a run directory says, read without ever failing on a half-written file
    searches   trees/*.jsonl, likewise
    rollouts   samples/*.jsonl, packed and thinned to a size that opens at once
    headline   the few numbers at the top
    alarms     stated rules that a run can break
    page       the parts above and the files beside this one, put into one page
    curves     the static picture
"""

from posttrain.report.curves import curves_svg
from posttrain.report.page import write

__all__ = ["curves_svg", "write"]
