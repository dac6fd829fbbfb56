"""Nim, which the policy plays against itself: take 1 to 3 of a pile in turn; who takes the last one wins.

    form.jsonl      conversations of players who know the rules and nothing else   (to learn the form from)
    text.txt        the same as text                                               (to learn a tokenizer from)
    train.jsonl     piles that are played against oneself, or a player at random   (for GRPO)
    held_out.jsonl  piles that can be won, against a player who makes no mistake   (to evaluate on)

From a pile that is no multiple of 4 whoever moves can win: it leaves a multiple of 4, each time. Against a player
who makes no mistake a game is won only if no move of it was wrong.
"""

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from posttrain.envs.protocol import Start, Turn
from posttrain.types import Message, Task, Verdict

MOST = 3
"""How many may be taken at once."""


@dataclass(frozen=True)
class Game:
    """A game that is going on; seat: whose turn it is."""

    pile: int
    against: str
    seed: int
    seat: int = 0


class Nim:
    """A game against oneself (two seats), "random" or "perfect": 1 for who wins, 0 for who loses or breaks the rules.

    Labels: won, lost, illegal.
    """

    def start(self, task: Task) -> Start:
        """The pile, shown to who begins."""
        pile, against = int(task.fields["pile"]), str(task.fields["against"])
        seats = 2 if against == "self" else 1
        state = Game(pile, against, seed=int(task.fields.get("seed", 0)))
        return Start(state=state, messages=shown(pile), seats=seats)

    def reply(self, game: Game, response: str) -> Turn:
        """What is left, shown to whose turn it is; or the end."""
        said = response.strip()
        if said not in legal(game.pile):
            return over(game, won=False, label="illegal", reason=f"{said[:20]!r} of {game.pile}")
        left = game.pile - int(said)
        if not left:
            return over(game, won=True, reason="took the last one")
        if game.against == "self":
            after = replace(game, pile=left, seat=1 - game.seat)
            return Turn(state=after, messages=shown(left), seat=after.seat)
        left -= opponent(game, left)
        if not left:
            return over(game, won=False, reason="the other took the last one")
        return Turn(state=replace(game, pile=left), messages=shown(left))


def nim() -> Nim:
    """The environment."""
    return Nim()


def shown(pile: int) -> tuple[Message, ...]:
    """What a player is told."""
    return ({"role": "user", "content": f"{pile} left"},)


def legal(pile: int) -> list[str]:
    """The moves."""
    return [str(n) for n in range(1, min(MOST, pile) + 1)]


def opponent(game: Game, pile: int) -> int:
    """How many the other player takes; without a move that wins, any."""
    best = pile % (MOST + 1)
    if game.against == "perfect" and best:
        return best
    return int(random.Random(f"{game.seed}/{pile}").choice(legal(pile)))


def over(game: Game, *, won: bool, reason: str, label: str = "") -> Turn:
    """The end, with a verdict for each seat."""
    mine = Verdict(score=float(won), label=label or ("won" if won else "lost"), reason=reason)
    if game.against != "self":
        return Turn(state=game, done=True, verdict=mine)
    theirs = Verdict(score=float(not won), label="lost" if won else "won", reason=reason)
    return Turn(state=game, done=True, verdict=(theirs, mine) if game.seat else (mine, theirs))


def write(
    directory: Path,
    *,
    most: int = 12,
    games: int = 3000,
    train: int = 2000,
    against: str = "self",
    seed: int = 0,
) -> None:
    """Writes the files; piles are 1 to `most`, and train.jsonl is played against `against`."""
    dice = random.Random(seed)
    talks = [{"messages": conversation(dice, most)} for _ in range(games)]
    lines(directory / "form.jsonl", talks)
    texts = ("\n".join(f"{m['role']}\n{m['content']}" for m in talk["messages"]) for talk in talks)
    (directory / "text.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    asked = [(f"train-{n}", dice.randint(5, most), against, n) for n in range(train)]
    piles = [pile for pile in range(5, most + 1) if pile % (MOST + 1)]
    tried = [(f"held_out-{pile}-{n}", pile, "perfect", n) for n in range(20) for pile in piles]
    for name, of in (("train", asked), ("held_out", tried)):
        keys = ("id", "pile", "against", "seed")
        lines(
            directory / f"{name}.jsonl",
            ({**dict(zip(keys, each, strict=True)), "prompt": "nim"} for each in of),
        )


def conversation(dice: random.Random, most: int) -> list[Message]:
    """What one player of two sees of a game, both of whom move at random."""
    pile, talk = dice.randint(1, most), list[Message]()
    while pile > 0:
        taken = int(dice.choice(legal(pile)))
        talk += [*shown(pile), {"role": "assistant", "content": str(taken)}]
        pile -= taken
        if pile:
            pile -= int(dice.choice(legal(pile)))
    return talk


def lines(file: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Writes records, one a line."""
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
