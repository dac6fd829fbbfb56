"""A vLLM server as a sampling engine: tokens go there and come back over HTTP, and weights by a folder.

    poll   consumes       what the server has said of answers
           waits for      the next word, at most a tick; for none longer than the server's deadline
           unblocked by   a token of any answer

What an answer is stays ours, as in this process: tokens in and tokens out, where it ends, which version drew
each token. The server must have been told that its weights may be replaced (VLLM_SERVER_DEV_MODE=1).
"""

import math
import os
import tempfile
import time
from collections.abc import Callable
from collections.abc import Sequence as Listed
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from posttrain.engines.sequence import Sequence
from posttrain.engines.vllm.asking import Expected, checked_sequence, wishes
from posttrain.engines.vllm.connection import (
    COMPLETIONS,
    RAISED,
    ServedConfig,
    check_model,
    check_temperature,
    completion,
    connect,
)
from posttrain.engines.vllm.server import Streams
from posttrain.models.attention import masked_tokens
from posttrain.models.fingerprint import Named, checked, combined, fingerprint
from posttrain.types import Completion, Request, RunError

_TICK_S = 0.05
"""How long a poll waits for news."""
_AT_ONCE = 8
"""Tokens in a message; one where a stop string may end an answer with any."""
_FILE = 1 << 30
"""Bytes of weights that are gathered for one file."""
_LIKELY = 1.0
"""Nats by which a forced token is made likelier than all others together, at its least likely place."""


class ServerEngine:
    """An engine over a vLLM server, which draws from no weights but those loaded (see engines.protocol).

    model: what is drawn from, without numbers; dtype: the type in which weights are sent; decode, stop_tokens
    and context: as of any engine. Answers and draws are those of vLLM in this process.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        dtype: torch.dtype,
        decode: Callable[[list[int]], str],
        stop_tokens: Listed[int],
        config: ServedConfig,
        context: int,
    ) -> None:
        self.decode, self.stop_tokens = decode, frozenset(stop_tokens)
        self.context = min(context, config.cache_tokens)
        self.version = -1
        self._dtype, self._folder = dtype, os.path.expanduser(config.folder)
        self._expected, self._masked = Expected(model), masked_tokens(model)
        self._vocabulary: int = model.get_input_embeddings().num_embeddings
        self.server, self.name, self.raw = connect(config, self.context)
        try:
            check_model(self.server, model)
        except RunError:
            self.server.close()
            raise
        self._streams = Streams(self.server, config.rows)
        self._asked = 0
        self._running: dict[int, Sequence] = {}
        self._raised: dict[int, float] = {}
        """By how much the logits of each forced answer's token were raised."""
        self._heard = time.monotonic()

    @property
    def busy(self) -> bool:
        """Whether any submitted request has not been answered."""
        return bool(self._running)

    def submit(self, request: Request) -> int:
        """A ticket for the answer; ValueError for what it cannot be asked (see asking.checked_sequence)."""
        if self.version < 0:
            raise RuntimeError("there are no weights to draw from: load some first")
        sequence = checked_sequence(self._asked + 1, request, self._vocabulary, self.context)
        check_temperature(request.sampling.temperature, raw=self.raw)
        self._asked += 1
        if not self._running:
            self._heard = time.monotonic()
        body = self._body(sequence)
        self._running[self._asked] = sequence
        self._streams.begin(self._asked, COMPLETIONS, body)
        return self._asked

    def _body(self, sequence: Sequence) -> dict[str, Any]:
        asked = wishes(sequence, self.stop_tokens, self._masked)
        if forced := sequence.request.forced:
            self._raised[sequence.ticket] = raised = self._raise(sequence.prompt, forced)
            bias = {**asked.get("logit_bias", {}), forced[0]: raised}
            asked |= {"temperature": 0.0, "logit_bias": bias, "stop_token_ids": []}
            asked["max_tokens"] = len(forced)
        return completion(self.name, sequence.prompt, asked) | {
            "stream": True,
            "stream_interval": 1 if sequence.request.sampling.stop else _AT_ONCE,
        }

    def _raise(self, prompt: Listed[int], forced: Listed[int]) -> float:
        """By how much the token's logits are to be raised.

        Of a token that is all but certain nothing can be said of how likely it was. So it is made likely, and
        no more: where it is least likely of all its places, a little more so than the others together.
        """
        if self.raw:
            return RAISED
        logps = self.score([*prompt, *forced])[-len(forced) :]
        return min(RAISED, max(0.0, _LIKELY - min(map(_odds, logps))))

    def unanswered(self) -> list[tuple[int, Request]]:
        """What has not been answered, as far as it has come (see engines.protocol)."""
        return [(ticket, sequence.rest()) for ticket, sequence in self._running.items()]

    def withdraw(self) -> list[tuple[int, Request]]:
        """The same, which is then forgotten: the connections are closed, and the server gives them up."""
        left = self.unanswered()
        self._streams.end(self._running)
        self._running.clear()
        self._raised.clear()
        self._streams.heard(0.0)
        return left

    def release(self, episode: str) -> None:
        """Nothing: the server keeps what it computed for as long as it has room."""

    def close(self) -> None:
        """Ends the connections; the server stays."""
        self._streams.close()
        self.server.close()

    # ------------------------------------------------------------------ weights

    def load(self, weights: Named, version: int, *, keep: bool = False) -> str:
        """The digest of the weights that the server has read (see engines.protocol).

        Raises KeyError for one that is unknown, given twice or lacking, ValueError for a wrong shape, and
        RunError where the server does not take them. Nothing is then drawn until others are loaded.
        """
        if self.busy:
            raise RuntimeError("answers are running over keys and values of the weights held: withdraw them")
        self.version = -1  # what has been half replaced is no version
        with tempfile.TemporaryDirectory(prefix="posttrain-weights-", dir=self._folder or None) as place:
            files = self._write_weights(weights, Path(place))
            ask = self.server.ask
            ask("/pause?mode=abort")  # what was withdrawn may not have been given up yet
            ask("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": place}})
            # What prompts share with earlier ones was computed by the weights before.
            if not ask("/reset_prefix_cache")["success"]:
                raise self.server.fault("did not let go of what the weights before have computed")
            ask("/resume")
            received = self._digest(files)
        self.version = version
        return received

    def _write_weights(self, weights: Named, place: Path) -> list[Path]:
        """Files of these weights, under all their names."""
        files = list[Path]()
        held: dict[str, torch.Tensor] = {}

        def write() -> None:
            files.append(place / f"model-{len(files):05d}.safetensors")
            save_file(held, str(files[-1]), metadata={"format": "pt"})
            held.clear()

        for name, value in checked(weights, self._expected.shapes, self._dtype):
            held[name] = value.cpu().contiguous()
            for other in self._expected.names[name][1:]:
                held[other] = held[name].clone()
            if sum(each.nbytes for each in held.values()) >= _FILE:
                write()
        if held:
            write()
        return files

    def _digest(self, files: Listed[Path]) -> str:
        """Of what lies in the files, now that the server has read them."""
        prints = []
        for path in files:
            with safe_open(str(path), framework="pt") as file:
                names = [name for name in file.keys() if name in self._expected.shapes]  # noqa: SIM118
                prints += [fingerprint(name, file.get_tensor(name)) for name in names]
        return combined(prints)

    # ------------------------------------------------------------------ what it says

    def score(self, tokens: list[int]) -> list[float]:
        """log π(token t | before t) for t ≥ 1 at temperature 1, through the weights that draw."""
        if self.version < 0:
            raise RuntimeError("there are no weights to draw from: load some first")
        asked = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        said = self.server.ask(COMPLETIONS, completion(self.name, tokens, asked))
        try:
            found = said["choices"][0]["prompt_logprobs"]
            return [float(at[str(t)]["logprob"]) for t, at in zip(tokens[1:], found[1:], strict=True)]
        except (KeyError, IndexError, TypeError, ValueError):
            raise self.server.fault("does not say how likely the tokens of a prompt are") from None

    def poll(self, timeout_s: float = 0.0) -> list[tuple[int, Completion]]:
        """The answers that have ended; waits a tick for news of any."""
        if not self._running:
            return []
        done = []
        news = self._streams.heard(max(timeout_s, _TICK_S))
        for ticket, said in news:
            if isinstance(said, RunError):
                raise said
            if (sequence := self._running.get(ticket)) is None:
                continue  # it has ended, and more of it was on its way
            if said is None:
                raise self.server.fault("ended an answer that has not ended")
            if ended := self._extend(sequence, said):
                del self._running[ticket]
                self._raised.pop(ticket, None)
                done.append((ticket, ended))
        if done:
            self._streams.end(ticket for ticket, _ in done)
        self._look_at_the_clock(bool(news))
        return done

    def _look_at_the_clock(self, news: bool) -> None:
        now = time.monotonic()
        if news:
            self._heard = now
        elif now - self._heard > self.server.deadline_s:
            waiting, seconds = len(self._running), self.server.deadline_s
            why = f": it {self._streams.refused}" if self._streams.refused else ""
            what = f"has said nothing for {seconds:g} s, while {waiting} answers are owed{why}"
            raise self.server.fault(what)

    def _extend(self, sequence: Sequence, said: dict[str, Any]) -> Completion | None:
        """Appends what was drawn; the answer, if it ended with that."""
        try:
            choice = said["choices"][0]
            tokens = choice["token_ids"] or []
            logps = choice["logprobs"]["token_logprobs"] if tokens else []
            pairs = [(int(token), float(logp)) for token, logp in zip(tokens, logps, strict=True)]
        except (KeyError, IndexError, TypeError, ValueError):
            raise self.server.fault("does not say which tokens it drew, and how likely they were") from None
        for token, logp in pairs:
            sequence.append(token, *self._likely(sequence, token, logp), self.version)
            if ended := sequence.ended(self.decode, self.stop_tokens):
                return ended
        if choice.get("finish_reason"):
            raise self.server.fault(f"ended an answer that has not ended: {choice['finish_reason']}")
        return None

    def _likely(self, sequence: Sequence, token: int, logp: float) -> tuple[float, float]:
        """logp_gen and logp_policy of a drawn token, of which the server says this."""
        request = sequence.request
        if not request.forced:
            return (0.0 if request.sampling.greedy else logp), logp
        if token != request.forced[0]:
            raise self.server.fault(f"drew token {token} where it was told to draw {request.forced[0]}")
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
