"""A vLLM server as a sampling engine: tokens pass over HTTP, and weights through a folder or from GPU to GPU.

    poll   consumes       parts of answers that the server has sent
           waits for      the next part, at most a tick; in all no longer than the server's deadline
           unblocked by   a token of any answer

As with vLLM in this process, posttrain decides what an answer is: tokens in and tokens out, where it ends,
which version drew each token. The server must allow its weights to be replaced (VLLM_SERVER_DEV_MODE=1).
"""

import math
import time
from collections import abc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from posttrain.engines.protocol import PeftAdapter
from posttrain.engines.sequence import Sequence
from posttrain.engines.vllm import routed
from posttrain.engines.vllm.asking import ExpectedWeights, checked_sequence, sampling_params
from posttrain.engines.vllm.connection import (
    COMPLETIONS,
    HIGHEST_BIAS,
    SLEEP,
    ServedConfig,
    check_temperature,
    completion_body,
    connect,
    transfer_backend,
)
from posttrain.engines.vllm.ipc import CudaIpc
from posttrain.engines.vllm.nccl import NcclGroup
from posttrain.engines.vllm.server import Streams
from posttrain.engines.vllm.weight_sinks import AdapterFiles, IpcWeights, NcclWeights, WeightFiles, WeightSink
from posttrain.models.attention import masked_tokens
from posttrain.models.experts import expert_layers
from posttrain.models.fingerprint import NamedTensors
from posttrain.types import Completion, Request, RunError

_CPU = torch.device("cpu")
_TICK_S = 0.05
"""Seconds that a poll waits for news."""
_TOKENS_A_MESSAGE = 8
"""Tokens in a message; 1 if a stop string may end the answer at any token."""
_LIKELY = 1.0
"""Nats by which a forced token is made likelier than all others together, at its least likely place."""


class ServerEngine:
    """An engine over a vLLM server, which draws only from weights loaded here (see engines.protocol).

    model: its architecture, without weights; dtype: type in which weights are sent; decode, stop_tokens and
    context: as for any engine; device: that of this sampler, which sends weights by NCCL or CUDA IPC if the
    server was started for it; base: yields the weights that an adapter changes; routes: note which experts
    each token is sent to (`Completion.routes`). Answers and draws are those of vLLM in this process.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        dtype: torch.dtype,
        decode: Callable[[list[int]], str],
        stop_tokens: abc.Sequence[int],
        config: ServedConfig,
        context: int,
        device: torch.device = _CPU,
        base: Callable[[], NamedTensors] = lambda: (),
        routes: bool = False,
    ) -> None:
        self.decode, self.stop_tokens = decode, frozenset(stop_tokens)
        self.context = min(context, config.cache_tokens)
        self.version = -1
        self._masked = masked_tokens(model)
        self._vocabulary: int = model.get_input_embeddings().num_embeddings
        self.server, self.name, raw = connect(config, model, self.context)
        self.raw = bool(raw)
        expected = ExpectedWeights(model)
        self._files = WeightFiles(self.server, self.name, expected, dtype, config.folder)
        self._sink: WeightSink = self._files
        backend, _ = transfer_backend(config, device)
        if backend == "nccl":
            self._sink = NcclWeights(self.server, self.name, expected, dtype, NcclGroup(device))
        elif backend == "ipc":
            self._sink = IpcWeights(self.server, self.name, expected, dtype, CudaIpc(device))
        self._base = base
        self._expert_layers = expert_layers(model) if routes else []
        self._adapters: AdapterFiles | None = None
        self._is_asleep = config.sleep
        self._streams = Streams(self.server, config.rows)
        self._tickets = 0
        self._running: dict[int, Sequence] = {}
        self._raised: dict[int, float] = {}
        """By ticket, how much the logits of a forced answer's token were raised."""
        self._news_at = time.monotonic()

    @property
    def busy(self) -> bool:
        """Return True if a submitted request has no completion yet."""
        return bool(self._running)

    def submit(self, request: Request) -> int:
        """Return the ticket of a request. Raise ValueError if vLLM cannot draw it."""
        if self.version < 0:
            raise RuntimeError("there are no weights to draw from: load some first")
        sequence = checked_sequence(self._tickets + 1, request, self._vocabulary, self.context)
        check_temperature(request.sampling.temperature, raw=self.raw)
        self._tickets += 1
        if not self._running:
            self._news_at = time.monotonic()
        body = self._body(sequence)
        self._running[self._tickets] = sequence
        self._streams.begin(self._tickets, routed.PATH if self._expert_layers else COMPLETIONS, body)
        return self._tickets

    def _body(self, sequence: Sequence) -> dict[str, Any]:
        params = sampling_params(sequence, self.stop_tokens, self._masked)
        if forced := sequence.request.forced:
            self._raised[sequence.ticket] = raised = self._forcing_bias(sequence.prompt, forced)
            bias = {**params.get("logit_bias", {}), forced[0]: raised}
            params |= {
                "temperature": 0.0,
                "logit_bias": bias,
                "stop_token_ids": [],
                "max_tokens": len(forced),
            }
        if self._expert_layers:
            return routed.body(self.name, sequence.prompt, params)
        return completion_body(self.name, sequence.prompt, params) | {
            "stream": True,
            "stream_interval": 1 if sequence.request.sampling.stop else _TOKENS_A_MESSAGE,
        }

    def _forcing_bias(self, prompt: abc.Sequence[int], forced: abc.Sequence[int]) -> float:
        """Return how much to raise the logits of a forced token.

        The probability of a token cannot be recovered once it is almost 1. So the token becomes likely and no
        more: at its least likely place, a little likelier than all others together.
        """
        if self.raw:
            return HIGHEST_BIAS
        logps = self.score([*prompt, *forced])[-len(forced) :]
        return min(HIGHEST_BIAS, max(0.0, _LIKELY - min(map(_odds, logps))))

    def unanswered(self) -> list[tuple[int, Request]]:
        """Return pending requests with the tokens drawn so far (see engines.protocol)."""
        return [(ticket, sequence.continuation()) for ticket, sequence in self._running.items()]

    def withdraw(self) -> list[tuple[int, Request]]:
        """Return the pending requests and forget them; closed connections make the server drop them."""
        pending = self.unanswered()
        self._streams.end(self._running)
        self._running.clear()
        self._raised.clear()
        self._streams.news(0.0)
        return pending

    def release(self, episode: str) -> None:
        """Do nothing: the server keeps what it computed while it has room."""

    def sleep(self) -> None:
        """Let the server free its GPU memory until the next load (see engines.protocol)."""
        if self.busy:
            raise RuntimeError("requests are pending: withdraw them first")
        if not self._is_asleep:
            self.version = -1
            self.server.ask(SLEEP)
            self._is_asleep = True

    def close(self) -> None:
        """Close the connections; the server keeps running."""
        if self._adapters:
            self._adapters.close()
        self._streams.close()
        self.server.close()

    # ------------------------------------------------------------------ weights

    def load(self, weights: NamedTensors, version: int, *, keep: bool = False) -> str:
        """Load weights and return their digest (see engines.protocol).

        It is that of what the server has read from files; from GPU to GPU, that of what was sent.

        Raise KeyError for an unknown, repeated or missing weight, ValueError for a wrong shape, and RunError
        if the server does not load them. After an error nothing is drawn until a load succeeds.
        """
        return self._load(self._sink, weights, version)

    def load_adapter(self, weights: NamedTensors, version: int, adapter: PeftAdapter) -> str:
        """Load an adapter, before the first the weights that it changes too (see engines.protocol).

        Raise the errors of `load`.
        """
        if self._adapters is None or self._adapters.adapter != adapter:
            self._adapters = AdapterFiles(self._files, adapter, self._base)
        return self._load(self._adapters, weights, version)

    def _load(self, sink: WeightSink, weights: NamedTensors, version: int) -> str:
        if self.busy:
            raise RuntimeError("requests are pending under the loaded weights: withdraw them first")
        self.version = -1  # partly replaced weights have no version
        ask = self.server.ask
        # The cache gets its memory back after the weights, whose loading needs some. A server that is awake
        # may still work on withdrawn requests.
        path = "/wake_up?tags=weights" if self._is_asleep else "/pause?mode=abort"
        received = sink.send(weights, lambda: ask(path))
        if self._is_asleep:
            ask("/wake_up?tags=kv_cache")
            self._is_asleep = False
        # Cached prefixes were computed by the previous weights.
        if not ask("/reset_prefix_cache")["success"]:
            raise self.server.fault("did not release the prefixes that earlier weights computed")
        ask("/resume")
        self.name, self.version = sink.name, version
        return received

    # ------------------------------------------------------------------ answers

    def score(self, tokens: list[int]) -> list[float]:
        """Return log π(token t | before t) for t ≥ 1 at temperature 1, under the weights that draw."""
        if self.version < 0:
            raise RuntimeError("there are no weights to draw from: load some first")
        params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        response = self.server.ask(COMPLETIONS, completion_body(self.name, tokens, params))
        with self.server.expecting("does not report the probability of the tokens of a prompt"):
            pairs = zip(tokens[1:], response["choices"][0]["prompt_logprobs"][1:], strict=True)
            return [float(logprobs[str(token)]["logprob"]) for token, logprobs in pairs]

    def poll(self, timeout_s: float = 0.0) -> list[tuple[int, Completion]]:
        """Return the completions that have ended; wait up to a tick for news."""
        if not self._running:
            return []
        completions = []
        news = self._streams.news(max(timeout_s, _TICK_S))
        for ticket, part in news:
            if isinstance(part, RunError):
                raise part
            if (sequence := self._running.get(ticket)) is None:
                continue  # it has ended, and more tokens were in transit
            if part is None:
                raise self.server.fault("stopped an answer before its end")
            if completion := self._extend(sequence, part):
                del self._running[ticket]
                self._raised.pop(ticket, None)
                completions.append((ticket, completion))
        if completions:
            self._streams.end(ticket for ticket, _ in completions)
        self._check_deadline(bool(news))
        return completions

    def _check_deadline(self, news: bool) -> None:
        now = time.monotonic()
        if news:
            self._news_at = now
        elif now - self._news_at > self.server.deadline_s:
            waiting, seconds = len(self._running), self.server.deadline_s
            why = f": it {self._streams.refused}" if self._streams.refused else ""
            raise self.server.fault(f"sent nothing for {seconds:g} s, with {waiting} answers pending{why}")

    def _extend(self, sequence: Sequence, part: dict[str, Any]) -> Completion | None:
        """Append the drawn tokens. Return the completion if it ended with them."""
        with self.server.expecting("does not report the tokens that it drew and their probabilities"):
            choice = routed.as_completion(part["choices"][0]) if self._expert_layers else part["choices"][0]
            tokens = choice["token_ids"] or []
            logps = choice["logprobs"]["token_logprobs"] if tokens else []
            pairs = [(int(token), float(logp)) for token, logp in zip(tokens, logps, strict=True)]
        for token, logp in pairs:
            sequence.append(token, *self._logps(sequence, token, logp), self.version)
            if completion := sequence.check_end(self.decode, self.stop_tokens):
                if self._expert_layers and completion.stop != "stop":  # the server did not end that answer
                    count = sequence.length - 1
                    routes = routed.read_routes(self.server, choice, self._expert_layers, count)
                    completion = replace(completion, routes=routes)
                return completion
        if choice.get("finish_reason"):
            raise self.server.fault(f"stopped an answer before its end: {choice['finish_reason']}")
        return None

    def _logps(self, sequence: Sequence, token: int, logp: float) -> tuple[float, float]:
        """logp_gen and logp_policy of a drawn token from the log-probability that the server reports."""
        request = sequence.request
        if not request.forced:
            return (0.0 if request.sampling.greedy else logp), logp
        if token != request.forced[0]:
            raise self.server.fault(f"drew token {token} instead of the forced {request.forced[0]}")
        if not self.raw:
            odds = _odds(logp) - self._raised[sequence.ticket]
            logp = -math.log1p(math.exp(-odds)) if odds > 0 else odds - math.log1p(math.exp(odds))
        return logp, logp


def _odds(logp: float) -> float:
    """log p/(1 − p).

    >>> round(_odds(math.log(0.25)), 6) == round(math.log(1 / 3), 6), _odds(0.0) > 30
    (True, True)
    """
    return logp - math.log(max(-math.expm1(logp), 1e-15))
