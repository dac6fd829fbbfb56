"""vLLM as a sampling engine: its scheduler, cache, kernels and draws, stepped in this process.

    step   consumes       requests that were submitted, while rows and cache last
           waits for      nothing
           unblocked by   an answer that ends

posttrain still decides what an answer is: tokens in and tokens out, where it ends, which version drew each
token. vLLM gets no tokenizer.
"""

from collections import abc
from collections.abc import Callable, Iterator
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from transformers import PreTrainedModel

from posttrain.engines.sequence import Sequence
from posttrain.engines.vllm.asking import LOWEST_BIAS, ExpectedWeights, checked_sequence, sampling_params
from posttrain.engines.vllm.connection import ServedConfig
from posttrain.engines.vllm.start import start
from posttrain.models.attention import masked_tokens
from posttrain.models.file_names import to_files
from posttrain.models.fingerprint import NamedTensors, checked, combined, fingerprint
from posttrain.types import Completion, Request, RunError

_FORCING = 100.0
"""Added to a logit it makes that token the likeliest, and float32 still resolves the others to 1e-5."""


class VllmEngine:
    """An engine over vLLM, without weights until some are loaded (see engines.protocol).

    model: its architecture, without weights; dtype: type in which vLLM computes; decode: tokens -> text, for
    stop strings and answers; stop_tokens: each one ends an answer; context: largest number of tokens of a
    sequence; buffers: those of the model's files, which training leaves as they are.

    The same request gives the same answer under the same weights. A request that continues after tokens drawn
    earlier uses a seed of its position, so it does not draw the tokens that would have followed there.
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
        buffers: abc.Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        self.decode, self.stop_tokens = decode, frozenset(stop_tokens)
        self.context = min(context, config.cache_tokens)
        self.version = -1
        self._dtype = dtype
        self._weights, self._masked = ExpectedWeights(model), masked_tokens(model)
        self._buffers = to_files(model, buffers)
        self._vocabulary: int = model.get_input_embeddings().num_embeddings
        self._vllm, self._llm = start(model.config, dtype, config, self.context)
        self._is_asleep = False
        self._requests = 0
        self._running: dict[int, Sequence] = {}
        self._done: list[tuple[int, Completion]] = []

    @property
    def busy(self) -> bool:
        """Return True if a submitted request has no completion yet."""
        return bool(self._running or self._done)

    def submit(self, request: Request) -> int:
        """Return the ticket of a request. Raise ValueError if vLLM cannot draw it."""
        sequence = checked_sequence(self._requests + 1, request, self._vocabulary, self.context)
        ticket = self._ask(sequence.prompt, **self._sampling_params(sequence))
        self._running[ticket] = sequence
        return ticket

    def _sampling_params(self, sequence: Sequence) -> dict[str, Any]:
        forced = sequence.request.forced
        if not forced:
            return sampling_params(sequence, self.stop_tokens, self._masked)
        return {
            "max_tokens": len(forced),
            "temperature": 0.0,
            "logit_bias": dict.fromkeys(self._masked, LOWEST_BIAS) | {forced[0]: _FORCING},
            "ignore_eos": True,
            "logprobs": -1,
            "flat_logprobs": True,
        }

    def _ask(self, prompt: abc.Sequence[int], **params: Any) -> int:
        """Submit tokens to vLLM and return the number of the request."""
        if self.version < 0:
            raise RuntimeError("there are no weights to draw from: load some first")
        self._requests += 1
        self._llm.add_request(
            str(self._requests),
            self._vllm.inputs.tokens_input(list(prompt)),
            self._vllm.SamplingParams(
                detokenize=False, output_kind=self._vllm.sampling_params.RequestOutputKind.DELTA, **params
            ),
        )
        return self._requests

    def unanswered(self) -> list[tuple[int, Request]]:
        """Return pending requests with the tokens drawn so far (see engines.protocol)."""
        return [(ticket, sequence.continuation()) for ticket, sequence in self._running.items()]

    def withdraw(self) -> list[tuple[int, Request]]:
        """Return the pending requests and forget them."""
        pending = self.unanswered()
        self._llm.abort_request([str(ticket) for ticket in self._running])
        self._running.clear()
        return pending

    def release(self, episode: str) -> None:
        """Do nothing: vLLM keeps what it computed while it has room."""

    def sleep(self) -> None:
        """Free the GPU memory of weights and KV cache until the next load (see engines.protocol)."""
        if self.busy:
            raise RuntimeError("requests are pending: withdraw them first")
        if not self._is_asleep:
            self.version = -1
            self._llm.sleep(level=2)  # the next load brings all weights
            self._is_asleep = True

    def close(self) -> None:
        """Do nothing: the engine runs in this thread."""

    def load(self, weights: NamedTensors, version: int, *, keep: bool = False) -> str:
        """Load weights and return their digest as received (see engines.protocol); `keep` has no effect.

        Raise KeyError for an unknown, repeated or missing weight, ValueError for a wrong shape.
        """
        if self.busy:
            raise RuntimeError("requests are pending under the loaded weights: withdraw them first")
        prints = list[str]()

        def received() -> Iterator[tuple[str, torch.Tensor]]:
            for name, value in checked(weights, self._weights.shapes, self._dtype):
                prints.append(fingerprint(name, value))
                yield name, value

        self.version = -1  # partly replaced weights have no version
        if self._is_asleep:  # the cache gets its memory back after the weights, whose loading needs some
            self._llm.wake_up(tags=["weights"])
        # vLLM begins with arbitrary numbers, in the biases that select experts too.
        tensors = chain(self._weights.to_files(received()), self._buffers.items())
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})
        if self._is_asleep:
            self._llm.wake_up(tags=["kv_cache"])
            self._is_asleep = False
        # Cached prefixes were computed by the previous weights.
        if not self._llm.reset_prefix_cache():
            raise RunError("weight sync", "vLLM did not release the prefixes that earlier weights computed")
        self.version = version
        return combined(prints)

    def score(self, tokens: list[int]) -> list[float]:
        """Return log π(token t | before t) for t ≥ 1 at temperature 1, under the weights that draw."""
        number = str(self._ask(tokens, max_tokens=1, temperature=0.0, prompt_logprobs=0))
        logprobs: list[Any] = []
        while not logprobs:
            for output in self._step():
                if output.request_id == number and output.prompt_logprobs:
                    logprobs = output.prompt_logprobs
        return [by_token[token].logprob for token, by_token in zip(tokens[1:], logprobs[1:], strict=True)]

    def poll(self, timeout_s: float = 0.0) -> list[tuple[int, Completion]]:
        """Take one step and return the completions that ended."""
        if self._running:
            self._step()
        completions, self._done = self._done, []
        return completions

    def _step(self) -> list[Any]:
        """Take one step, add the drawn tokens to their sequences, and return vLLM's outputs."""
        outputs: list[Any] = self._llm.step()
        for output in outputs:
            ticket = int(output.request_id)
            if sequence := self._running.get(ticket):
                if completion := self._extend(sequence, output.outputs[0]):
                    del self._running[ticket]
                    self._done.append((ticket, completion))
                    if not output.finished:
                        self._llm.abort_request([output.request_id])
                elif output.finished:
                    reason = output.outputs[0].finish_reason
                    raise RunError("sample", f"vLLM stopped an answer before its end: {reason}")
        return outputs

    def _extend(self, sequence: Sequence, output: Any) -> Completion | None:
        """Append the drawn tokens. Return the completion if it ended with them."""
        greedy = sequence.request.sampling.greedy
        for place, token in enumerate(output.token_ids):
            if sequence.request.forced:
                gen = policy = _unforced(output.logprobs, place, token)
            else:
                policy = output.logprobs[place][token].logprob
                gen = 0.0 if greedy else policy
            sequence.append(token, gen, policy, self.version)
            if completion := sequence.check_end(self.decode, self.stop_tokens):
                return completion
        return None


def _unforced(flat: Any, place: int, token: int) -> float:
    """log π(token) before the token's logit was raised."""
    span = slice(flat.start_indices[place], flat.end_indices[place])
    tokens, logps = torch.tensor(flat.token_ids[span]), torch.tensor(flat.logprobs[span])
    forced = tokens == token
    # The drawn token is listed first, and again among all tokens.
    unbiased = torch.cat([logps[forced][:1] - _FORCING, logps[~forced]])
    return float(unbiased.log_softmax(0)[0])
