"""vLLM as a sampling engine: its scheduler, cache, kernels and draws, stepped in this process.

    step   consumes       requests that were submitted, while rows and cache last
           waits for      nothing
           unblocked by   an answer that ends

What an answer is stays ours: tokens in and tokens out, where it ends, which version drew each token. vLLM is
given no tokenizer.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Listed
from typing import Any

import torch
from transformers import PreTrainedModel

from posttrain.engines.native.engine import NativeConfig
from posttrain.engines.sequence import Sequence
from posttrain.engines.vllm.asking import LOWEST_BIAS, Expected, checked_sequence, wishes
from posttrain.engines.vllm.start import start
from posttrain.models.attention import masked_tokens
from posttrain.models.fingerprint import Named, checked, combined, fingerprint
from posttrain.types import Completion, Request, RunError

_FORCING = 100.0
"""Added to a logit it makes that token the likeliest, and float32 still tells those beside it to 1e-5."""


class VllmEngine:
    """An engine over vLLM, which holds no weights until some are loaded (see engines.protocol).

    model: what is drawn from, without numbers; dtype: what it computes in; decode: tokens -> text, for stop
    strings and answers; stop_tokens: any of them ends an answer; context: the most tokens of a sequence.

    The same request leads to the same answer under the same weights. One that goes on behind what was drawn
    before draws with a seed of that position, and so not the tokens that would have followed there.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        dtype: torch.dtype,
        decode: Callable[[list[int]], str],
        stop_tokens: Listed[int],
        config: NativeConfig,
        context: int,
    ) -> None:
        self.decode, self.stop_tokens = decode, frozenset(stop_tokens)
        self.context = min(context, config.cache_tokens)
        self.version = -1
        self._dtype = dtype
        self._expected, self._masked = Expected(model), masked_tokens(model)
        self._vocabulary: int = model.get_input_embeddings().num_embeddings
        self._vllm, self._llm = start(model.config, dtype, config, self.context)
        self._asked = 0
        self._running: dict[int, Sequence] = {}
        self._done: list[tuple[int, Completion]] = []

    @property
    def busy(self) -> bool:
        """Whether any submitted request has not been answered."""
        return bool(self._running or self._done)

    def submit(self, request: Request) -> int:
        """A ticket for the answer; ValueError for what it cannot be asked (see asking.checked_sequence)."""
        sequence = checked_sequence(self._asked + 1, request, self._vocabulary, self.context)
        ticket = self._ask(sequence.prompt, **self._wishes(sequence))
        self._running[ticket] = sequence
        return ticket

    def _wishes(self, sequence: Sequence) -> dict[str, Any]:
        forced = sequence.request.forced
        if not forced:
            return wishes(sequence, self.stop_tokens, self._masked)
        return {
            "max_tokens": len(forced),
            "temperature": 0.0,
            "logit_bias": dict.fromkeys(self._masked, LOWEST_BIAS) | {forced[0]: _FORCING},
            "ignore_eos": True,
            "logprobs": -1,
            "flat_logprobs": True,
        }

    def _ask(self, prompt: Listed[int], **wishes: Any) -> int:
        """The number under which vLLM has been asked to go on behind these tokens."""
        if self.version < 0:
            raise RuntimeError("there are no weights to draw from: load some first")
        self._asked += 1
        self._llm.add_request(
            str(self._asked),
            self._vllm.inputs.tokens_input(list(prompt)),
            self._vllm.SamplingParams(
                detokenize=False, output_kind=self._vllm.sampling_params.RequestOutputKind.DELTA, **wishes
            ),
        )
        return self._asked

    def unanswered(self) -> list[tuple[int, Request]]:
        """What has not been answered, as far as it has come (see engines.protocol)."""
        return [(ticket, sequence.rest()) for ticket, sequence in self._running.items()]

    def withdraw(self) -> list[tuple[int, Request]]:
        """The same, which is then forgotten."""
        left = self.unanswered()
        self._llm.abort_request([str(ticket) for ticket in self._running])
        self._running.clear()
        return left

    def release(self, episode: str) -> None:
        """Nothing: vLLM keeps what it computed for as long as it has room."""

    def close(self) -> None:
        """Nothing: all of it is in this thread."""

    def load(self, weights: Named, version: int, *, keep: bool = False) -> str:
        """The digest of the weights received (see engines.protocol); answers never go on over older ones.

        Raises KeyError for one that is unknown, given twice or lacking, ValueError for a wrong shape.
        """
        if self.busy:
            raise RuntimeError("answers are running over keys and values of the weights held: withdraw them")
        prints = list[str]()

        def received() -> Iterator[tuple[str, torch.Tensor]]:
            for name, value in checked(weights, self._expected.shapes, self._dtype):
                prints.append(fingerprint(name, value))
                yield from ((each, value) for each in self._expected.names[name])

        self.version = -1  # what has been half replaced is no version
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": received()})
        # What prompts share with earlier ones was computed by the weights before.
        if not self._llm.reset_prefix_cache():
            raise RunError("weight sync", "vLLM did not release the prefixes that earlier weights computed")
        self.version = version
        return combined(prints)

    def score(self, tokens: list[int]) -> list[float]:
        """log π(token t | before t) for t ≥ 1 at temperature 1, through the weights that draw."""
        asked = str(self._ask(tokens, max_tokens=1, temperature=0.0, prompt_logprobs=0))
        found: list[Any] = []
        while not found:
            for output in self._step():
                if output.request_id == asked and output.prompt_logprobs:
                    found = output.prompt_logprobs
        return [at[token].logprob for token, at in zip(tokens[1:], found[1:], strict=True)]

    def poll(self, timeout_s: float = 0.0) -> list[tuple[int, Completion]]:
        """The answers that ended in one more step; waits for nothing."""
        if self._running:
            self._step()
        done, self._done = self._done, []
        return done

    def _step(self) -> list[Any]:
        """What vLLM says after one step; what that says of answers is in them."""
        outputs: list[Any] = self._llm.step()
        for output in outputs:
            ticket = int(output.request_id)
            if sequence := self._running.get(ticket):
                if ended := self._extend(sequence, output.outputs[0]):
                    del self._running[ticket]
                    self._done.append((ticket, ended))
                    if not output.finished:
                        self._llm.abort_request([output.request_id])
                elif output.finished:
                    reason = output.outputs[0].finish_reason
                    raise RunError("sample", f"vLLM ended an answer that has not ended: {reason}")
        return outputs

    def _extend(self, sequence: Sequence, said: Any) -> Completion | None:
        """Appends what was drawn; the answer, if it ended with that."""
        greedy = sequence.request.sampling.greedy
        for place, token in enumerate(said.token_ids):
            if sequence.request.forced:
                gen = policy = _unforced(said.logprobs, place, token)
            else:
                policy = said.logprobs[place][token].logprob
                gen = 0.0 if greedy else policy
            sequence.append(token, gen, policy, self.version)
            if ended := sequence.ended(self.decode, self.stop_tokens):
                return ended
        return None


def _unforced(flat: Any, place: int, token: int) -> float:
    """log π(token), as it was before the token's logit was raised."""
    span = slice(flat.start_indices[place], flat.end_indices[place])
    tokens, logps = torch.tensor(flat.token_ids[span]), torch.tensor(flat.logprobs[span])
    forced = tokens == token
    # The token drawn comes first, and once more among all.
    whole = torch.cat([logps[forced][:1] - _FORCING, logps[~forced]])
    return float(whole.log_softmax(0)[0])
