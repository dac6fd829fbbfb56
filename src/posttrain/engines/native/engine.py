"""Continuous batching: every step draws one token for each running sequence.

    step   consumes       waiting requests, while rows and cache last
           waits for      nothing
           unblocked by   a sequence that ends: its place is taken in the same step

Samples of one prompt share its prefill. The prompt runs once, its keys and values are copied into the row of
the samples that start, and they are dropped when no sample waits for them. The samples share that row, and
one computation a step, until they draw different tokens; then each of these takes a copy of the row. A
beginning that prompts share (a system message) runs once.
"""

from collections import Counter, abc
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from jaxtyping import Float
from transformers import PreTrainedModel

from posttrain.engines.native.draw import draw, likeliest, uniforms
from posttrain.engines.native.runner import ModelRunner
from posttrain.engines.native.scheduler import Scheduler
from posttrain.engines.sequence import Sequence, new_sequence
from posttrain.models.fingerprint import NamedTensors
from posttrain.models.loading import computing
from posttrain.types import Completion, Request

MOST_ROWS = 1 << 17
"""As many as the cache has tokens by default: more rows could not hold one token each."""


@dataclass(frozen=True, kw_only=True)
class NativeConfig:
    """How many answers are sampled at once, and with how much cache."""

    rows: int = 64
    """Largest number of answers that are sampled at the same time."""
    cache_tokens: int = 1 << 17
    """Tokens whose keys and values the cache holds. Where it cannot hold `rows` of the longest prompts with
    their answers, fewer run at once as they grow. Prompts of waiting samples may take as much again."""
    cuda_graphs: bool = True
    """On a GPU, capture a decoding step once per shape and replay it as one launch. False saves memory."""
    decode_kernel: bool = True
    """On a CPU with g++, compile decoding steps at their first use. False: PyTorch, about half as fast."""

    def __post_init__(self) -> None:
        if self.rows < 1 or self.cache_tokens < 1:
            raise ValueError("rows and cache_tokens must be 1 or more")
        if self.rows > MOST_ROWS:
            raise ValueError(f"rows must be {MOST_ROWS} or fewer, not {self.rows}")

    def cached_tokens(self, longest: int) -> int:
        """Return the tokens that the rows hold if the longest prompt with its answer has `longest`.

        >>> NativeConfig(rows=64, cache_tokens=100).cached_tokens(33), NativeConfig(rows=2).cached_tokens(33)
        (100, 66)
        """
        return max(longest, min(self.rows * longest, self.cache_tokens))


Decode = Callable[[list[int]], str]


class NativeEngine:
    """An engine over a transformers model that it alone runs (see engines.protocol).

    model: its weights are replaced by load(); decode: tokens -> text, for stop strings and answers;
    stop_tokens: each one ends an answer; context: largest number of tokens of a sequence.
    lent: by name, those of the model's weights that are a learner's own tensors, which load() does not write.
    routes: note which experts each token is sent to (`Completion.routes`).
    """

    @computing()
    def __init__(
        self,
        model: PreTrainedModel,
        *,
        decode: Decode,
        stop_tokens: abc.Sequence[int],
        config: NativeConfig = NativeConfig(),
        context: int = 1 << 20,
        lent: abc.Mapping[str, torch.Tensor] = MappingProxyType({}),
        routes: bool = False,
    ) -> None:
        self.runner = ModelRunner(
            model,
            rows=config.rows,
            cache_tokens=config.cache_tokens,
            recorded=config.cuda_graphs,
            compiled=config.decode_kernel,
            lent=lent,
            routes=routes,
        )
        self.scheduler = Scheduler(config.rows, config.cache_tokens)
        self.decode, self.stop_tokens, self.context = decode, frozenset(stop_tokens), context
        self.version = self.withdrawals = 0
        self._tickets = 0
        self._waiting_samples: Counter[tuple[int, ...]] = Counter()
        self._first_logits: dict[tuple[int, ...], torch.Tensor] = {}
        self._reusable: dict[tuple[int, ...], None] = {}
        """Prompts stored for later requests (`Request.again`), the one used last at the end."""

    @property
    def busy(self) -> bool:
        """Return True if a submitted request has no completion yet."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    def submit(self, request: Request) -> int:
        """Return the ticket of a request.

        Raise ValueError for an empty prompt, a token outside the vocabulary, or a prompt that leaves no room
        for the answer in the context or in the cache.
        """
        bound = min(self.context, self.scheduler.cache_tokens)
        sequence = new_sequence(self._tickets + 1, request, self.runner.vocabulary, bound)
        self._tickets += 1
        self.scheduler.waiting.append(sequence)
        self._waiting_samples[sequence.prompt] += 1
        return sequence.ticket

    def _make_room(self) -> None:
        """Reserve cache for the next tokens; where it is full, withdraw the newest sequences.

        These start again, after the tokens drawn so far, as soon as there is room.
        """
        scheduler, rows = self.scheduler, [*self.scheduler.running]
        withdrawn, copies = scheduler.withdraw_newest()
        if withdrawn:
            self._note_routes(rows, withdrawn)
        self._copy_rows(copies)
        for sequence in withdrawn:
            scheduler.waiting.appendleft(again := Sequence(sequence.ticket, sequence.continuation()))
            self._waiting_samples[again.prompt] += 1
        self.withdrawals += len(withdrawn)
        self._reserve()

    def _reserve(self) -> None:
        if running := self.scheduler.sequences:
            longest = max(s.longest for s in running)
            columns, occupied = self.scheduler.columns(running), len(self.scheduler.running)
            self.runner.cache.reserve(len(running), columns, longest, occupied)

    def _copy_rows(self, copies: list[tuple[int, int]]) -> None:
        moved = [self.scheduler.running[target][0] for _, target in copies]
        self.runner.cache.copy(copies, max((s.length for s in moved), default=0))

    def _note_routes(
        self, rows: abc.Sequence[list[Sequence]], sequences: abc.Collection[Sequence], first: int = 0
    ) -> None:
        """Copy the experts of these sequences' tokens from the cache; rows: of the cache, from `first` on.

        Those that an earlier request has noted stay: its tokens were drawn with them.
        """
        if self.runner.routers is None or not sequences:
            return
        row_of = {sequence.ticket: row for row, alike in enumerate(rows, first) for sequence in alike}
        for sequence in sequences:
            start = 0 if sequence.routes is None else len(sequence.routes)
            row = row_of[sequence.ticket]
            sequence.note_routes(self.runner.cache.routes(row, start, sequence.length - 1))

    def unanswered(self) -> list[tuple[int, Request]]:
        """Return pending requests with the tokens drawn so far (see engines.protocol)."""
        self._note_routes(self.scheduler.running, self.scheduler.sequences)
        return [(s.ticket, s.continuation()) for s in (*self.scheduler.sequences, *self.scheduler.waiting)]

    def withdraw(self) -> list[tuple[int, Request]]:
        """Return the pending requests and forget them."""
        pending = self.unanswered()
        self.scheduler.running.clear()
        self.scheduler.waiting.clear()
        self._waiting_samples.clear()
        self._forget(list(self._first_logits))
        self.runner.forget()
        return pending

    @computing()
    def load(self, weights: NamedTensors, version: int, *, keep: bool = False) -> str:
        """Load weights and return their digest as received (see engines.protocol)."""
        if self.busy and not keep:
            raise RuntimeError("requests are pending under the loaded weights: withdraw them first")
        # Stored prompts and turns were computed by the old weights, so they run again.
        self.runner.cache.turns.clear()
        self._forget(list(self._first_logits))
        received = self.runner.load(weights)
        self.version = version
        return received

    def release(self, episode: str) -> None:
        """Drop what is cached for further turns of this episode, if anything."""
        self.runner.cache.turns.pop(episode, None)

    def sleep(self) -> None:
        """Do nothing: recipes with engine.sleep and this engine are refused."""

    def close(self) -> None:
        """Do nothing: the engine runs in this thread."""

    @computing()
    def score(self, tokens: list[int]) -> list[float]:
        """Return log π(token t | before t) for t ≥ 1 at temperature 1, under the weights that draw."""
        logps = self.runner.score(tuple(tokens)).float().log_softmax(-1)
        return [float(logps[t - 1, tokens[t]]) for t in range(1, len(tokens))]

    @computing()
    def first(self, prompts: abc.Sequence[tuple[int, ...]]) -> Float[torch.Tensor, "P V"]:
        """log π(· | prompt) at temperature 1, of the token after each prompt; nothing else is disturbed."""
        return self.runner.next_logits(list(prompts)).float().log_softmax(-1)

    @computing()
    def poll(self, timeout_s: float = 0.0) -> list[tuple[int, Completion]]:
        """Draw one more token for each running sequence and return the completions that ended."""
        completions = self._start(self.scheduler.admit())
        self._make_room()
        newest = [row[0] for row in self.scheduler.running]
        if newest:
            logits = self.runner.decode([s.tokens[-1] for s in newest], [s.length - 1 for s in newest])
            completions += self._extend(0, logits)
        if not self.busy:
            # Exact resume needs answers whose last bits do not depend on earlier requests.
            self._forget(list(self._reusable))
            self.runner.forget()
        return completions

    def _start(self, started: list[list[Sequence]]) -> list[tuple[int, Completion]]:
        """Run the new prompts, copy each to its row and draw the first tokens after it."""
        if not started:
            return []
        cache = self.runner.cache
        sequences = [s for row in started for s in row]
        self._reserve()
        prompts = [row[0].prompt for row in started]
        fresh = [p for p in prompts if p not in cache.prompts]
        if fresh:
            turns = {s.prompt: s.request.episode for s in sequences if s.request.episode}
            self._first_logits.update(zip(fresh, self.runner.prefill(fresh, turns), strict=True))
        first = len(self.scheduler.running) - len(started)
        cache.place(prompts, first)
        logits = torch.stack([self._first_logits[p] for p in prompts])
        self._release_prompts(sequences)
        for prompt in fresh:
            if prompt in cache.prompts:
                cache.unshare(prompt)
        return self._extend(first, logits)

    def _release_prompts(self, sequences: list[Sequence]) -> None:
        """Drop prompts that no waiting sample needs and that are not reusable, and prompts over the bound."""
        cache = self.runner.cache
        self._waiting_samples.subtract(s.prompt for s in sequences)
        # A withdrawn answer's prompt and tokens are no prompt of a later request.
        reusable = {s.prompt: s.request.again and not s.request.begun for s in sequences}
        complete = [p for p in reusable if not self._waiting_samples[p]]
        for prompt in complete:
            del self._waiting_samples[prompt]
            self._reusable.pop(prompt, None)
        self._forget([p for p in complete if not reusable[p]])
        self._reusable |= dict.fromkeys(p for p in complete if reusable[p])
        total = sum(map(len, cache.prompts))
        while self._reusable and total > cache.tokens:
            total -= len(oldest := next(iter(self._reusable)))
            self._forget([oldest])
        self._forget(cache.excess())

    def _forget(self, prompts: abc.Sequence[tuple[int, ...]]) -> None:
        """Drop what was computed for these prompts; a prompt that is requested again runs again."""
        for prompt in prompts:
            del self._first_logits[prompt], self.runner.cache.prompts[prompt]
            self._reusable.pop(prompt, None)

    def _extend(self, first: int, logits: torch.Tensor) -> list[tuple[int, Completion]]:
        """Draw a token for each sequence of the rows from `first` on; return the completions that ended."""
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
            self.runner.draws,
        )
        completions = []
        cache, scheduler = self.runner.cache, self.scheduler
        for n, sequence in enumerate(sequences):
            if count := sequence.request.alternatives:
                sequence.alternatives.append(
                    likeliest(logits[row_of[n]], sequence.request.sampling.temperature, count)
                )
        for n, sequence in enumerate(sequences):
            token, logp_gen, logp_policy = tokens[n], gen[n], policy[n]
            if sequence.request.forced:
                token = sequence.request.forced[len(sequence.tokens)]
                scaled = logits[row_of[n]].float() / (sequence.request.sampling.temperature or 1.0)
                logp_gen = logp_policy = float(scaled.log_softmax(-1)[token])
            sequence.append(token, logp_gen, logp_policy, self.version)
            completion = sequence.check_end(self.decode, self.stop_tokens)
            if completion is not None:
                self._note_routes(rows, [sequence], first)
                routes = None if sequence.routes is None else sequence.routes.copy()
                completions.append((sequence.ticket, replace(completion, routes=routes)))
                if episode := sequence.request.episode:  # the newest token has not run
                    text = (*sequence.request.prompt, *sequence.tokens[:-1])
                    cache.keep_turn(episode, text, first + row_of[n])
        self._copy_rows(scheduler.split_rows(first, {ticket for ticket, _ in completions}))
        return completions
