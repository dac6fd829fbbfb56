"""Continuous batching: every step draws one token for each running sequence.

    step   consumes       waiting requests, while rows and cache last
           waits for      nothing
           unblocked by   a sequence that ends: its place is taken in the same step

Samples of one prompt share its prefill: the prompt runs once, its keys and values are copied into
the row of those that start, and are dropped when none is left waiting. They share that row, and one
computation a step, until they draw different tokens; then each of these takes a copy of the row.
A beginning that prompts share (a system message) runs once for all of them.
"""

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Listed
from dataclasses import dataclass

import torch
from jaxtyping import Float
from transformers import PreTrainedModel

from posttrain.engines.native.draw import draw, uniforms
from posttrain.engines.native.runner import ModelRunner
from posttrain.engines.native.scheduler import Scheduler
from posttrain.engines.sequence import Sequence, new_sequence
from posttrain.models.fingerprint import Named
from posttrain.models.loading import computing
from posttrain.types import Completion, Request

MOST_ROWS = 1 << 17
"""As many as the cache has tokens by default: more could not hold one each."""


@dataclass(frozen=True, kw_only=True)
class NativeConfig:
    """How much runs at once."""

    rows: int = 64
    """Answers that are drawn side by side."""
    cache_tokens: int = 1 << 17
    """Tokens whose keys and values are kept: rows × the longest prompt with its answer. Prompts that
    samples still wait for may take as much again."""
    cuda_graphs: bool = True
    """On a GPU, a decoding step is recorded once for each shape and replayed as one launch; false saves the
    memory that recordings hold."""
    decode_kernel: bool = True
    """On a processor, decoding steps are compiled at their first use where there is g++; false leaves them to
    PyTorch, which takes about twice as long."""

    def __post_init__(self) -> None:
        if self.rows < 1 or self.cache_tokens < 1:
            raise ValueError("rows and cache_tokens must be 1 or more")
        if self.rows > MOST_ROWS:
            raise ValueError(f"rows must be {MOST_ROWS} or fewer, not {self.rows}")

    def cached_tokens(self, longest: int) -> int:
        """Tokens that the rows hold, where the longest prompt with its answer has so many.

        >>> NativeConfig(rows=64, cache_tokens=100).cached_tokens(33), NativeConfig(rows=2).cached_tokens(33)
        (99, 66)
        """
        return max(1, min(self.rows, self.cache_tokens // longest)) * longest


Decode = Callable[[list[int]], str]


class NativeEngine:
    """An engine over a transformers model that it alone owns (see engines.protocol).

    model: its weights are replaced by load(); decode: tokens -> text, for stop strings and answers;
    stop_tokens: any of them ends an answer; context: the most tokens that a sequence may come to.
    """

    @computing()
    def __init__(
        self,
        model: PreTrainedModel,
        *,
        decode: Decode,
        stop_tokens: Listed[int],
        config: NativeConfig = NativeConfig(),
        context: int = 1 << 20,
    ) -> None:
        self.runner = ModelRunner(
            model,
            rows=config.rows,
            cache_tokens=config.cache_tokens,
            recorded=config.cuda_graphs,
            compiled=config.decode_kernel,
        )
        self.scheduler = Scheduler(config.rows, config.cache_tokens)
        self.decode, self.stop_tokens, self.context = decode, frozenset(stop_tokens), context
        self.version = 0
        self._tickets = 0
        self._wanted: Counter[tuple[int, ...]] = Counter()
        self._first_logits: dict[tuple[int, ...], torch.Tensor] = {}
        self._again: dict[tuple[int, ...], None] = {}
        """Prompts that are kept though nobody waits for them; what was used last comes last."""

    @property
    def busy(self) -> bool:
        """Whether any submitted request has not been answered."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    def submit(self, request: Request) -> int:
        """A ticket for the answer.

        Raises ValueError for an empty prompt, a token outside the vocabulary, or a prompt that leaves no
        room for the answer in the context or in the cache.
        """
        bound = min(self.context, self.scheduler.cache_tokens)
        sequence = new_sequence(self._tickets + 1, request, self.runner.vocabulary, bound)
        self._tickets += 1
        self.scheduler.waiting.append(sequence)
        self._wanted[sequence.prompt] += 1
        return sequence.ticket

    def unanswered(self) -> list[tuple[int, Request]]:
        """What has not been answered, as far as it has come (see engines.protocol)."""
        return [(s.ticket, s.rest()) for s in (*self.scheduler.sequences, *self.scheduler.waiting)]

    def withdraw(self) -> list[tuple[int, Request]]:
        """The same, which is then forgotten."""
        left = self.unanswered()
        self.scheduler.running.clear()
        self.scheduler.waiting.clear()
        self._wanted.clear()
        self._forget(list(self._first_logits))
        self.runner.forget()
        return left

    @computing()
    def load(self, weights: Named, version: int, *, keep: bool = False) -> str:
        """The digest of the weights received (see engines.protocol)."""
        if self.busy and not keep:
            raise RuntimeError("answers are running over keys and values of the weights held: withdraw them")
        # What waiting samples share and earlier turns left was computed by the old weights: it runs again.
        self.runner.cache.kept.clear()
        self._forget(list(self._first_logits))
        received = self.runner.load(weights)
        self.version = version
        return received

    def release(self, episode: str) -> None:
        """Drops what was kept for further turns of this episode; none may have been."""
        self.runner.cache.kept.pop(episode, None)

    def close(self) -> None:
        """Nothing: all of it is in this thread."""

    @computing()
    def score(self, tokens: list[int]) -> list[float]:
        """log π(token t | before t) for t ≥ 1 at temperature 1, through the weights that draw."""
        logps = self.runner.score(tuple(tokens)).float().log_softmax(-1)
        return [float(logps[t - 1, tokens[t]]) for t in range(1, len(tokens))]

    @computing()
    def first(self, prompts: Listed[tuple[int, ...]]) -> Float[torch.Tensor, "P V"]:
        """log π(· | prompt) at temperature 1, of the token after each prompt; nothing else is disturbed."""
        return self.runner.after(list(prompts)).float().log_softmax(-1)

    @computing()
    def poll(self, timeout_s: float = 0.0) -> list[tuple[int, Completion]]:
        """The answers that ended in one more token for each running sequence; waits for nothing."""
        done = self._start(self.scheduler.admit())
        newest = [row[0] for row in self.scheduler.running]
        if newest:
            logits = self.runner.decode(
                [s.tokens[-1] for s in newest], [len(s.request.prompt) + len(s.tokens) - 1 for s in newest]
            )
            done += self._extend(0, logits)
        if not self.busy:
            # Exact resume needs answers whose last bits do not depend on earlier requests.
            self._forget(list(self._again))
            self.runner.forget()
        return done

    def _start(self, started: list[list[Sequence]]) -> list[tuple[int, Completion]]:
        """Runs the prompts that are new, puts each in its row and draws the first tokens after it."""
        if not started:
            return []
        cache, running = self.runner.cache, self.scheduler.sequences
        sequences = [s for row in started for s in row]
        cache.reserve(len(running), max(s.longest for s in running))
        prompts = [row[0].prompt for row in started]
        new = [p for p in prompts if p not in cache.prompts]
        if new:
            turns = {s.prompt: s.request.episode for s in sequences if s.request.episode}
            self._first_logits.update(zip(new, self.runner.prefill(new, turns), strict=True))
        first = len(self.scheduler.running) - len(started)
        cache.place(prompts, first)
        logits = torch.stack([self._first_logits[p] for p in prompts])
        self._wanted.subtract(s.prompt for s in sequences)
        again = {s.prompt: s.request.again for s in sequences}
        over = [p for p in again if not self._wanted[p]]
        for prompt in over:
            del self._wanted[prompt]
            self._again.pop(prompt, None)
        self._forget([p for p in over if not again[p]])
        self._again |= dict.fromkeys(p for p in over if again[p])
        held = sum(map(len, cache.prompts))
        while self._again and held > cache.tokens:
            held -= len(oldest := next(iter(self._again)))
            self._forget([oldest])
        self._forget(cache.excess())
        for prompt in new:
            if prompt in cache.prompts:
                cache.own(prompt)
        return self._extend(first, logits)

    def _forget(self, prompts: Listed[tuple[int, ...]]) -> None:
        """Drops what was computed of these prompts; one that is asked for again runs again."""
        for prompt in prompts:
            del self._first_logits[prompt], self.runner.cache.prompts[prompt]
            self._again.pop(prompt, None)

    def _extend(self, first: int, logits: torch.Tensor) -> list[tuple[int, Completion]]:
        """Draws a token for each sequence of the rows from `first` on; the answers that end with it leave."""
        rows = self.scheduler.running[first:]
        row_of = [row for row, sequences in enumerate(rows) for _ in sequences]
        sequences = [s for row in rows for s in row]
        positions = [s.request.position + len(s.tokens) for s in sequences]
        tokens, gen, policy = draw(
            logits,
            [s.request.sampling for s in sequences],
            uniforms([s.key for s in sequences], positions).tolist(),
            {n: s.excluded for n, s in enumerate(sequences) if s.request.excluded},
            self.runner.kernels,
            row_of if len(rows) < len(sequences) else None,
        )
        done = []
        cache, scheduler = self.runner.cache, self.scheduler
        for n, sequence in enumerate(sequences):
            token, logp_gen, logp_policy = tokens[n], gen[n], policy[n]
            if sequence.request.forced:
                token = sequence.request.forced[len(sequence.tokens)]
                warm = logits[row_of[n]].float() / (sequence.request.sampling.temperature or 1.0)
                logp_gen = logp_policy = float(warm.log_softmax(-1)[token])
            sequence.append(token, logp_gen, logp_policy, self.version)
            ended = sequence.ended(self.decode, self.stop_tokens)
            if ended is not None:
                done.append((sequence.ticket, ended))
                if episode := sequence.request.episode:  # the newest token has not run
                    text = (*sequence.request.prompt, *sequence.tokens[:-1])
                    cache.keep(episode, text, first + row_of[n])
        copies = scheduler.part(first, {ticket for ticket, _ in done})
        taken = [scheduler.running[target][0] for _, target in copies]
        cache.copy(copies, max((len(s.request.prompt) + len(s.tokens) for s in taken), default=0))
        return done
