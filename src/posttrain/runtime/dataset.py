"""What an offline method trains on, and what a frozen reference says of it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.data.corpus import Corpus, Text, load_corpus
from posttrain.learner import forward
from posttrain.learner.learner import Learner
from posttrain.runtime.ask import Asked
from posttrain.runtime.journal import Journal
from posttrain.runtime.policy import Policy, Say, weights_of
from posttrain.runtime.rows import Group, Shaper, Singles
from posttrain.runtime.scored import Scored, scored
from posttrain.runtime.stream import Stream
from posttrain.types import Batch, PerToken, UserError


def groups_of(asked: Asked, policy: Policy, say: Say) -> tuple[Sequence[Group], Sequence[Group], int]:
    """What an offline method trains and is evaluated on, and the tokens of the longest group."""
    batch, learns = asked.recipe.batch, asked.line.learns
    bound = min(batch.max_length or policy.context, policy.context)
    if learns == "text":
        found = [_corpus(text, policy, bound, say) for text in (*asked.train, *asked.held_out)]
        return Singles(found[0]), Singles(found[1]) if len(found) > 1 else [], found[0].longest
    shaper = Shaper(policy.chat, bound, "head" in asked.method.needs, batch.separator)
    groups = shaper.groups(asked.train, learns, say)
    longest = max(sum(len(row.tokens) for row in group) for group in groups)
    return groups, shaper.groups(asked.held_out, learns, say), longest


def _corpus(text: Text, policy: Policy, bound: int, say: Say) -> Corpus:
    eos = policy.tokenizer.eos_token_id
    if eos is None:
        raise UserError("the tokenizer has no end token, which parts documents", where="model.path")
    return load_corpus(text, encode=policy.chat.spell, eos=eos, max_length=bound, say=say)


def bytes_of(groups: Sequence[Group], limit: int) -> float:
    """Bytes of the text that the first rows predict; 0 where they are no text."""
    corpus = groups.rows if isinstance(groups, Singles) else None
    return corpus.utf8_bytes(range(min(limit, len(corpus)))) if isinstance(corpus, Corpus) else 0.0


def scores_once(asked: Asked) -> bool:
    """Whether the reference's log-probabilities are computed once, before the first update."""
    fixed = not asked.online and not asked.method.probes and not asked.recipe.reference.refresh_every
    return fixed and "logp_ref" in asked.method.needs


def needs_copy(asked: Asked) -> bool:
    """Whether a frozen copy of the model is held as the reference while the run trains."""
    asks = "logp_ref" in asked.method.needs
    return asks and not asked.recipe.lora.rank and not scores_once(asked)


def reference_of(
    asked: Asked,
    policy: Policy,
    groups: Sequence[Group],
    held_out: Sequence[Group],
    *,
    file: Path,
    learner: Learner,
    journal: Journal,
) -> Scored | None:
    """The reference's log-probabilities of every row that the run will meet, if they are computed once."""
    recipe = asked.recipe
    if not scores_once(asked):
        return None
    order = Stream(range(len(groups)), seed=recipe.run.seed)
    met = {order.take()[1] for _ in range(recipe.run.updates * recipe.batch.batch_size)}
    wanted = [groups[i] for i in sorted(met)] + list(held_out)

    fresh: Any = None

    def score(batch: Batch) -> PerToken:
        nonlocal fresh
        if recipe.lora.rank:
            return learner.score_reference(batch).logp
        if not learner.step_count:
            # Before the first step the policy is its own reference; a resumed one is not any more.
            return learner.score(batch).logp
        fresh = weights_of(recipe, policy) if fresh is None else fresh
        return forward.scored(fresh, batch, 1.0, learner.microbatch_tokens).logp

    with journal.timed("reference"):
        return scored(
            file, wanted, score, lambda done, total: journal.show("reference", {"done": done, "total": total})
        )
