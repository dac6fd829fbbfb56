"""What a sampler asks of an engine, whoever built it."""

from typing import Protocol

from posttrain.models.fingerprint import Named
from posttrain.types import Completion, Request


class Engine(Protocol):
    """Draws answers from the newest weights it was given.

    ticket = engine.submit(request)     any number, at any time
    done = engine.poll()                the answers that have ended; one in this process takes a step
    left = engine.unanswered()          what is unanswered, as far as it has come
    engine.withdraw()                   the same, and it is asked no more
    engine.release(episode)             what was computed of its turns is needed no more
    engine.load(weights, version)       new weights; what is drawn from now on carries the version
    """

    @property
    def version(self) -> int:
        """Version of the weights it holds."""
        ...

    @property
    def busy(self) -> bool:
        """Whether any submitted request has not been answered."""
        ...

    def submit(self, request: Request) -> int:
        """A ticket for the answer; ValueError if the request can never be served."""
        ...

    def poll(self, timeout_s: float = 0.0) -> list[tuple[int, Completion]]:
        """The answers that have ended, with their tickets.

        An engine in this process draws one more token for each answer running. Any other is waited for,
        so long as nothing has ended.
        """
        ...

    def unanswered(self) -> list[tuple[int, Request]]:
        """The tickets that are unanswered, each with the request that goes on behind what was drawn.

        Its tokens are each drawn from what the weights held say of all that stands before them; under the
        same weights they are those of the answer that went on, if the engine draws by position.
        """
        ...

    def withdraw(self) -> list[tuple[int, Request]]:
        """The same, and they are forgotten: the engine has nothing to answer any more."""
        ...

    def release(self, episode: str) -> None:
        """Drops what was kept for further turns of this episode; none may have been."""
        ...

    def load(self, weights: Named, version: int, *, keep: bool = False) -> str:
        """The digest of the weights received, which are now the ones drawn from.

        Of what was asked before nothing may be unanswered, unless `keep` says that answers go on over keys
        and values of the weights before: their later tokens are then of neither policy. RuntimeError.
        """
        ...

    def score(self, tokens: list[int]) -> list[float]:
        """log π(token t | tokens before t) for t = 1, 2 ... under the weights held, at temperature 1."""
        ...

    def close(self) -> None:
        """Ends what it has begun outside of this thread."""
        ...
