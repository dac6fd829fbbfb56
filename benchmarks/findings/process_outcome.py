"""Process against outcome reward on chains of additions, written step by step, on equally many answers.

A question is six digits, an answer the five running sums, of which only the last digit is kept: 7 8 6 ... is
answered by 5 1 ... The policy is a table, a softmax over the next sum for each (sum so far, digit); its start
knows some additions better than others. REINFORCE++ trains it with several rewards, each with 200 x 128
answers; a step of training is the method's own prepare, weight and loss.

    outcome   1 for an answer whose last sum is right, whatever stands before it
    share     the share of steps that follow from the one before, paid at the end
    steps     the same, each step paid where it ends, and credited to that step alone (γ = 0)
    shaped    the outcome, with that share so far as a potential: what is paid sums to the outcome (γ = 1)
    values    the outcome, with the chance of the start to end right from there as a potential, each step
              credited with what it gains (γ = 0): what Monte-Carlo labels of steps estimate, known exactly
    learnt    as steps, judged by a process model: a table of logits that has learnt from 512 labelled answers
              of the start; the same with one label in ten wrong; and with such labels a model that is learnt
              anew after 50, 100 and 150 updates, from 128 more answers of the policy as it is, 512 in all

    python benchmarks/findings/process_outcome.py --seeds 10 --out runs/findings/process_outcome

With so small a policy the chance that an answer is right is not sampled but computed. Runs that are there are
not made again.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import one_hot, pad

from posttrain.math import reduce, reward
from posttrain.methods.build import build
from posttrain.process.machine import configure
from posttrain.types import Batch, Method, Outputs

LONGEST, HELD_OUT = 6, 500
GROUPS, SIZE, UPDATES, EVERY = 16, 8, 200, 5
CASES: dict[str, dict[str, Any]] = {
    "outcome": {"returns": "total"},
    "share": {"returns": "total"},
    "steps": {"gamma": 0.0},
    "shaped": {"gamma": 1.0},
    "values": {"gamma": 0.0},
    "learnt": {"gamma": 0.0},
    "learnt, 10% wrong": {"gamma": 0.0},
    "learnt anew, 10% wrong": {"gamma": 0.0},
}
RATES = {"outcome": 0.1, "share": 0.3, "steps": 0.3, "shaped": 0.1, "values": 0.1}
RATES |= {"learnt": 0.1, "learnt, 10% wrong": 0.03, "learnt anew, 10% wrong": 0.1}
"""Of Adam; the best of 0.03, 0.1 and 0.3 for each reward, by another seed."""
LEARNT = {"learnt": (0.0, 1), "learnt, 10% wrong": (0.1, 1), "learnt anew, 10% wrong": (0.1, 4)}
"""The share of the labels of steps that are turned round, and how many times answers are labelled."""
LABELLED, PASSES = 512, 100
"""Answers whose steps are labelled in all, and passes over them."""


def main() -> None:
    """Makes what is missing, prints the table and draws the curves."""
    found, out = collected(__doc__, CASES, run, seeds=10, shown="sound")
    print(table(found))
    draw(found, out / "process_outcome.svg")


def collected(
    what: str | None,
    cases: Iterable[str],
    run: Callable[[str, int], dict[str, Any]],
    *,
    seeds: int,
    shown: str,
) -> tuple[dict[str, list[dict[str, Any]]], Path]:
    """The runs that the command line asks for, those made that are missing; and where they lie."""
    parser = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    configure(1)
    options.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
    for seed in range(options.first, options.first + options.seeds):
        for name, runs in found.items():
            file = options.out / f"{name.replace(', ', '-')}-{seed}.json"
            if not file.exists():
                file.write_text(json.dumps(run(name, seed)) + "\n")
            runs.append(json.loads(file.read_text()))
            print(f"{name}, seed {seed}: {runs[-1][shown][-1]:.3f}", file=sys.stderr, flush=True)
    return found, options.out


# ---------------------------------------------------------------------- the task


def chains(count: int, draw: torch.Generator, length: int = LONGEST) -> torch.Tensor:
    """[count, LONGEST + 1]: the digits, zeros behind them, and the first digit again, as the sum so far."""
    digits = torch.randint(10, (count, LONGEST + 1), generator=draw)
    digits[:, length:] = 0
    digits[:, -1] = digits[:, 0]
    return digits


def sums(questions: torch.Tensor) -> torch.Tensor:
    """[rows, LONGEST - 1]: the running sums' last digits.

    >>> sums(torch.tensor([[7, 8, 6, 0, 0, 0, 7]]))
    tensor([[5, 1, 1, 1, 1]])
    """
    return questions[:, :LONGEST].cumsum(1)[:, 1:] % 10


def outcome(questions: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """1 at the last step, if its sum is right."""
    return pad((answers == sums(questions)).float()[:, -1:], (answers.shape[1] - 1, 0))


def steps(questions: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """1/n for each of the n steps that is the sum of the one before it, right or wrong, and its digit."""
    before, digit, said = places(questions, answers)
    return (said == (before + digit) % 10).float() / answers.shape[1]


def share(questions: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """The same, all of it at the end."""
    return pad(steps(questions, answers).sum(1, keepdim=True), (answers.shape[1] - 1, 0))


def shaped(questions: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """What the potential Φ = share gains with each step, and at the end the outcome less Φ."""
    return steps(questions, answers) + outcome(questions, answers) - share(questions, answers)


def values(questions: torch.Tensor, answers: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """What the start's chance to end right, by its table of logits, gains with each step; it begins at 0."""
    p, at = start.softmax(-1), torch.arange(len(questions))
    value, found = one_hot(sums(questions)[:, -1], 10).float(), []
    for n in reversed(range(answers.shape[1])):
        found.append(value[at, answers[:, n]])
        value = torch.einsum("bst,bt->bs", p[:, questions[:, n + 1]].transpose(0, 1), value)
    return torch.stack(found[::-1], 1).diff(dim=1, prepend=torch.zeros(len(questions), 1))


class ProcessModel:
    """A table of logits [sum so far, digit, next sum]: σ of each is the chance that this step is right."""

    def __init__(self, seed: int, wrong: float, times: int) -> None:
        self.draw = torch.Generator().manual_seed(seed + 3000)
        self.wrong, self.count, self.every = wrong, LABELLED // times, UPDATES // times
        self.seen: list[tuple[torch.Tensor, ...]] = []
        self.logits = torch.zeros(10, 10, 10)

    def learn(self, policy: "Policy") -> None:
        """Labels answers of the policy, and learns anew from all that were ever labelled."""
        questions = chains(self.count, self.draw)
        answers = policy.answers(questions, self.draw)
        turned = torch.rand(answers.shape, generator=self.draw) < self.wrong
        label = ((steps(questions, answers) > 0) ^ turned).float()
        self.seen.append((*places(questions, answers), label))
        *place, label = (torch.cat(column) for column in zip(*self.seen, strict=True))
        logits = torch.nn.Parameter(torch.zeros(10, 10, 10))
        optimiser = torch.optim.Adam([logits], lr=0.1)
        for _ in range(PASSES):
            loss = reward.classification(logits[tuple(place)], label).mean()
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        self.logits = logits.detach()

    def __call__(self, questions: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
        """1/n of the chance that a step is right, for each of the n steps."""
        return self.logits[places(questions, answers)].sigmoid() / answers.shape[1]


def places(questions: torch.Tensor, answers: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(sum so far, digit, next sum) of every step."""
    return torch.cat([questions[:, -1:], answers[:, :-1]], 1), questions[:, 1:LONGEST], answers


REWARDS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "outcome": outcome,
    "share": share,
    "steps": steps,
    "shaped": shaped,
}
"""(questions, answers) -> what each step is paid, all [rows, steps]."""


# ---------------------------------------------------------------------- the policy


class Policy:
    """A table of logits [sum so far, digit, next sum], with a method and Adam.

    They begin as N(0, 1), and those of right sums with `known` more.
    """

    def __init__(self, seed: int, method: Method, lr: float, known: float = 2.0) -> None:
        noise = torch.randn(10, 10, 10, generator=torch.Generator().manual_seed(seed))
        right = one_hot((torch.arange(10)[:, None] + torch.arange(10)) % 10, 10)
        self.logits = torch.nn.Parameter(noise + known * right)
        self.method, self.optimiser = method, torch.optim.Adam([self.logits], lr=lr)

    @torch.no_grad()
    def answers(self, questions: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
        """[rows, LONGEST - 1] sums, each drawn after the one before."""
        p, before, said = self.logits.softmax(-1), questions[:, -1], []
        for digit in questions[:, 1:LONGEST].T:
            before = torch.multinomial(p[before, digit], 1, generator=draw)[:, 0]
            said.append(before)
        return torch.stack(said, 1)

    def logp(self, tokens: torch.Tensor) -> torch.Tensor:
        """log π of every token of questions with their answers; 0 for the questions."""
        said = self.logits.log_softmax(-1)[tokens[:, LONGEST:-1], tokens[:, 1:LONGEST]]
        return pad(said.gather(-1, tokens[:, LONGEST + 1 :, None])[..., 0], (LONGEST + 1, 0))

    def learn(
        self, questions: torch.Tensor, answers: torch.Tensor, paid: torch.Tensor, length: torch.Tensor
    ) -> None:
        """An update on answers of so many steps, in groups of SIZE."""
        tokens, rows = torch.cat([questions, answers], 1), len(questions)
        logp = self.logp(tokens)
        batch = self.method.prepare(
            Batch(
                tokens=tokens,
                mask=pad(torch.arange(LONGEST - 1) < length[:, None], (LONGEST + 1, 0)),
                length=LONGEST + 1 + length,
                group=torch.arange(rows) // SIZE,
                reward=pad(paid, (LONGEST + 1, 0)),
                logp_gen=logp.detach(),
                logp_policy=logp.detach(),
                version=torch.zeros_like(tokens),
            )
        )
        out = Outputs(logp=logp, entropy=torch.zeros_like(logp))
        loss = reduce.weighted_sum(self.method.loss(out, batch), self.method.weight(batch), batch.mask)
        self.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()

    @torch.no_grad()
    def chances(self, questions: torch.Tensor, length: int = LONGEST) -> tuple[float, float]:
        """(chance that the last sum is right, that every one is), the means over chains of this length."""
        p, wanted = self.logits.softmax(-1), sums(questions)
        reached, sound = one_hot(questions[:, -1], 10).float(), torch.ones(len(questions))
        before = questions[:, -1]
        for n in range(length - 1):
            digit = questions[:, n + 1]
            sound = sound * p[before, digit, wanted[:, n]]
            reached = torch.einsum("bs,sbt->bt", reached, p[:, digit])
            before = wanted[:, n]
        return float(reached.gather(1, before[:, None]).mean()), float(sound.mean())


def run(name: str, seed: int) -> dict[str, list[float]]:
    """How likely held-out chains are answered right, and soundly, as the run goes on."""
    # The rewards of an answer are whitened over the update; a KL is left out.
    method = build("reinforce_pp", {"kl_in_reward": 0.0, **CASES[name]}, horizon=LONGEST - 1)
    policy, draw = Policy(seed, method, RATES[name]), torch.Generator().manual_seed(seed + 1000)
    held_out = chains(HELD_OUT, torch.Generator().manual_seed(seed + 2000))
    model = ProcessModel(seed, *LEARNT[name]) if name in LEARNT else None
    paid = model or REWARDS.get(name) or partial(values, start=policy.logits.detach().clone())
    length = torch.full((GROUPS * SIZE,), LONGEST - 1)
    found: dict[str, list[float]] = {"drawn": [], "right": [], "sound": []}
    for update in range(UPDATES + 1):
        if update % EVERY == 0:
            right, sound = policy.chances(held_out)
            found["drawn"].append(update * GROUPS * SIZE)
            found["right"].append(right)
            found["sound"].append(sound)
        if model and update < UPDATES and update % model.every == 0:
            model.learn(policy)
        asked = chains(GROUPS, draw).repeat_interleave(SIZE, 0)
        said = policy.answers(asked, draw)
        policy.learn(asked, said, paid(asked, said), length)
    return found


# ---------------------------------------------------------------------- what came out


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown: mean and range over seeds."""
    drawn = next(iter(found.values()))[0]["drawn"]
    places = [(n, key) for n in (len(drawn) // 4, -1) for key in ("right", "sound")]
    begun = next(iter(found.values()))
    lines = [
        "| reward | seeds | " + " | ".join(f"{key}, after {drawn[n]:,}" for n, key in places) + " |",
        "|---|---|---|---|---|---|",
        "| the start | – | " + " | ".join(spread([r[key][0] for r in begun]) for _, key in places) + " |",
    ]
    for name, runs in found.items():
        cells = [spread([r[key][n] for r in runs]) for n, key in places]
        lines.append(f"| {name} | {len(runs)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    """Mean and range.

    >>> spread([0.5, 0.25])
    '37.5% (25.0%–50.0%)'
    """
    return f"{statistics.fmean(values):.1%} ({min(values):.1%}–{max(values):.1%})"


def draw(found: dict[str, list[dict[str, Any]]], out: Path) -> None:
    """Both learning curves of each reward: the mean over seeds, and their range as a band."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(12, 4.2), sharey=True)
    titles = {"right": "chance that the last sum is right", "sound": "chance that every step is right"}
    for axes, (key, title) in zip(panels, titles.items(), strict=True):
        for n, (name, runs) in enumerate(found.items()):
            seen = list(zip(*(r[key] for r in runs), strict=True))
            drawn, colour = runs[0]["drawn"], f"C{n}"
            axes.plot(drawn, [statistics.fmean(x) for x in seen], color=colour, label=name, lw=1.8)
            axes.fill_between(
                drawn, [min(x) for x in seen], [max(x) for x in seen], color=colour, alpha=0.15, lw=0
            )
        axes.set(xlabel="answers drawn", title=title, ylim=(0, 1))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[1].legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    figure.savefig(out)


if __name__ == "__main__":
    main()
