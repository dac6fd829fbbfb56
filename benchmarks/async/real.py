"""What a weight sync through shared memory costs, part by part, and how long a killed sampler is missed.

    python benchmarks/async/real.py --model DIR --repeat 5

A weight sync in one process: the copy into shared memory with its digest, the reader's digest before it takes
anything, the engine's load, which makes another, and the canary. A loss: a sampler's process is killed by
kill -9 while it plays; seconds until that is noticed, until its successor holds the weights, and until the
first lost group is finished.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from posttrain.engines.native.engine import NativeEngine
from posttrain.loop.sampling import WorkerFactory, build_native_engine
from posttrain.loop.weight_sync import TOLERANCE
from posttrain.models.fingerprint import digest
from posttrain.models.pretrained import silent
from posttrain.plan.model_info import load_weights, read_model_info, with_companion_models
from posttrain.process.machine import configure
from posttrain.recipe import config
from posttrain.recipe.recipe import Recipe
from posttrain.rollout.pool import SamplerPool
from posttrain.rollout.protocol import GroupRequest
from posttrain.rollout.remote import ProcessChannel
from posttrain.rollout.snapshots import SharedMemoryStore, Snapshot, incarnation, load_snapshot
from posttrain.types import Sampling, Task

DEMO = Path(__file__).parents[2] / "recipes" / "arithmetic_grpo.toml"
ROW = tuple(range(1, 13))
"""Tokens of the canary."""
Weights = list[tuple[str, torch.Tensor]]


def main() -> None:
    """Measures both and prints them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    configure(1)
    sets = [f"model.path={options.model}", "run.threads=1", "rollout.group_size=8"]
    recipe = config.read(DEMO, sets).recipe
    policy = with_companion_models(recipe, read_model_info(recipe, silent), silent)
    engine, store = build_native_engine(recipe, policy), SharedMemoryStore()
    learnt = [(name, tensor.detach()) for name, tensor in load_weights(recipe, policy).named_parameters()]
    try:
        handed(engine, learnt, store, options.repeat)
        lost(recipe, snapshot(engine, learnt, store, 1), options.repeat)
    finally:
        store.close()


def snapshot(engine: NativeEngine, learnt: Weights, store: SharedMemoryStore, version: int) -> Snapshot:
    """These weights as a published version; the engine holds them."""
    store.retain(set())
    return Snapshot(
        version=version,
        number=version,
        run=incarnation(),
        place=store.put(version, lambda: learnt),
        canary=ROW,
        logps=tuple(engine.score(list(ROW))),
        tolerance=TOLERANCE[learnt[0][1].dtype],
    )


def handed(engine: NativeEngine, learnt: Weights, store: SharedMemoryStore, repeat: int) -> None:
    """Prints the parts of a weight sync."""
    found: dict[str, list[float]] = {}

    def timed(name: str, begin: float) -> None:
        found.setdefault(name, []).append(time.perf_counter() - begin)

    for version in range(1, repeat + 2):
        begin = time.perf_counter()
        place = store.put(version, lambda: learnt)
        timed("put: copy and digest", begin)
        begin = time.perf_counter()
        digest(learnt)
        timed("digest alone", begin)
        begin = time.perf_counter()
        engine.load(place.open(), version)
        timed("load: copy and digest", begin)
        store.retain(set())
        published = snapshot(engine, learnt, store, version + 1000)
        begin = time.perf_counter()
        load_snapshot(engine, published)
        timed("take: digest, load and canary", begin)
    size = store.bytes // (2 * (repeat + 1))
    print(
        f"{size:,} bytes; seconds, median (least–most) of {repeat} after a first\n\n| part | s |\n|---|---|"
    )
    for name, seconds in found.items():
        print(f"| {name} | {told(seconds[1:])} |")


def told(seconds: list[float]) -> str:
    """The median with the range."""
    return f"{statistics.median(seconds):.3f} ({min(seconds):.3f}–{max(seconds):.3f})"


def lost(recipe: Recipe, published: Snapshot, repeat: int) -> None:
    """Prints how long it takes until what a killed sampler was playing is played."""
    sampling = Sampling(max_new_tokens=64)
    tasks = [
        Task(id=str(n), messages=({"role": "user", "content": f"What is {n} + {n}?"},), answer=str(2 * n))
        for n in range(64)
    ]
    found: dict[str, list[float]] = {"noticed": [], "weights proven": [], "first lost group finished": []}
    with tempfile.TemporaryDirectory() as logs:

        def start(number: int) -> ProcessChannel:
            return ProcessChannel(WorkerFactory(recipe, 1), Path(logs) / f"{number}.log")

        pool = SamplerPool(start, 1, max_restarts=repeat)
        try:
            pool.publish(published)
            while pool.oldest_version < 1:
                pool.poll(0.05)
            for n in range(repeat):
                pool.admit(
                    [
                        GroupRequest(number=64 * n + t, task=task, size=8, sampling=sampling)
                        for t, task in enumerate(tasks)
                    ]
                )
                pool.poll(0.5)
                channel = pool.workers[0].channel
                assert isinstance(channel, ProcessChannel)
                left, begin = set(pool.workers[0].playing), time.perf_counter()
                channel.kill()
                while pool.restarted == n:
                    left -= {each.number for each in pool.poll(0.01)}
                found["noticed"].append(time.perf_counter() - begin)
                while pool.oldest_version < 1:
                    pool.poll(0.01)
                found["weights proven"].append(time.perf_counter() - begin)
                while not (done := {each.number for each in pool.poll(0.01)} & left):
                    pass
                found["first lost group finished"].append(time.perf_counter() - begin)
                left -= done
                while left:
                    left -= {each.number for each in pool.poll(0.1)}
        finally:
            pool.close()
    print("\nseconds after kill -9\n\n| until | s |\n|---|---|")
    for name, seconds in found.items():
        print(f"| {name} | {told(seconds)} |")


if __name__ == "__main__":
    main()
