"""What the runtime asks of a sampling engine, whoever built it."""

from typing import Protocol

from posttrain.types import Completion, Request
from posttrain.weights import Named


class Engine(Protocol):
    """Draws answers from the newest weights it was given.

    ticket = engine.submit(request)     any number, at any time
    done = engine.step()                one forward pass; the answers that ended in it
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

    def step(self) -> list[tuple[int, Completion]]:
        """The answers that ended in one more forward pass, with their tickets."""
        ...

    def release(self, episode: str) -> None:
        """Drops what was kept for further turns of this episode; none may have been."""
        ...

    def load(self, weights: Named, version: int) -> str:
        """The digest of the weights received, which are now the ones drawn from."""
        ...

    def score(self, tokens: list[int]) -> list[float]:
        """log π(token t | tokens before t) for t = 1, 2 ... under the weights held, at temperature 1."""
        ...
