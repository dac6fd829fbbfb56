"""Passages of a corpus by BM25, as the library bm25s computes it (pip install 'posttrain[tools]')."""

from functools import cache
from typing import Any

from posttrain.data.documents import Text, documents
from posttrain.envs.tools.call import Tool
from posttrain.types import UserError

TOOL = Tool(
    "search",
    "Finds the passages that have most words of a query.",
    {
        "type": "object",
        "properties": {"query": {"type": "string"}},
        "required": ["query"],
    },
    {"query": "capital of France"},
)
_SHOWN = 3
"""Passages of a result."""
_TOKENS = {"stopwords": None, "return_ids": False, "show_progress": False}


def search(query: str, corpus: str) -> str:
    """The passages that share words with the query, the best first; at most three."""
    import bm25s

    passages, index = indexed(corpus)
    words = bm25s.tokenize([query], **_TOKENS)
    if not words[0]:
        return "nothing is found"
    [places], [scores] = index.retrieve(words, k=min(_SHOWN, len(passages)), show_progress=False)
    found = [passages[n] for n, score in zip(places, scores, strict=True) if score > 0]
    return "\n".join(f"{n}. {passage}" for n, passage in enumerate(found, 1)) or "nothing is found"


@cache
def indexed(corpus: str) -> tuple[list[str], Any]:
    """The passages of a corpus, and the index of their words; UserError if it cannot be read."""
    try:
        import bm25s
    except ModuleNotFoundError:
        mend = "install it with: pip install 'posttrain[tools]'"
        raise UserError("bm25s is not installed", where="task.tools.corpus", mend=mend) from None
    passages = [" ".join(text.split()) for text in documents(Text(path=corpus))]
    passages = [passage for passage in passages if passage]
    index = bm25s.BM25()
    index.index(bm25s.tokenize(passages, **_TOKENS), show_progress=False)
    return passages, index
