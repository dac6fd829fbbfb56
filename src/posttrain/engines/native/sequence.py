"""One answer in the making."""

from dataclasses import dataclass, field

from posttrain.engines.native.draw import stream
from posttrain.types import Completion, Request


@dataclass
class Sequence:
    """A request, what has been drawn for it, and where it sits in the cache."""

    ticket: int
    request: Request
    tokens: list[int] = field(default_factory=list)
    logp_gen: list[float] = field(default_factory=list)
    logp_policy: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    key: int = 0

    def __post_init__(self) -> None:
        self.key = stream(self.request.seed, self.request.task, self.request.sample)

    @property
    def longest(self) -> int:
        """The most tokens that it can come to, prompt included."""
        return len(self.request.prompt) + self.request.sampling.max_new_tokens

    def append(self, token: int, logp_gen: float, logp_policy: float, version: int) -> None:
        """Takes the next drawn token."""
        self.tokens.append(token)
        self.logp_gen.append(logp_gen)
        self.logp_policy.append(logp_policy)
        self.version.append(version)

    def completion(self, text: str, stop: str) -> Completion:
        """The answer, once it has ended."""
        return Completion(
            tokens=self.tokens,
            logp_gen=self.logp_gen,
            logp_policy=self.logp_policy,
            version=self.version,
            text=text,
            stop=stop,
        )
