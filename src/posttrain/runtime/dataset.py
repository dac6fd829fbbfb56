"""What an offline method trains on."""

from collections.abc import Sequence

from posttrain.data.corpus import Corpus, Text, load_corpus
from posttrain.runtime.ask import Asked
from posttrain.runtime.policy import Policy, Say
from posttrain.runtime.rows import Group, Shaper, Singles
from posttrain.types import UserError


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
