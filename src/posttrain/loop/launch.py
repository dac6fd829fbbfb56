"""Ranks as processes that actors of a Ray cluster start, in one placement group: `train.ranks`.

Each actor holds what is set aside for its rank, starts the command that torchrun would, and passes on what it
prints. This process only listens; what it is asked to do (Ctrl-C, SIGTERM), it asks of the ranks.
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
from posttrain.errors import how_it_ended
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
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it comes by way of `ask`
        self._folder = folder
        self._news = threading.Condition()
        self._said: list[tuple[int, bytes]] = []
        self._code: int | None = None
        self._child: Child | None = None

    def place(self) -> tuple[str, str, int]:
        """(its machine, an address of that machine, a port that is free there)."""
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            context = ray.get_runtime_context()
            return context.get_node_id(), ray.util.get_node_ip_address(), free.getsockname()[1]

    def start(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts posttrain with these words, in the folder where the command was given."""
        self._child = child = Child(
            [sys.executable, "-P", "-m", "posttrain", *words],
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
                    self._said += parts
                    self._news.notify_all()
            if until == math.inf and child.code is not None:  # what it has started may hold the pipes open
                until = time.monotonic() + END_S
        code = child.wait()
        with self._news:
            self._code = code
            self._news.notify_all()

    def heard(self, timeout_s: float) -> tuple[list[tuple[int, bytes]], int | None]:
        """(what it printed on stdout, 1, and stderr, 2; how it ended), waiting so long for either."""
        with self._news:
            self._news.wait_for(lambda: self._said or self._code is not None, timeout_s)
            said, self._said = self._said, []
            return said, self._code

    def ask(self, number: int) -> None:
        """Sends it a signal; SIGKILL to all that it has started."""
        if self._child and number == signal.SIGKILL:
            self._child.kill()
        elif self._child:
            self._child.send_signal(number)


def launch(recipe: Recipe, words: Sequence[str]) -> int:
    """The exit code of a run on train.ranks ranks, each of which is given these words.

    UserError where Ray, the cluster, or what is asked of it is not there.
    """
    require("ray", "train.ranks")
    train, ahead, memory = recipe.train, recipe.async_, SPARE
    needs = {"train.cpus": train.ranks * train.cpus, "train.gpus": train.ranks * train.gpus}
    if ahead.where == "ray":
        needs |= sampler_needs(ahead, recipe.run.threads or max(1, int(train.cpus)))
        policy = with_companion_models(recipe, read_model_info(recipe, silent), silent)
        memory += VERSIONS * parameter_count(policy.config) * policy.dtype.itemsize
    with closing(Cluster(ahead.address, needs, memory)) as cluster, _placed(recipe) as actors:
        _start(actors, words, cluster.address, train.gpus > 0)
        return _listen(actors)


@contextmanager
def _placed(recipe: Recipe) -> Iterator[list[Any]]:
    """An actor for each rank, in one placement group; neither outlives this."""
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
        groups = dict.fromkeys(("start", "heard", "ask"), 1)
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


def _start(actors: Sequence[Any], words: Sequence[str], address: str, own_gpus: bool) -> None:
    """Tells each rank where the others are, and starts it."""
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
            # Ray shows a rank the GPUs that are set aside for it, and else all of its machine.
            "LOCAL_RANK": "0" if own_gpus else str(machines[machine]),
            "MASTER_ADDR": places[0][1],
            "MASTER_PORT": str(places[0][2]),
            "RAY_ADDRESS": address,
        }
        if token := os.environ.get("RAY_AUTH_TOKEN"):
            environment["RAY_AUTH_TOKEN"] = token
        machines[machine] += 1
        calls.append(call(actor, "start", words, environment))
    try:
        ray.get(calls)
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None) or error
        raise RunError("start a rank", " ".join(str(cause).split())[:300]) from error


def _listen(actors: Sequence[Any]) -> int:
    """Passes on what ranks print until the last has ended; the exit code of the whole."""
    import ray

    codes: dict[int, int] = {}
    decoder = codecs.getincrementaldecoder("utf-8")
    spoken = {(n, number): decoder("replace") for n in range(len(actors)) for number in (1, 2)}
    passed_on = False
    with stop_requested() as stopped:
        calls = {call(actor, "heard", _HEAR_S): n for n, actor in enumerate(actors)}
        while calls:
            if stopped() and not passed_on:
                passed_on = True
                for actor in actors:
                    call(actor, "ask", signal.SIGTERM)
            for answer in ray.wait(list(calls), timeout=_HEAR_S)[0]:
                n = calls.pop(answer)
                try:
                    said, code = ray.get(answer)
                except ray.exceptions.RayError as error:
                    said, code = [(2, f"rank {n}: {how_ended(error)}\n".encode())], 1
                for number, text in said:
                    stream = sys.stdout if number == 1 else sys.stderr
                    stream.write(spoken[n, number].decode(text))
                    stream.flush()
                if code is None:
                    calls[call(actors[n], "heard", _HEAR_S)] = n
                else:
                    codes[n] = code
    for n, code in sorted(codes.items()):
        if code < 0:
            print(f"rank {n} was ended by {how_it_ended(code)}", file=sys.stderr)
    bad = [code for code in codes.values() if code]
    return (2 if 2 in bad else 1) if bad else 0
