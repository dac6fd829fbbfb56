"""What imitation and self-play make of imperfect players of Nim, where the right move is known.

A pile of up to 20, of which two players take 1 to 3 in turn; who takes the last one wins. The right move
leaves a multiple of 4. A Llama of 11,000 weights (tiny.py) reads the pile as three digits to the base of 3
and answers with a move; a move that is against the rules loses. Players who are to be imitated are right in
40, 60 or 95 % of the positions that can be won, and take any other number otherwise; or follow a wrong rule,
to leave a multiple of 5, 4 times in 5. Imitation is two passes over 2,000 of a player's games, evaluated as
it samples and greedily. Self-play is REINFORCE with the group's mean as baseline, for 200 updates of 16 × 8
games, from an imitation or from nothing. Chances to win are exact.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from posttrain.methods.build import build
from posttrain.types import Batch
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
from posttrain_study.claims.tiny import LETTERS, Trainee, new_model

PILES, MOST, FIRST = 20, 3, 5
"""Games that are evaluated begin with FIRST to PILES, those that are trained on with 1 to PILES."""
GAMES, IMITATION_RATE, PASSES = 2000, 0.003, 2
STARTS, SIZE, UPDATES, EVERY = 16, 8, 200, 10
RATES = {"nothing": 0.001, "60% right": 0.001, "wrong rule": 0.001}
"""Of self-play, by what it begins from."""
RANDOM = ("40% right", "60% right", "95% right")
PLAYERS = (*RANDOM, "wrong rule")
Policy = torch.Tensor
"""Chance of each token by pile, [PILES + 1, LETTERS + 1]: token n takes n + 1, the last is not a move."""


LEGAL = (torch.arange(LETTERS + 1) < torch.arange(PILES + 1)[:, None]) & (torch.arange(LETTERS + 1) < MOST)
"""Which tokens are moves, [PILES + 1, LETTERS + 1]."""


def player(multiple: int, right: float) -> Policy:
    """Return who leaves a multiple of this number with a chance of `right`, and takes any other otherwise.

    Where no move does, every move is as likely.
    """
    moves = LEGAL.double()
    best = torch.arange(PILES + 1) % multiple
    possible = (best > 0) & (best <= MOST)
    aim = torch.zeros_like(moves)
    aim[possible, best[possible] - 1] = 1.0
    others = moves - aim
    mixed = right * aim + (1 - right) * others / others.sum(1, keepdim=True).clamp(min=1)
    mixed = torch.where(others.sum(1, keepdim=True) > 0, mixed, aim)
    return torch.where(possible[:, None], mixed, moves / moves.sum(1, keepdim=True).clamp(min=1))


def named(name: str) -> Policy:
    """Return a player that is imitated; who follows the wrong rule does so 4 times in 5."""
    return (
        player(MOST + 2, 0.8) if name == "wrong rule" else player(MOST + 1, float(name.split("%")[0]) / 100)
    )


PERFECT, ANY = player(MOST + 1, 1.0), player(1, 0.0)
"""Opponents: without a mistake, and at random."""


def chance_to_win(policy: Policy, opponent: Policy) -> float:
    """Return the chance to win as the first to move, the mean over first piles that can be won.

    >>> chance_to_win(PERFECT, PERFECT), round(chance_to_win(ANY, ANY), 2)
    (1.0, 0.51)
    """
    wins = {True: torch.zeros(PILES + 1).double(), False: torch.zeros(PILES + 1).double()}
    for pile in range(1, PILES + 1):
        for ours, mover in ((True, policy), (False, opponent)):
            for move in range(min(MOST, pile)):
                rest = pile - move - 1
                result = 1.0 - wins[not ours][rest] if rest else 1.0
                wins[ours][pile] += mover[pile, move] * result
    first = [pile for pile in range(FIRST, PILES + 1) if pile % (MOST + 1)]
    return float(wins[True][first].mean())


@dataclass(frozen=True)
class NimMoves:
    """Moves of many games, in the order of turns; columns are [moves]."""

    pile: torch.Tensor
    token: torch.Tensor
    game: torch.Tensor
    turn: torch.Tensor
    won: torch.Tensor
    """True for the moves of who wins the game."""

    def batch(self, group: torch.Tensor | None = None) -> Batch:
        """Return a row for each move: three tokens of the pile, and the move's.

        With a group for each game, a seat's moves are an episode, and seats are compared separately.
        """
        rows, seat = len(self.pile), self.turn % 2
        zeros, mask = torch.zeros(rows, 4), torch.zeros(rows, 4, dtype=torch.bool)
        mask[:, -1] = True
        spelling = torch.stack([self.pile // 9, self.pile // 3 % 3, self.pile % 3, self.token], 1)
        return Batch(
            tokens=spelling,
            mask=mask,
            length=torch.full((rows,), 4),
            group=torch.arange(rows) if group is None else 2 * group[self.game] + seat,
            reward=mask * self.won.double()[:, None],
            logp_gen=zeros,
            logp_policy=zeros,
            version=torch.zeros(rows, 4, dtype=torch.long),
            episode=None if group is None else 2 * self.game + seat,
        )


def play(policy: Policy, starts: torch.Tensor, draw: torch.Generator) -> NimMoves:
    """Play games against itself: who takes the last one wins, and who breaks the rules loses."""
    pile, winner, columns = starts.clone(), torch.zeros_like(starts), list[torch.Tensor]()
    for turn in range(PILES):
        going = (pile > 0).nonzero()[:, 0]
        if not len(going):
            break
        token = torch.multinomial(policy[pile[going]], 1, generator=draw)[:, 0]
        columns.append(torch.stack([pile[going], token, going, torch.full_like(going, turn)]))
        illegal = ~LEGAL[pile[going], token]
        rest = torch.where(illegal, 0, pile[going] - token - 1)
        winner[going] = torch.where(illegal, 1 - turn % 2, turn % 2)
        pile[going] = rest
    piles, tokens, games, turns = torch.cat(columns, 1)
    return NimMoves(piles, tokens, games, turns, winner[games] == turns % 2)


def policy_of(trainee: Trainee) -> Policy:
    """Return the model's chances at every pile."""
    piles = torch.arange(PILES + 1)
    with torch.no_grad():
        digits = torch.stack([piles // 9, piles // 3 % 3, piles % 3], 1)
        logits = trainee.model(digits, use_cache=False).logits
    chances: Policy = logits[:, -1].double().softmax(-1)
    return chances


def greedy(policy: Policy) -> Policy:
    """Return the policy that makes the likeliest move."""
    return torch.nn.functional.one_hot(policy.argmax(1), LETTERS + 1).double()


def untrained(seed: int) -> Trainee:
    """Return a random model that is to be fine-tuned."""
    return Trainee(new_model(seed), build("sft", {}, horizon=1), IMITATION_RATE)


def imitate(name: str, seed: int) -> Trainee:
    """Fine-tune a new model on the moves of a player's games against itself."""
    draw = torch.Generator().manual_seed(seed + 1000)
    starts = torch.randint(1, PILES + 1, (GAMES,), generator=draw)
    trainee = untrained(seed)
    batch = play(named(name), starts, draw).batch()
    for _ in range(PASSES):
        trainee.epoch(batch, 64, draw)
    return trainee


def self_play(start: Trainee, lr: float, seed: int) -> tuple[Trainee, list[float]]:
    """Train a copy of a model on games against itself; return it, and its chance against a perfect player.

    A seat's moves are an episode, and the same seat of the 8 games from a pile is a group, whose mean is the
    baseline.
    """
    trainee = Trainee(start.model, build("rloo", {"credit": "centred"}, horizon=1), lr)
    draw, path = torch.Generator().manual_seed(seed + 2000), []
    for update in range(UPDATES + 1):
        policy = policy_of(trainee)
        if update % EVERY == 0:
            path.append(chance_to_win(policy, PERFECT))
        if update == UPDATES:
            break
        starts = torch.randint(1, PILES + 1, (STARTS,), generator=draw).repeat_interleave(SIZE)
        group = torch.arange(STARTS).repeat_interleave(SIZE)
        trainee.step(trainee.method.prepare(play(policy, starts, draw).batch(group)))
    return trainee, path


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Return the chances of players, of their imitations, and of self-play from three starts."""
    models, figures = {"nothing": untrained(seed)}, Figures(chances={}, paths={})
    for name in PLAYERS:
        report(f"imitation_ceiling, seed {seed}, {name}")
        models[name] = imitate(name, seed)
        figures["chances"][name] = both(named(name))
        figures["chances"][f"imitation of {name}"] = both(policy_of(models[name]))
        figures["chances"][f"greedy imitation of {name}"] = both(greedy(policy_of(models[name])))
    figures["chances"]["wrong rule without slips"] = both(greedy(named("wrong rule")))
    for name, lr in RATES.items():
        report(f"imitation_ceiling, seed {seed}, self-play from {name}")
        model, figures["paths"][name] = self_play(models[name], lr, seed)
        figures["chances"][f"self-play from {name}"] = both(policy_of(model))
        figures["chances"][f"greedy, after self-play from {name}"] = both(greedy(policy_of(model)))
    return figures


def both(policy: Policy) -> list[float]:
    """Return the chance to win against a perfect player, and against one at random."""
    return [chance_to_win(policy, PERFECT), chance_to_win(policy, ANY)]


# ---------------------------------------------------------------------- rules, table and picture


def against(figures: Figures, name: str, opponent: int = 0) -> float:
    """Return the chance to win against the perfect player (0) or the one at random (1)."""
    return float(figures["chances"][name][opponent])


RULES = {
    "imitation_ceiling": VerdictRule(
        "chance to beat a perfect player, demonstrators with random mistakes minus their greedy imitations",
        lambda figures: (
            sum(against(figures, name) - against(figures, f"greedy imitation of {name}") for name in RANDOM)
            / len(RANDOM)
        ),
        0.02,
    ),
    "imitation_discovers": VerdictRule(
        "chance to beat a perfect player, greedy imitation of the wrong rule minus the rule without slips",
        lambda figures: (
            against(figures, "greedy imitation of wrong rule") - against(figures, "wrong rule without slips")
        ),
        0.1,
        equal=True,
    ),
    "rl_beyond_sft": VerdictRule(
        "chance to beat a perfect player, self-play from the imitated wrong rule minus the better imitation",
        lambda figures: (
            against(figures, "self-play from wrong rule")
            - max(against(figures, f"{kind} of wrong rule") for kind in ("imitation", "greedy imitation"))
        ),
        0.1,
    ),
}


def table(results: Results) -> str:
    """Return the chances of every policy."""
    rows = []
    for name in results.runs[0]["chances"]:
        cells = [spread([against(run, name, n) for run in results.runs], ".1%") for n in (0, 1)]
        rows.append([name, *cells])
    return markdown(("policy", "beats a perfect player", "beats a random player"), rows)


def draw(results: Results, figure: Any) -> None:
    """Draw players and imitations against a perfect player, and self-play by update."""
    bars, curves = figure.subplots(1, 2, sharey=True)
    for n, kind in enumerate(("", "imitation of ", "greedy imitation of ")):
        heights = [[against(run, kind + name) for run in results.runs] for name in PLAYERS]
        means = [sum(values) / len(values) for values in heights]
        places = [x + 0.27 * (n - 1) for x in range(len(PLAYERS))]
        bars.bar(places, means, width=0.25, label=(kind or "the player").removesuffix(" of "), color=f"C{n}")
        for place, values in zip(places, heights, strict=True):
            bars.plot([place] * 2, [min(values), max(values)], color="black", lw=1)
    bars.set_xticks(range(len(PLAYERS)), PLAYERS)
    bars.set(title="imitation", ylabel="chance to beat a perfect player")
    bars.legend(frameon=False)
    for n, name in enumerate(RATES):
        runs = [run["paths"][name] for run in results.runs]
        curve(curves, range(0, UPDATES + 1, EVERY), runs, f"from {name}", f"C{n}")
    curves.set(title="self-play", xlabel="updates of 128 games")
    curves.legend(frameon=False)


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(11.0, 4.2))
