"""How long updates take under each schedule: a simulation that is driven by the real admission rule.

    replica   continuous batching: a step of n rows takes a + b n seconds and draws a token for each of them
    lengths   log-normal, cut at the longest allowed
    trainer   per_token seconds for each token of an update, and a fixed time
    weights   a load time for each replica; within running answers also what it takes to prefill them again

    python benchmarks/async/simulate.py [published] [scaling] [controllers]

What a published table says of its *synchronous* run gives a, the time of a step, by bisection, and the
trainer's time; the asynchronous columns are then predicted, for each of SIGMAS, which no table says. That
shows what a schedule can gain under such lengths. It says nothing of how quick any program is.
"""

import heapq
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import exp, log

from posttrain.curriculum.staleness import Admission

SIGMAS = (0.7, 0.9, 1.1)
"""Deviations of the logarithm of lengths before they are cut; the middle one is what a row shows."""
LONGER = (0.75, 1.25)
"""The same for the mean length, as factors."""


INFINITE = float("inf")
Row = tuple[int, int]
"""Tokens of an answer, and the version that its first was drawn by."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Machines, answers and schedule; seconds and tokens."""

    groups: int
    size: int
    replicas: int
    mean: float
    """Of lengths, before they are cut at `cut`."""
    cut: int
    sigma: float = SIGMAS[1]
    a: float = 0.0
    b: float = 0.0
    per_token: float = 0.0
    """Of the trainer."""
    fixed: float = 0.0
    load: float = 1.0
    prefill: float = 0.0
    """For each token of a running answer, after a swap within it."""
    max_lag: int = 0
    window: int = 1
    swap: str = "within"
    part: int = 0
    """Groups that a step of the trainer takes; 0: all. Of an update several steps may then be made."""
    publish_every: int = 1
    """Steps of the trainer between two versions that are published."""
    whole: bool = False
    """Whether a group is played by one replica (as here), and not dealt row by row to the least busy one."""
    updates: int = 12
    seed: int = 0


@dataclass
class Replica:
    """One copy of the model: the rows that it draws, and the groups that wait."""

    setting: Setting
    rows: list[tuple[float, int, float, int]] = field(default_factory=list)
    """(tokens made when it ends, group, tokens made when it began, version), the first to end first."""
    waiting: list[list[tuple[int, int]]] = field(default_factory=list)
    """Rounds of (group, length) that were admitted together."""
    made: float = 0.0
    """Tokens that a row which was always there would have."""
    at: float = 0.0
    version: int = 0
    offered: int = 0
    busy: float = 0.0

    @property
    def step(self) -> float:
        """Seconds of one, as many rows as it has now."""
        return self.setting.a + self.setting.b * len(self.rows)

    @property
    def load(self) -> int:
        """Rows that it has or will have."""
        return len(self.rows) + sum(map(len, self.waiting))

    def advance(self, now: float) -> list[tuple[int, int, int]]:
        """(group, tokens, version it began with) of the rows that have ended by now."""
        ended: list[tuple[int, int, int]] = []
        while self.rows and (end := self.next) <= now:
            self.busy += end - self.at
            self.at, self.made = end, self.rows[0][0]
            while self.rows and self.rows[0][0] <= self.made:
                last, group, began, version = heapq.heappop(self.rows)
                ended.append((group, round(last - began), version))
        if now > self.at:
            if self.rows:
                self.made += (now - self.at) / self.step
                self.busy += now - self.at
            self.at = now
        return ended

    def turn(self) -> None:
        """Takes weights and begins groups, where its schedule lets it."""
        between = self.setting.swap == "between"
        if between and self.rows:
            return
        if self.offered > self.version:
            again = sum(self.made - began for _, _, began, _ in self.rows) * self.setting.prefill
            self.version, self.at = self.offered, self.at + self.setting.load + again
            self.busy += again
        for rows in self.waiting[:1] if between else self.waiting:
            for group, length in rows:
                began = self.made
                heapq.heappush(self.rows, (began + length, group, began, self.version))
        del self.waiting[: 1 if between else len(self.waiting)]

    @property
    def next(self) -> float:
        """When its first row ends."""
        return self.at + (self.rows[0][0] - self.made) * self.step


@dataclass
class Found:
    """What a simulated run came to."""

    step: float
    """Seconds of an update, once the first third of them are over."""
    busy: float
    """Share of that time in which replicas drew."""
    tokens: float
    """Drawn in a second, by all of them, over the whole run."""
    max_lag: int
    bound: int
    trained: list[int]
    """Numbers of groups, in the order in which they were trained on."""
    seconds: float


class Simulation:
    """The loop's thread, the replicas and the clock."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.dice = setting, random.Random(setting.seed)
        self.line: Admission[list[Row]] = Admission(setting.groups, setting.max_lag, setting.window)
        self.replicas = [Replica(setting) for _ in range(setting.replicas)]
        self.playing: dict[int, list[Row]] = {}
        self.queue: list[tuple[float, int]] = []
        self.due = [INFINITE] * setting.replicas
        """When each next has something to do; what else is in the queue is out of date."""
        self.now = 0.0
        self.news = True
        """Whether a group has ended, or a version has been taken, since the line was last looked at."""
        self.taken = True
        """Whether a version has been taken since then."""

    def run(self) -> Found:
        """Plays the setting to its last update."""
        s, part = self.setting, self.setting.part or self.setting.groups
        steps, version, worst, tokens, ends = s.updates * s.groups // part, 0, 0, 0, INFINITE
        taken: list[int] = []
        trained: list[int] = []
        done = [0.0]
        while len(done) <= steps:
            if self.news:
                if self.taken:
                    self.line.release(min(replica.version for replica in self.replicas))
                self.admit()
                self.news = self.taken = False
                if ends == INFINITE and (groups := self.line.take(part)) is not None:
                    taken = [number for number, _ in groups]
                    rows = [row for _, group in groups for row in group]
                    worst = max(worst, *(version - began for _, began in rows))
                    drawn = sum(count for count, _ in rows)
                    tokens += drawn
                    ends = self.now + s.fixed * part / s.groups + s.per_token * drawn
            self.now = min(ends, self.queue[0][0] if self.queue else INFINITE)
            assert self.now < INFINITE, "everybody waits"
            if self.now < ends:
                at, n = heapq.heappop(self.queue)
                if at == self.due[n]:
                    self.due[n] = INFINITE
                    self.turn(n)
                continue
            version, ends, self.news = version + 1, INFINITE, True
            done.append(self.now)
            trained += taken
            self.line.hold(taken, version)
            if version % s.publish_every == 0:
                for n, replica in enumerate(self.replicas):
                    replica.offered = version
                    self.turn(n)
        first = steps // 3
        step = (done[steps] - done[first]) / (steps - first) * s.groups / part
        busy = sum(replica.busy for replica in self.replicas) / s.replicas / self.now
        return Found(step, min(1.0, busy), tokens / self.now, worst, self.line.bound, trained, self.now)

    def length(self) -> int:
        """Of another answer."""
        s = self.setting
        return max(1, min(s.cut, round(exp(self.dice.gauss(log(s.mean) - s.sigma**2 / 2, s.sigma)))))

    def admit(self) -> None:
        """Deals as many groups as there is room for."""
        if not (room := self.line.room()):
            return
        rounds: list[list[tuple[int, int]]] = [[] for _ in self.replicas]
        loads = [(replica.load, n) for n, replica in enumerate(self.replicas)]
        heapq.heapify(loads)
        for _ in range(room):
            number = self.line.admit()
            self.playing[number] = []
            for _ in range(self.setting.size):
                n = number % len(rounds)
                if not self.setting.whole:
                    before, n = loads[0]
                    heapq.heapreplace(loads, (before + 1, n))
                rounds[n].append((number, self.length()))
        for n, rows in enumerate(rounds):
            if rows:
                self.replicas[n].waiting.append(rows)
                self.turn(n)

    def turn(self, n: int) -> None:
        """Brings a replica to now, and lets it take what waits for it."""
        replica, before = self.replicas[n], self.replicas[n].version
        for group, tokens, began in replica.advance(self.now):
            self.playing[group].append((tokens, began))
            if len(self.playing[group]) == self.setting.size:
                self.news |= self.line.finish(group, self.playing.pop(group))
        replica.turn()
        if replica.version > before:
            self.news = self.taken = True
        if replica.rows and replica.next != self.due[n]:
            self.due[n] = replica.next
            heapq.heappush(self.queue, (self.due[n], n))


def run(s: Setting) -> Found:
    """What a setting comes to."""
    return Simulation(s).run()


@lru_cache
def fitted(s: Setting, seconds: float) -> Setting:
    """The setting with the step time a at which its synchronous update takes so long."""
    low, high = 3e-4, 0.1
    for _ in range(12):
        a = (low * high) ** 0.5
        low, high = (a, high) if run(replace(s, a=a, updates=4)).step < seconds else (low, a)
    return replace(s, a=(low * high) ** 0.5)


# ---------------------------------------------------------------------- published tables


@dataclass(frozen=True)
class Device:
    """What a GPU can do, by its data sheet. Taken for reached: of the arithmetic 40 % in training and
    prefill, 70 % in decoding many rows; of the bandwidth all."""

    flops: float
    bandwidth: float

    def row(self, weights: float, kv: float, context: float) -> float:
        """b: the arithmetic of a token, and reading the keys and values of those before it."""
        return 2 * weights / (0.7 * self.flops) + context * kv / self.bandwidth


H800, H20 = Device(989e12, 3.35e12), Device(148e12, 4.0e12)
SMALL, LARGE = (1.54e9, 28672.0), (7.6e9, 57344.0)
"""Of Qwen2.5 1.5B and 7B: weights, and bytes of keys and values a token."""
Predict = Callable[[float, float], float]
"""From sigma and a factor of the mean length: the ratio of the synchronous to the asynchronous time."""


def areal(model: tuple[float, float], devices: int, hours: float) -> Predict:
    """AReaL's Table 1: 1000 updates of 512 × 16 answers, three quarters of the devices sampling, lag 4.

    The trainer runs a token forward twice and backward once. Of the mean length nothing is said: 6000.
    """
    weights, kv = model
    step, quarter = hours * 3.6, devices // 4
    one = 8 * 1.2 * weights / (0.4 * H800.flops)  # a fifth more for attention

    def predict(sigma: float, longer: float) -> float:
        s = Setting(
            groups=512, size=16, replicas=devices, mean=6000 * longer, cut=27648, sigma=sigma, load=2.0
        )
        s = replace(s, b=H800.row(weights, kv, s.mean), per_token=one / devices)
        s = replace(fitted(s, step), prefill=2 * weights / (0.4 * H800.flops))
        return step / run(replace(s, replicas=devices - quarter, per_token=one / quarter, max_lag=4)).step

    return predict


def one_step(cut: int, step: float, gen: float, trains: float) -> Predict:
    """verl's one-step-off: a quarter of the devices samples, the next round while this one is trained.

    Of the mean length nothing is said: 1000, as of this model's answers below.
    """

    def predict(sigma: float, longer: float) -> float:
        s = Setting(groups=512, size=16, replicas=16, mean=1000 * longer, cut=cut, sigma=sigma)
        s = fitted(replace(s, b=H20.row(*LARGE, s.mean), fixed=step - gen - s.load), step)
        other = step - gen - trains
        ahead = replace(s, replicas=4, fixed=trains * 16 / 12 + other, max_lag=1, swap="between")
        return step / run(ahead).step

    return predict


def fully(devices: int, step: float, gen: float, half: float, stale: float) -> Predict:
    """verl's fully_async: half of the devices sample; the trainer takes 128 groups as they end, and publishes
    after four times that. Its time on half the devices is the synchronous column's there."""

    def predict(sigma: float, longer: float) -> float:
        s = Setting(groups=512, size=16, replicas=devices, mean=1000 * longer, cut=28672, sigma=sigma)
        s = fitted(replace(s, b=H20.row(*LARGE, s.mean), fixed=step - gen - s.load), step)
        slots = round(16 * (1 + stale))
        ahead = replace(s, replicas=devices // 2, groups=32, max_lag=slots - 1, window=512, part=128)
        ahead = replace(ahead, fixed=half / 16, publish_every=4, updates=16 * 9)
        return step / (16 * run(replace(ahead, prefill=2 * LARGE[0] / (0.4 * H20.flops))).step)

    return predict


CASES: list[tuple[str, float, Predict]] = [
    ("AReaL Table 1, 1.5B, 41.0 h", 41.0 / 14.8, areal(SMALL, 128, 41.0)),
    ("AReaL Table 1, 7B, 57.7 h", 57.7 / 25.4, areal(LARGE, 192, 57.7)),
    ("verl one_step_off, FSDP2, 749 s a step", 749 / 520, one_step(20480, 749, 321, 88 + 286)),
    ("verl one_step_off, Megatron, 699 s", 699 / 566, one_step(8192, 699, 207, 119 + 344)),
    ("verl fully_async, 128 GPUs, stale 0, 356 s", 356.30 / 231.34, fully(128, 356.30, 177.85, 133.41, 0.0)),
    ("the same, stale 0.1", 356.30 / 171.30, fully(128, 356.30, 177.85, 133.41, 0.1)),
    ("the same, stale 0.3", 356.30 / 146.11, fully(128, 356.30, 177.85, 133.41, 0.3)),
    ("the same, stale 0.5", 356.30 / 150.63, fully(128, 356.30, 177.85, 133.41, 0.5)),
    ("64 GPUs, stale 0.5, 365 s", 365.28 / 189.26, fully(64, 365.28, 150.72, 269.80, 0.5)),
    ("32 GPUs, stale 0.5, 790 s", 790.10 / 294.77, fully(32, 790.10, 357.41, 2 * 269.80, 0.5)),
]


def interruptible(sigma: float) -> float:
    """Tokens a second with swaps within answers over those with swaps between rounds: AReaL's Figure 5."""
    s = Setting(groups=64, size=16, replicas=24, mean=6000, cut=27648, sigma=sigma, load=2.0, max_lag=4)
    s = replace(s, a=0.004, b=H800.row(*SMALL, s.mean), prefill=2 * SMALL[0] / (0.4 * H800.flops), updates=24)
    return run(s).tokens / run(replace(s, swap="between")).tokens


@lru_cache
def scaled(workers: int) -> Found:
    """4 groups of 16 for each worker, played whole, trained as quickly as they are drawn, with lag 4."""
    s = Setting(groups=4 * workers, size=16, replicas=workers, mean=1000, cut=8192, a=0.01, b=1e-4, max_lag=4)
    return run(replace(s, fixed=13.0, prefill=1e-5, whole=True, updates=10))


def through_controller(design: str, workers: int, answers: int) -> float:
    """Bytes into and out of rank 0 in an update, without weights and gradients.

    The constants are what benchmarks/async/controller.py counted: bytes of an answer's summary, and of what a
    sampler is asked and answers for each answer.
    """
    summary, request = 107.0, 240.0
    all_, levels = workers * answers, (workers - 1).bit_length()
    if design == "references":
        return all_ * (request + summary) + all_ * summary * levels
    return answers * summary * (workers - 1)  # each its own


def controllers() -> None:
    """What each design carries through rank 0, and what is left of the throughput at 10 Gbit/s."""
    answers, tokens, bandwidth = 64, 4000, 1.25e9
    print("| workers | design | bytes an update | share of the throughput |\n|---|---|---|---|")
    for workers in (1, 64, 512, 1000):
        alone, found = scaled(1), scaled(workers)
        for design in ("references", "each its own"):
            sent = through_controller(design, workers, answers)
            # Longer answers than `scaled` has: an update takes longer by as much.
            step = found.step * tokens / 1000 + sent / bandwidth
            share = found.tokens / workers * found.step / step / (alone.tokens * 1000 / tokens)
            print(f"| {workers} | {design} | {sent:,.0f} | {share:.2f} |", flush=True)


def published_tables() -> None:
    """Published speed-ups beside simulated ones."""
    print("| source | published | simulated (range) | off by | within 20 % |\n|---|---|---|---|---|")
    for source, published, predict in CASES:
        found = [predict(sigma, 1.0) for sigma in SIGMAS] + [predict(SIGMAS[1], x) for x in LONGER]
        off = found[1] / published - 1
        span = f"{min(found):.2f}–{max(found):.2f}"
        verdict = "yes" if abs(off) <= 0.2 else "**no**"
        print(
            f"| {source} | {published:.2f}× | {found[1]:.2f}× ({span}) | {off:+.0%} | {verdict} |", flush=True
        )
    gains = ", ".join(f"{interruptible(sigma) - 1:+.0%} at sigma {sigma}" for sigma in SIGMAS)
    print(
        f"\nswaps within answers instead of between rounds, 64 × 16 answers on 24 replicas, lag 4: {gains}\n"
    )


def scaling() -> None:
    """What is left of a worker's throughput among many, and how old its tokens are."""
    print("| workers | s an update | tokens/s a worker | of one worker's | busy | most lag | bound |")
    print("|---|---|---|---|---|---|---|")
    for workers in (1, 10, 100, 300, 1000):
        f, alone = scaled(workers), scaled(1)
        rate = f.tokens / workers
        shown = (workers, f"{f.step:.1f}", f"{rate:.0f}", f"{rate / alone.tokens:.2f}", f"{f.busy:.0%}")
        print(f"| {' | '.join(map(str, (*shown, f.max_lag, f.bound)))} |", flush=True)
    print()


def main() -> None:
    """Prints the tables that are asked for, or all."""
    tables = {"published": published_tables, "scaling": scaling, "controllers": controllers}
    for name in sys.argv[1:] or tables:
        tables[name]()


if __name__ == "__main__":
    main()
