"""Process against outcome reward on chains of additions, written step by step, on equally many answers.

A question is six digits, an answer the five running sums, of which only the last digit is kept: 7 8 6 ... is
answered by 5 1 ... The policy is a table, a softmax over the next sum for each (sum so far, digit); its start
knows some additions better than others. REINFORCE++ trains it with several rewards, each with 200 x 128
answers; a step of training is the method's own prepare, weight and loss.

    outcome   1 for an answer whose last sum is right, whatever stands before it
    share     the share of steps that follow from the one before, paid at the end
    steps     the same, each step paid where it ends, and credited to that step alone (γ = 0)
    shaped    the outcome, with that share so far as a potential: what is paid sums to the outcome (γ = 1)
    values    the outcome, with the start's chance to end right from there as a potential, each step
              credited with its gain (γ = 0): what Monte-Carlo labels of steps estimate, known exactly
    learnt    as steps, judged by a process model: a table of logits that has learnt from 512 labelled answers
              of the start; the same with one label in ten wrong; and with such labels a model that is trained
              again after 50, 100 and 150 updates, on 128 more answers of the policy as it is, 512 in all

With so small a policy the chance that an answer is right is not sampled but computed.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import one_hot, pad

from posttrain.math import reduce, reward
from posttrain.methods.build import build
from posttrain.types import Batch, Method, Outputs
from posttrain_study.claims.experiment import (
    Experiment,
    Figures,
    Report,
    Results,
    VerdictRule,
    curve,
    markdown,
    spread,
)

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
    "learnt again, 10% wrong": {"gamma": 0.0},
}
RATES = {"outcome": 0.1, "share": 0.3, "steps": 0.3, "shaped": 0.1, "values": 0.1}
RATES |= {"learnt": 0.1, "learnt, 10% wrong": 0.03, "learnt again, 10% wrong": 0.1}
"""Of Adam; the best of 0.03, 0.1 and 0.3 for each reward, on seed 100."""
LEARNT = {"learnt": (0.0, 1), "learnt, 10% wrong": (0.1, 1), "learnt again, 10% wrong": (0.1, 4)}
"""Share of wrong labels, and how many times answers are labelled."""
LABELLED, PASSES = 512, 100
"""Answers whose steps are labelled in all, and passes over these."""


# ---------------------------------------------------------------------- the task


def chains(count: int, draw: torch.Generator, length: int = LONGEST) -> torch.Tensor:
    """Return [count, LONGEST + 1]: digits, zeros after them, and the first digit again as the sum so far."""
    digits = torch.randint(10, (count, LONGEST + 1), generator=draw)
    digits[:, length:] = 0
    digits[:, -1] = digits[:, 0]
    return digits


def sums(questions: torch.Tensor) -> torch.Tensor:
    """Return the last digits of the running sums, [rows, LONGEST - 1].

    >>> sums(torch.tensor([[7, 8, 6, 0, 0, 0, 7]]))
    tensor([[5, 1, 1, 1, 1]])
    """
    return questions[:, :LONGEST].cumsum(1)[:, 1:] % 10


def outcome(questions: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Return 1 at the last step if its sum is right."""
    return pad((answers == sums(questions)).float()[:, -1:], (answers.shape[1] - 1, 0))


def steps(questions: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Return 1/n for each of n steps that is the sum of the one before, right or wrong, and its digit."""
    before, digit, after = places(questions, answers)
    return (after == (before + digit) % 10).float() / answers.shape[1]


def share(questions: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Return the sum of `steps`, paid at the end."""
    return pad(steps(questions, answers).sum(1, keepdim=True), (answers.shape[1] - 1, 0))


def shaped(questions: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Return the gain of the potential Φ = share with each step, and at the end the outcome less Φ."""
    return steps(questions, answers) + outcome(questions, answers) - share(questions, answers)


def values(questions: torch.Tensor, answers: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Return the gain, with each step, in the chance of the start's table of logits to end right."""
    p, at = start.softmax(-1), torch.arange(len(questions))
    value, chances = one_hot(sums(questions)[:, -1], 10).float(), []
    for n in reversed(range(answers.shape[1])):
        chances.append(value[at, answers[:, n]])
        value = torch.einsum("bst,bt->bs", p[:, questions[:, n + 1]].transpose(0, 1), value)
    return torch.stack(chances[::-1], 1).diff(dim=1, prepend=torch.zeros(len(questions), 1))


class ProcessModel:
    """Judge steps by logits [sum so far, digit, next sum], whose σ is the chance that the step is right."""

    def __init__(self, seed: int, wrong: float, times: int) -> None:
        self.draw = torch.Generator().manual_seed(seed + 3000)
        self.wrong, self.count, self.every = wrong, LABELLED // times, UPDATES // times
        self.labelled: list[tuple[torch.Tensor, ...]] = []
        self.logits = torch.zeros(10, 10, 10)

    def learn(self, policy: "ChainPolicy") -> None:
        """Label answers of the policy, and train from scratch on all that were ever labelled."""
        questions = chains(self.count, self.draw)
        answers = policy.answers(questions, self.draw)
        turned = torch.rand(answers.shape, generator=self.draw) < self.wrong
        label = ((steps(questions, answers) > 0) ^ turned).float()
        self.labelled.append((*places(questions, answers), label))
        *place, label = (torch.cat(column) for column in zip(*self.labelled, strict=True))
        logits = torch.nn.Parameter(torch.zeros(10, 10, 10))
        optimiser = torch.optim.Adam([logits], lr=0.1)
        for _ in range(PASSES):
            loss = reward.classification(logits[tuple(place)], label).mean()
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        self.logits = logits.detach()

    def __call__(self, questions: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
        """Return 1/n of the chance that a step is right, for each of n steps."""
        return self.logits[places(questions, answers)].sigmoid() / answers.shape[1]


def places(questions: torch.Tensor, answers: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return (sum so far, digit, next sum) of every step."""
    return torch.cat([questions[:, -1:], answers[:, :-1]], 1), questions[:, 1:LONGEST], answers


REWARDS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "outcome": outcome,
    "share": share,
    "steps": steps,
    "shaped": shaped,
}
"""Reward of each step from (questions, answers), all [rows, steps]."""


# ---------------------------------------------------------------------- the policy


class ChainPolicy:
    """Train a table of logits [sum so far, digit, next sum] by a method with Adam.

    Logits begin as N(0, 1), and those of right sums with `skill` more.
    """

    def __init__(self, seed: int, method: Method, lr: float, skill: float = 2.0) -> None:
        noise = torch.randn(10, 10, 10, generator=torch.Generator().manual_seed(seed))
        right = one_hot((torch.arange(10)[:, None] + torch.arange(10)) % 10, 10)
        self.logits = torch.nn.Parameter(noise + skill * right)
        self.method, self.optimiser = method, torch.optim.Adam([self.logits], lr=lr)

    @torch.no_grad()
    def answers(self, questions: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
        """Sample sums, each after the one before, [rows, LONGEST - 1]."""
        p, before, answer = self.logits.softmax(-1), questions[:, -1], []
        for digit in questions[:, 1:LONGEST].T:
            before = torch.multinomial(p[before, digit], 1, generator=draw)[:, 0]
            answer.append(before)
        return torch.stack(answer, 1)

    def logp(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return log π of every token of questions with their answers; 0 for the questions."""
        logp = self.logits.log_softmax(-1)[tokens[:, LONGEST:-1], tokens[:, 1:LONGEST]]
        return pad(logp.gather(-1, tokens[:, LONGEST + 1 :, None])[..., 0], (LONGEST + 1, 0))

    def learn(
        self, questions: torch.Tensor, answers: torch.Tensor, rewards: torch.Tensor, length: torch.Tensor
    ) -> None:
        """Make an update on answers of these lengths, in groups of SIZE."""
        tokens, rows = torch.cat([questions, answers], 1), len(questions)
        logp = self.logp(tokens)
        batch = self.method.prepare(
            Batch(
                tokens=tokens,
                mask=pad(torch.arange(LONGEST - 1) < length[:, None], (LONGEST + 1, 0)),
                length=LONGEST + 1 + length,
                group=torch.arange(rows) // SIZE,
                reward=pad(rewards, (LONGEST + 1, 0)),
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
        """Return P(last sum right) and P(every sum right), the means over chains of this length."""
        p, target = self.logits.softmax(-1), sums(questions)
        reached, sound = one_hot(questions[:, -1], 10).float(), torch.ones(len(questions))
        before = questions[:, -1]
        for n in range(length - 1):
            digit = questions[:, n + 1]
            sound = sound * p[before, digit, target[:, n]]
            reached = torch.einsum("bs,sbt->bt", reached, p[:, digit])
            before = target[:, n]
        return float(reached.gather(1, before[:, None]).mean()), float(sound.mean())


def train(name: str, seed: int) -> dict[str, list[float]]:
    """Train with a reward, and return the chances that held-out chains are answered right, and soundly."""
    # The rewards of an answer are whitened over the update; a KL is left out.
    method = build("reinforce_pp", {"kl_in_reward": 0.0, **CASES[name]}, horizon=LONGEST - 1)
    policy, draw = ChainPolicy(seed, method, RATES[name]), torch.Generator().manual_seed(seed + 1000)
    held_out = chains(HELD_OUT, torch.Generator().manual_seed(seed + 2000))
    model = ProcessModel(seed, *LEARNT[name]) if name in LEARNT else None
    rewards = model or REWARDS.get(name) or partial(values, start=policy.logits.detach().clone())
    length = torch.full((GROUPS * SIZE,), LONGEST - 1)
    curves: dict[str, list[float]] = {"answers": [], "right": [], "sound": []}
    for update in range(UPDATES + 1):
        if update % EVERY == 0:
            right, sound = policy.chances(held_out)
            curves["answers"].append(update * GROUPS * SIZE)
            curves["right"].append(right)
            curves["sound"].append(sound)
        if model and update < UPDATES and update % model.every == 0:
            model.learn(policy)
        questions = chains(GROUPS, draw).repeat_interleave(SIZE, 0)
        answers = policy.answers(questions, draw)
        policy.learn(questions, answers, rewards(questions, answers), length)
    return curves


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Train from the same start with every reward."""
    curves = {}
    for name in CASES:
        report(f"process_outcome, seed {seed}, {name}")
        curves[name] = train(name, seed)
    return curves


# ---------------------------------------------------------------------- the rules


def gain(one: str, other: str, answers: int) -> Callable[[Figures], float]:
    """Return the measure P(every step is right) under one reward less that under another."""

    def measured(figures: Figures) -> float:
        place = figures[one]["answers"].index(answers)
        return float(figures[one]["sound"][place] - figures[other]["sound"][place])

    return measured


QUARTER, END = UPDATES * GROUPS * SIZE // 4, UPDATES * GROUPS * SIZE
RULES = {
    "step_rewards": VerdictRule(
        "share of sound answers after 6,400 answers, steps minus outcome",
        gain("steps", "outcome", QUARTER),
        0.05,
    ),
    "step_credit": VerdictRule(
        "share of sound answers after 6,400 answers, steps minus share", gain("steps", "share", QUARTER), 0.05
    ),
    "potential_shaping": VerdictRule(
        "share of sound answers after 25,600 answers, shaped minus outcome",
        gain("shaped", "outcome", END),
        0.05,
    ),
    "rollout_step_labels": VerdictRule(
        "share of sound answers after 25,600 answers, values minus outcome",
        gain("values", "outcome", END),
        0.05,
    ),
    "noisy_step_labels": VerdictRule(
        "share of sound answers after 25,600 answers, with a tenth of the labels wrong minus with none",
        gain("learnt, 10% wrong", "learnt", END),
        0.05,
        equal=True,
    ),
    "retrained_process_model": VerdictRule(
        "share of sound answers after 25,600 answers, learnt again minus once, a tenth of labels wrong",
        gain("learnt again, 10% wrong", "learnt, 10% wrong", END),
    ),
}


# ---------------------------------------------------------------------- table and picture


def table(results: Results) -> str:
    """Return mean and range over seeds of both chances, at a quarter of the answers and at the end."""
    runs = results.runs
    steps_taken = runs[0]["outcome"]["answers"]
    places = [(n, key) for n in (len(steps_taken) // 4, -1) for key in ("right", "sound")]
    start = [spread([run["outcome"][key][0] for run in runs], ".1%") for _, key in places]
    rows = [["the start", *start]]
    for name in CASES:
        rows.append([name, *(spread([run[name][key][n] for run in runs], ".1%") for n, key in places)])
    return markdown(("reward", *(f"{key}, after {steps_taken[n]:,} answers" for n, key in places)), rows)


def draw(results: Results, figure: Any) -> None:
    """Draw both learning curves of each reward."""
    panels = figure.subplots(1, 2, sharey=True)
    titles = {"right": "chance that the last sum is right", "sound": "chance that every step is right"}
    for axes, (key, title) in zip(panels, titles.items(), strict=True):
        for n, name in enumerate(CASES):
            heights = [run[name][key] for run in results.runs]
            curve(axes, results.runs[0][name]["answers"], heights, name, f"C{n}")
        axes.set(xlabel="answers", title=title, ylim=(0, 1))
    panels[1].legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


EXPERIMENT = Experiment(measure, table, draw, RULES, first_seed=1, size=(12.0, 4.2))
