"""Text for pretraining: documents cut into rows of tokens, each tokenised again when it is taken.

The tokens d_1 ... d_n of a document are learnt between two end tokens, the first of which is given:

    eos  d_1 ... d_n  eos        n + 1 tokens are predicted, each from all tokens before it

A row is a window of at most L of these n + 2 tokens. A longer document continues in the next row, which
begins with the last token of the row before, given there; so every token is predicted exactly once.

Only the position and the length of a document are stored. Its text is read and tokenised when one of its rows
is taken, so memory grows with the number of documents and not with their length.
"""

import math
from array import array
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import overload

from posttrain.data.documents import Source, Text, iterate_documents, open_sources
from posttrain.types import RunError, Trajectory, UserError

__all__ = ["Corpus", "Text", "bits_per_byte", "load_corpus"]

CACHED_TOKENS = 1 << 22
"""Maximum tokens of documents that are cached: 16 MB."""


class Corpus(Sequence[Trajectory]):
    """The rows of documents; each is made when it is taken.

    >>> from posttrain.data.documents import InMemoryDocuments
    >>> def codes(text): return [ord(c) for c in text]
    >>> one = Corpus([InMemoryDocuments(["abcde"])], Text(path="-"), encode=codes, eos=0, max_length=4)
    >>> [row.tokens for row in one]
    [[0, 97, 98, 99], [99, 100, 101, 0]]
    >>> one.tokens, one.utf8_bytes(), one.longest
    (6, 5.0, 4)
    """

    def __init__(
        self,
        origins: Sequence[Source],
        text: Text,
        *,
        encode: Callable[[str], list[int]],
        eos: int,
        max_length: int,
    ) -> None:
        self._sources, self._encode, self._eos, self._stride = origins, encode, eos, max_length - 1
        self._source, self._places = array("I"), (array("Q"), array("Q"), array("Q"))
        self._counts, self._sizes = array("Q"), array("Q")
        self._ends = array("Q")
        """One past the last row of each document."""
        self._cache: OrderedDict[int, array[int]] = OrderedDict()
        self._cached_tokens = 0
        for number, piece, document in iterate_documents(origins, text):
            count = len(encode(document))
            if not count:
                raise UserError(
                    f"{text.paths[number]}:{piece[2]}", "the tokenizer finds no token in a document"
                )
            self._source.append(number)
            for column, value in zip(self._places, piece, strict=True):
                column.append(value)
            self._counts.append(count)
            self._sizes.append(len(document.encode()))
            self._ends.append((self._ends[-1] if self._ends else 0) + -(-(count + 1) // self._stride))

    def __len__(self) -> int:
        return self._ends[-1]

    @overload
    def __getitem__(self, i: int) -> Trajectory: ...
    @overload
    def __getitem__(self, i: slice) -> list[Trajectory]: ...
    def __getitem__(self, i: int | slice) -> Trajectory | list[Trajectory]:
        if isinstance(i, slice):
            return [self[n] for n in range(*i.indices(len(self)))]
        document, window = self._place(i)
        start, stop = self._window(document, window)
        tokens = self._tokens(document)
        row = [self._eos if t in (0, len(tokens) + 1) else tokens[t - 1] for t in range(start, stop)]
        return Trajectory.given(row)

    @property
    def documents(self) -> int:
        """Number of documents in all sources."""
        return len(self._counts)

    @property
    def tokens(self) -> int:
        """Number of tokens that all rows predict, including the end of each document."""
        return sum(self._counts) + len(self._counts)

    @property
    def longest(self) -> int:
        """Number of tokens of the longest row, including the given one."""
        return min(max(self._counts) + 1, self._stride) + 1

    def utf8_bytes(self, rows: Iterable[int] | None = None) -> float:
        """Return the UTF-8 bytes of the text that these rows predict, by default of all rows.

        End tokens stand for no bytes. The bytes of a document are divided among its rows by their tokens, so
        the sum over all rows of a document is exact.
        """
        if rows is None:
            return float(sum(self._sizes))
        counts: Counter[int] = Counter()
        for i in rows:
            document, window = self._place(i)
            start, stop = self._window(document, window)
            counts[document] += min(stop, self._counts[document] + 1) - (start + 1)
        return math.fsum(self._sizes[d] * count / self._counts[d] for d, count in counts.items())

    def _place(self, i: int) -> tuple[int, int]:
        """Return (document, number of the window in it) of a row."""
        if not -len(self) <= i < len(self):
            raise IndexError(f"there are {len(self)} rows, and none is {i}")
        i %= len(self)
        document = bisect_right(self._ends, i)
        return document, i - (self._ends[document - 1] if document else 0)

    def _window(self, document: int, window: int) -> tuple[int, int]:
        """Return where the window begins and ends among eos, the document's tokens, eos."""
        start = window * self._stride
        return start, min(start + self._stride + 1, self._counts[document] + 2)

    def _tokens(self, document: int) -> "array[int]":
        """Return the document's tokens, from the cache of recently used documents if they are there."""
        if document in self._cache:
            self._cache.move_to_end(document)
            return self._cache[document]
        start, stop, line = (column[document] for column in self._places)
        tokens = array("I", self._encode(self._sources[self._source[document]].read((start, stop, line))))
        if len(tokens) != self._counts[document]:
            raise RunError(
                "read text", f"the text of document {document + 1} changed while it was being learnt"
            )
        self._cache[document] = tokens
        self._cached_tokens += len(tokens)
        while len(self._cache) > 1 and self._cached_tokens > CACHED_TOKENS:
            self._cached_tokens -= len(self._cache.popitem(last=False)[1])
        return tokens


def load_corpus(
    text: Text, *, encode: Callable[[str], list[int]], eos: int, max_length: int, say: Callable[[str], None]
) -> Corpus:
    """Return the rows of the text, at most max_length tokens each, after a pass over all documents.

    encode: returns the tokens of a text, without special ones at its ends. eos: the end token. say: gets one
    line before the pass and one after.

    Raises UserError at the first document that cannot be read, is empty or has no token, and for rows too
    short to predict anything.
    """
    if max_length < 2:
        raise UserError("batch.max_length", "a row of 1 token predicts nothing", "raise it")
    origins = open_sources(text)
    say(f"counting the tokens of {', '.join(text.paths)}")
    corpus = Corpus(origins, text, encode=encode, eos=eos, max_length=max_length)
    size = corpus.utf8_bytes()
    say(
        f"{corpus.documents:,} documents, {corpus.tokens:,} tokens in {len(corpus):,} rows, "
        f"{size / corpus.tokens:.2f} bytes a token"
    )
    return corpus


def bits_per_byte(nats: float, size: float) -> float:
    """nats / (ln 2 · bytes): the cost of a text per byte, comparable between tokenizers.

    nats: -Σ log π over the predicted tokens, including ends of documents. size: the UTF-8 bytes of their
    text, as Corpus.utf8_bytes counts them; ends have none.

    >>> round(bits_per_byte(3 * math.log(2), 2), 3)
    1.5
    """
    return nats / (math.log(2) * size)
