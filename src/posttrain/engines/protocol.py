"""The interface of a sampling engine."""

from dataclasses import dataclass
from typing import Protocol

from posttrain.models.fingerprint import NamedTensors
from posttrain.types import Completion, Request


class Engine(Protocol):
    """Draw completions from the weights that were loaded last.

    ticket = engine.submit(request)     at any time; any number of requests may be pending
    done = engine.poll()                completions that ended; an engine in this process takes one step
    pending = engine.unanswered()       requests without a completion, with the tokens drawn so far
    pending = engine.withdraw()         the same, and the engine forgets them
    engine.release(episode)             drop what is cached for further turns of an episode
    engine.load(weights, version)       replace the weights; tokens drawn from now on carry the version
    engine.sleep()                      with engine.sleep: free memory until the next load
    """

    @property
    def version(self) -> int:
        """Version of the loaded weights."""
        ...

    @property
    def busy(self) -> bool:
        """Return True if a submitted request has no completion yet."""
        ...

    def submit(self, request: Request) -> int:
        """Return the ticket of a request. Raise ValueError if it can never be served."""
        ...

    def poll(self, timeout_s: float = 0.0) -> list[tuple[int, Completion]]:
        """Return the completions that have ended, with their tickets.

        An engine in this process draws one more token for each running request. Any other engine waits up to
        `timeout_s` seconds while nothing has ended.
        """
        ...

    def unanswered(self) -> list[tuple[int, Request]]:
        """Return the tickets without a completion, each with the request that continues after the tokens
        drawn so far.

        Each of these tokens was drawn from the distribution of the loaded weights given everything before it.
        Under the same weights the continued request yields the same tokens as the original if the engine
        draws by position.
        """
        ...

    def withdraw(self) -> list[tuple[int, Request]]:
        """Return the same as `unanswered` and forget these requests: afterwards nothing is pending."""
        ...

    def release(self, episode: str) -> None:
        """Drop what is cached for further turns of this episode, if anything."""
        ...

    def load(self, weights: NamedTensors, version: int, *, keep: bool = False) -> str:
        """Load weights, draw from them from now on, and return the digest of what was received.

        Raise RuntimeError if requests are pending, unless `keep` is set: they then continue over keys and
        values of the previous weights, and their later tokens are of neither policy.
        """
        ...

    def sleep(self) -> None:
        """Free the memory of weights and caches until the next load, which is needed before any request.

        Raise RuntimeError if requests are pending.
        """
        ...

    def score(self, tokens: list[int]) -> list[float]:
        """Return log π(token t | tokens before t) for t = 1, 2 ... under the loaded weights, at temperature
        1.
        """
        ...

    def close(self) -> None:
        """End everything that the engine started outside this thread."""
        ...


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """What an engine has to know of a low-rank adapter to draw with it, but for its tensors."""

    config: str
    """Content of the file adapter_config.json that peft writes with an adapter."""
    base: str
    """Digest of the weights that it changes, in the engine's dtype (see models.fingerprint)."""


class AdapterEngine(Engine, Protocol):
    """An engine that can draw with an adapter which is not merged into its weights."""

    def load_adapter(self, weights: NamedTensors, version: int, adapter: PeftAdapter) -> str:
        """Load an adapter, draw with it from now on, and return the digest of the tensors received.

        weights: its factors in the engine's dtype, under the names of peft's files. The engine finds the
        weights that it changes by itself. Raise RuntimeError if requests are pending.
        """
        ...
