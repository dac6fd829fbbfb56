"""lm-evaluation-harness on this engine: `python -m posttrain.evaluation.suites.harness --model posttrain`.

All arguments go to the harness' command line. --model_args path=MODEL|RUN_DIR|RECIPE.toml, and dtype=.
Needs the extra `lm-eval`, which is imported at its first use.
"""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.base.chat import Chat
from posttrain.errors import RunError, UserError
from posttrain.evaluation.suites.likelihood import Continuation, complete, log_likelihoods
from posttrain.evaluation.suites.model import EvaluatedModel, resolve_target
from posttrain.models.pretrained import silent
from posttrain.serving.answers import before_stop
from posttrain.types import Request, Sampling

MOST_TOKENS = 256
"""Tokens of an answer if the task sets no limit, as in the harness' own models."""
_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_OPTIONS = {"until", "do_sample", "temperature", "top_p", "top_k", "min_p", *_TOKENS}


class Adapter:
    """The methods of a model of the harness, which `register` combines with the harness' base class.

    An answer ends at every token that ends a turn, and at the task's stop strings. A context that is too long
    loses its beginning, as in the harness' own models.
    """

    backend = "causal"

    def __init__(self, path: str, dtype: str = "float32", **ignored: Any) -> None:
        """ignored: batch_size, max_batch_size and device, which the harness passes to all models."""
        super().__init__()
        recipe, adapter = resolve_target(path, (), None, dtype, silent)
        self.model = EvaluatedModel(recipe, adapter, 0, silent)
        self.engine, self.tokenizer = self.model.engine, self.model.policy.tokenizer

    @property
    def tokenizer_name(self) -> str:
        """Key under which the harness caches requests."""
        return str(self.model.policy.path)

    @property
    def chat(self) -> Chat:
        return self.model.policy.chat

    @property
    def eot_token_id(self) -> int:
        """The token before a text without a context."""
        return int(self.tokenizer.eos_token_id)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **ignored: Any) -> list[int]:
        """Encode a text, by default with special tokens unless it begins with one already."""
        bos = self.tokenizer.bos_token
        if add_special_tokens is None:
            add_special_tokens = not (bos and string.startswith(bos))
        return list(self.tokenizer(string, add_special_tokens=add_special_tokens)["input_ids"])

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **ignored: Any
    ) -> list[tuple[float, bool]]:
        """Return log π of each continuation, and whether greedy decoding generates it.

        The second is computed for contexts with one continuation, and False for others: tasks of choices,
        with several, do not read it.
        """
        pairs = [
            Continuation(tuple(context[-(self.model.policy.context - len(rest)) :]), tuple(rest))
            for _, context, rest in requests
        ]
        counts = Counter(pair.context for pair in pairs)
        single = [place for place, pair in enumerate(pairs) if counts[pair.context] == 1]
        greedy = complete(
            self.engine,
            [
                Request(
                    prompt=pairs[place].context,
                    sampling=Sampling(temperature=0.0, max_new_tokens=len(pairs[place].rest)),
                )
                for place in single
            ],
        )
        same = {
            place: tuple(answer.tokens) == pairs[place].rest
            for place, answer in zip(single, greedy, strict=True)
        }
        return [(logp, same.get(n, False)) for n, logp in enumerate(log_likelihoods(self.engine, pairs))]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        raise RunError(
            "loglikelihood_rolling",
            "the harness asks no perplexity of whole documents here; use its own --model hf",
        )

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the answers, each up to its stop string."""
        ours = []
        for number, request in enumerate(requests):
            context, options = request.args
            sampling = _sampling(options)
            room = self.model.policy.context - sampling.max_new_tokens
            if room < 1:
                problem = (
                    f"{sampling.max_new_tokens} new tokens fill the context of {self.model.policy.context}"
                )
                raise UserError("max_gen_toks", problem, "lower it with --gen_kwargs")
            prompt = tuple(self.tok_encode(context)[-room:])
            ours.append(Request(prompt=prompt, sampling=sampling, task=str(number)))
        answers = complete(self.engine, ours)
        return [before_stop(a.text, r.sampling.stop) for a, r in zip(answers, ours, strict=True)]


def _sampling(options: Mapping[str, Any]) -> Sampling:
    """Read a task's generation_kwargs; UserError for an option that the engine does not support."""
    if odd := sorted(set(options) - _OPTIONS):
        raise UserError(f"generation_kwargs.{odd[0]}", "is not supported")
    stops = options.get("until") or ()
    temperature = options.get("temperature")
    drawing = options.get("do_sample", bool(temperature))
    return Sampling(
        temperature=float(1.0 if temperature is None else temperature) if drawing else 0.0,
        top_k=int(options.get("top_k") or 0),
        top_p=float(options.get("top_p", 1.0)),
        min_p=float(options.get("min_p", 0.0)),
        max_new_tokens=int(next((options[key] for key in _TOKENS if key in options), MOST_TOKENS)),
        stop=(stops,) if isinstance(stops, str) else tuple(stop for stop in stops if stop),
    )


def register() -> Any:
    """Register the class with the harness as "posttrain" and return it; UserError if it is not installed."""
    try:
        from lm_eval.api.model import TemplateLM
        from lm_eval.api.registry import model_registry, register_model
    except ImportError:
        fix = "pip install 'posttrain[lm-eval]'"
        raise UserError("", "lm-evaluation-harness is not installed", fix) from None
    if "posttrain" not in model_registry:
        register_model("posttrain")(type("Posttrain", (Adapter, TemplateLM), {}))
    return model_registry.get("posttrain")


def main() -> int:
    """Run the harness' command line with the model "posttrain" registered; return the exit code."""
    try:
        register()
        from lm_eval.__main__ import cli_evaluate

        cli_evaluate()
    except (UserError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
