"""Search for passages of a corpus by BM25, with the library bm25s (pip install 'posttrain[tools]')."""

from collections.abc import Iterator
from functools import cache
from typing import Any

from posttrain.base.libraries import require
from posttrain.data.documents import Text, documents
from posttrain.envs.tools.call import text_tool
from posttrain.types import UserError

TOOL = text_tool(
    "search", "query", "capital of France", "Finds the passages that have most words of a query."
)
_MOST_RESULTS = 3
"""Maximum passages of a result."""
_TOKENS = {"stopwords": None, "return_ids": False, "show_progress": False}


def search(query: str, corpus: str) -> str:
    """Return the passages that share words with the query, the best first; at most three."""
    import bm25s

    passages, index = load_index(corpus)
    words = bm25s.tokenize([query], **_TOKENS)
    if not words[0]:
        return "nothing is found"
    [places], [scores] = index.retrieve(words, k=min(_MOST_RESULTS, len(passages)), show_progress=False)
    matches = [passages[n] for n, score in zip(places, scores, strict=True) if score > 0]
    return "\n".join(f"{n}. {passage}" for n, passage in enumerate(matches, 1)) or "nothing is found"


@cache
def load_index(corpus: str) -> tuple[list[str], Any]:
    """Return the passages of a corpus, each on one line, and the index of their words."""
    import bm25s

    passages = list(_passages(corpus))
    index = bm25s.BM25()
    index.index(bm25s.tokenize(passages, **_TOKENS), show_progress=False)
    return passages, index


def check_corpus(corpus: str) -> None:
    """Raise UserError if the corpus cannot be read or is empty, or if the library is not installed."""
    where = "task.tools.corpus"
    require("bm25s", where)
    if not sum(1 for _ in _passages(corpus)):
        raise UserError(where, f"{corpus} holds no passage")


def _passages(corpus: str) -> Iterator[str]:
    lines = (" ".join(text.split()) for text in documents(Text(path=corpus)))
    return (line for line in lines if line)
