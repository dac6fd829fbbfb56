"""Where the time of a recipe's updates goes, by part and by operator, under torch.profiler.

    python benchmarks/profile_recipe.py recipes/arithmetic_grpo.toml --updates 3 --set rollout.groups=8

The first update is not counted, and nothing is evaluated, saved or tracked. All numbers are means of an
update. A part has the seconds that no part within it has, so the shares of the parts add up to 1. Only
PyTorch's own products count as work: where a compiled kernel multiplies, the share of the peak is too low.
The peak is that of square products in the recipe's dtype, measured here with the recipe's threads.

The profiler sees the loop's own thread: of samplers elsewhere only the wait is shown (--set async.place=here
brings one into it), and vLLM's work is part of sampling. It takes time of its own for each operator.
"""

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import profile, record_function

from posttrain.api.opening import open_session
from posttrain.engines.native.runner import ModelRunner
from posttrain.learner.forward import Net
from posttrain.learner.optim import OptimizedWeights
from posttrain.learner.passes import Passes
from posttrain.loop.session import LoopSession
from posttrain.recipe import config
from posttrain.rollout import rollouts
from posttrain.verifiers.pool import Pool

PHASES = ("an update", "sampling", "training", "weight sync")
METHODS = (
    (ModelRunner, "prefill", "prefill"),
    (ModelRunner, "decode", "decoding"),
    (Pool, "submit", "judging"),
    (Pool, "poll", "judging"),
    (rollouts, "guarded_reply", "environment"),
    (Passes, "score", "scoring"),
    (Net, "forward", "forward"),
    (torch.Tensor, "backward", "backward"),
    (OptimizedWeights, "clip", "optimiser"),
    (OptimizedWeights, "step", "optimiser"),
)
"""(owner, method, part) of what is a part of a phase."""
PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}
NAMES = {*PHASES, *(part for _, _, part in METHODS)}
MEASURE_S = 0.4


@dataclass
class Cost:
    """What a part or an operator took in all profiled updates."""

    seconds: float = 0.0
    calls: int = 0
    flop: float = 0.0


def main() -> None:
    """Profile a recipe and print two tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--updates", type=int, default=3, help="how many, after the first")
    parser.add_argument("--operators", type=int, default=12, help="rows of the second table")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="as in posttrain train"
    )
    options = parser.parse_args()
    recipe = config.read(options.recipe, [*options.set, "track.sinks=[]"])
    for owner, method, part in METHODS:
        setattr(owner, method, as_part(part, getattr(owner, method)))
    with (
        tempfile.TemporaryDirectory() as place,
        LoopSession(open_session(recipe, Path(place) / "run", title="profile")) as session,
    ):
        weight = next(session.learner.model.parameters())
        peak = product_peak(weight.device, weight.dtype)
        update(session)
        with profile(with_flops=True) as profiler:
            for _ in range(options.updates):
                update(session)
    parts = costs_of_parts(profiler.events())
    whole = sum(cost.seconds for cost in parts.values())
    print(f"{whole / options.updates:.3f} s an update; peak {peak / 1e9:.0f} GFLOP/s in {weight.dtype}")
    shown = {"part": parts, "operator": costs_of_operators(profiler.key_averages(), options.operators)}
    for title, costs in shown.items():
        print(f"\n{title:44}{'seconds':>9}{'share':>8}{'calls':>9}{'GFLOP/s':>9}{'of peak':>9}")
        for name, cost in costs.items():
            rate = cost.flop / cost.seconds if cost.seconds else 0.0
            work = f"{rate / 1e9:9.1f}{rate / peak:9.1%}" if rate else ""
            seconds, calls = cost.seconds / options.updates, cost.calls / options.updates
            print(f"{name[:43]:44}{seconds:9.4f}{cost.seconds / whole:8.1%}{calls:9.3g}{work}")


def update(session: LoopSession) -> None:
    """Make one update without an evaluation or a checkpoint."""
    with span("an update"):
        with span("sampling"):
            groups = session.sample()
        if groups:
            with span("training"):
                session.update(groups)
            with span("weight sync"):
                session.publish()


@contextmanager
def span(name: str) -> Iterator[None]:
    """Record what is inside under this name; a GPU is waited for at both ends."""
    settle()
    with record_function(name):
        yield
        settle()


def settle() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def as_part(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with each of its calls in a span."""

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        with span(name):
            return function(*args, **named)

    return call


def costs_of_parts(events: Iterable[Any]) -> dict[str, Cost]:
    """Add up what each part has beyond the parts within it; an operator belongs to the innermost part.

    events: of torch.profiler. A part is named by the parts around it: "training / scoring / forward".
    """
    costs, stack = defaultdict[str, Cost](Cost), list[tuple[str, float]]()
    on_cpu = (event for event in events if event.device_type == DeviceType.CPU)
    for event in sorted(on_cpu, key=lambda e: (e.time_range.start, -e.time_range.end)):
        begin, end = event.time_range.start, event.time_range.end
        while stack and stack[-1][1] <= begin:
            stack.pop()
        around = stack[-1][0] if stack else ""
        if event.name in NAMES:
            inside = [each for each in around.split(" / ") if each not in ("", PHASES[0], event.name)]
            path = " / ".join([*inside, event.name])
            stack.append((path, end))
            costs[path].seconds += (end - begin) / 1e6
            costs[path].calls += 1
            if around:
                costs[around].seconds -= (end - begin) / 1e6
        elif around and event.name in PRODUCTS:
            costs[around].flop += event.flops
    return dict(sorted(costs.items()))


def costs_of_operators(averages: Iterable[Any], count: int) -> dict[str, Cost]:
    """Return the operators with the most time of their own; on a GPU the time of its kernels."""
    clock = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    costs = {
        each.key: Cost(getattr(each, clock) / 1e6, each.count, each.flops if each.key in PRODUCTS else 0)
        for each in averages
        if each.key not in NAMES
    }
    return dict(sorted(costs.items(), key=lambda item: -item[1].seconds)[:count])


def product_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Measure FLOP/s of square products, which grow until one takes a hundredth of a second."""
    best, n, seconds = 0.0, 128, 0.0
    while seconds < 0.01 and n < 1 << 14:
        n *= 2
        one, other = (torch.rand(n, n).to(device, dtype) for _ in range(2))
        seconds = fastest(lambda one=one, other=other: torch.mm(one, other))  # type: ignore[misc]
        best = max(best, 2.0 * n**3 / seconds)
    return best


def fastest(call: Callable[[], object]) -> float:
    """Return the seconds of the fastest call, of at least three after one that is not counted."""
    call()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < MEASURE_S and len(times) < 1000):
        settle()
        begin = time.perf_counter()
        call()
        settle()
        times.append(time.perf_counter() - begin)
    return min(times)


if __name__ == "__main__":
    main()
