"""Start ranks on a Ray cluster, as processes of actors in one placement group: `train.ranks`.

Each actor reserves the resources of its rank, starts the command that torchrun would start, and forwards its
output. This process only listens, and forwards Ctrl-C and SIGTERM to the ranks.
"""

import codecs
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any

from posttrain.base.libraries import require
from posttrain.errors import describe_exit
from posttrain.loop.sampling import sampler_needs
from posttrain.models.pretrained import parameter_count, silent
from posttrain.plan.model_info import read_model_info, with_companion_models
from posttrain.process.child import Child
from posttrain.recipe.recipe import Recipe
from posttrain.rollout.cluster import SPARE, Cluster
from posttrain.rollout.ray import VERSIONS, call, how_ended
from posttrain.rollout.remote import END_S
from posttrain.run.journal import stop_requested
from posttrain.types import RunError

_HEAR_S = 1.0
_PLACE_S = 120.0


class _Rank:
    """The process of a rank, in an actor."""

    def __init__(self, folder: str) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # `ask` forwards it
        self._folder = folder
        self._news = threading.Condition()
        self._output: list[tuple[int, bytes]] = []
        self._code: int | None = None
        self._child: Child | None = None

    def place(self) -> tuple[str, str, int]:
        """Return (node id, address, free port) of its machine."""
        import ray

        with socket.socket() as port:
            port.bind(("", 0))
            context = ray.get_runtime_context()
            return context.get_node_id(), ray.util.get_node_ip_address(), port.getsockname()[1]

    def start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start posttrain with these arguments, in the folder of the original command."""
        self._child = child = Child(
            [sys.executable, "-P", "-m", "posttrain", *arguments],
            session=True,
            cwd=self._folder,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        threading.Thread(target=self._read, args=(child,), daemon=True).start()

    def _read(self, child: Child) -> None:
        until = math.inf
        while child.is_open() and time.monotonic() < until:
            if parts := child.exchange(_HEAR_S):
                with self._news:
                    self._output += parts
                    self._news.notify_all()
            if until == math.inf and child.code is not None:  # its children may hold the pipes open
                until = time.monotonic() + END_S
        code = child.wait()
        with self._news:
            self._code = code
            self._news.notify_all()

    def read_output(self, timeout_s: float) -> tuple[list[tuple[int, bytes]], int | None]:
        """Wait for output or the end; return ([(1: stdout or 2: stderr, bytes)], exit code or None)."""
        with self._news:
            self._news.wait_for(lambda: self._output or self._code is not None, timeout_s)
            output, self._output = self._output, []
            return output, self._code

    def ask(self, number: int) -> None:
        """Send a signal to the process; SIGKILL goes to its whole process tree."""
        if self._child and number == signal.SIGKILL:
            self._child.kill()
        elif self._child:
            self._child.send_signal(number)


def launch(recipe: Recipe, arguments: Sequence[str]) -> int:
    """Run posttrain with these arguments on each of train.ranks ranks; return the exit code.

    Raises UserError if Ray is not installed, or if the cluster or its resources are not available.
    """
    require("ray", "train.ranks")
    train, ahead, memory = recipe.train, recipe.async_, SPARE
    needs = {"train.cpus": train.ranks * train.cpus, "train.gpus": train.ranks * train.gpus}
    if ahead.where == "ray":
        needs |= sampler_needs(ahead, recipe.run.threads or max(1, int(train.cpus)))
        policy = with_companion_models(recipe, read_model_info(recipe, silent), silent)
        memory += VERSIONS * parameter_count(policy.config) * policy.dtype.itemsize
    with closing(Cluster(ahead.address, needs, memory)) as cluster, _place_ranks(recipe) as actors:
        _start(actors, arguments, cluster.address, train.gpus > 0)
        return _listen(actors)


@contextmanager
def _place_ranks(recipe: Recipe) -> Iterator[list[Any]]:
    """Yield an actor for each rank, in one placement group; remove both at the end."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    train = recipe.train
    share = {"CPU": train.cpus} | ({"GPU": train.gpus} if train.gpus else {})
    group = placement_group([share] * train.ranks, strategy="PACK")
    actors: list[Any] = []
    try:
        if not ray.wait([group.ready()], timeout=train.deadline_s)[0]:
            raise RunError(
                "start ranks",
                f"the cluster had no room for {train.ranks} ranks of {share} in {train.deadline_s:g} s",
            )
        groups = dict.fromkeys(("start", "read_output", "ask"), 1)
        kind = ray.remote(
            num_cpus=train.cpus, num_gpus=train.gpus, max_restarts=0, concurrency_groups=groups
        )(_Rank)
        for n in range(train.ranks):
            where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=n)
            actors.append(kind.options(scheduling_strategy=where).remote(os.getcwd()))
        yield actors
    finally:
        with suppress(ray.exceptions.RayError):
            ray.wait([call(a, "ask", signal.SIGKILL) for a in actors], num_returns=len(actors), timeout=END_S)
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)


def _start(actors: Sequence[Any], arguments: Sequence[str], address: str, own_gpus: bool) -> None:
    """Start each rank with the address of rank 0."""
    import ray

    machines: Counter[str] = Counter()
    calls = []
    try:
        places = ray.get([actor.place.remote() for actor in actors], timeout=_PLACE_S)
    except ray.exceptions.RayError as error:
        raise RunError("place a rank", " ".join(str(error).split())[:300]) from error
    for n, (actor, (machine, _, _)) in enumerate(zip(actors, places, strict=True)):
        environment = {
            "RANK": str(n),
            "WORLD_SIZE": str(len(actors)),
            # Ray shows a rank its reserved GPUs only, or, if it reserved none, all of the machine.
            "LOCAL_RANK": "0" if own_gpus else str(machines[machine]),
            "MASTER_ADDR": places[0][1],
            "MASTER_PORT": str(places[0][2]),
            "RAY_ADDRESS": address,
        }
        if token := os.environ.get("RAY_AUTH_TOKEN"):
            environment["RAY_AUTH_TOKEN"] = token
        machines[machine] += 1
        calls.append(call(actor, "start", arguments, environment))
    try:
        ray.get(calls)
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None) or error
        raise RunError("start a rank", " ".join(str(cause).split())[:300]) from error


def _listen(actors: Sequence[Any]) -> int:
    """Forward the output of ranks until the last has ended; return the exit code of the run."""
    import ray

    codes: dict[int, int] = {}
    decoder = codecs.getincrementaldecoder("utf-8")
    decoders = {(n, number): decoder("replace") for n in range(len(actors)) for number in (1, 2)}
    forwarded = False
    with stop_requested() as stopped:
        calls = {call(actor, "read_output", _HEAR_S): n for n, actor in enumerate(actors)}
        while calls:
            if stopped() and not forwarded:
                forwarded = True
                for actor in actors:
                    call(actor, "ask", signal.SIGTERM)
            for answer in ray.wait(list(calls), timeout=_HEAR_S)[0]:
                n = calls.pop(answer)
                try:
                    output, code = ray.get(answer)
                except ray.exceptions.RayError as error:
                    output, code = [(2, f"rank {n}: {how_ended(error)}\n".encode())], 1
                for number, text in output:
                    stream = sys.stdout if number == 1 else sys.stderr
                    stream.write(decoders[n, number].decode(text))
                    stream.flush()
                if code is None:
                    calls[call(actors[n], "read_output", _HEAR_S)] = n
                else:
                    codes[n] = code
    for n, code in sorted(codes.items()):
        if code < 0:
            print(f"rank {n} was ended by {describe_exit(code)}", file=sys.stderr)
    bad = [code for code in codes.values() if code]
    return (2 if 2 in bad else 1) if bad else 0
