"""Text to be learnt as it stands: documents cut into rows of tokens, each read again when it is wanted.

The tokens d_1 ... d_n of a document are learnt between two end tokens, of which the first is given:

    eos  d_1 ... d_n  eos        n + 1 tokens are predicted, each from all that stand before it

A row is a window of at most L of these n + 2 tokens. A longer document goes on in the next row, which
begins with the last token of the row before, there given; so every token is predicted exactly once.

Of a document is kept where it lies and how long it is. Its text is read and tokenised when one of its
rows is taken, so memory grows with the number of documents and not with their length.
"""

import math
from array import array
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import overload

from posttrain.data.documents import Source, Text, limited, sources
from posttrain.types import RunError, Trajectory, UserError

__all__ = ["Corpus", "Text", "bits_per_byte", "load_corpus"]

KEPT_TOKENS = 1 << 22
"""Tokens of earlier documents that are remembered: 16 MB."""


class Corpus(Sequence[Trajectory]):
    """The rows of some documents; each is made when it is taken.

    >>> from posttrain.data.documents import InMemoryDocuments
    >>> def spelt(text): return [ord(c) for c in text]
    >>> one = Corpus([InMemoryDocuments(["abcde"])], Text(path="-"), encode=spelt, eos=0, max_length=4)
    >>> [row.tokens for row in one]
    [[0, 97, 98, 99], [99, 100, 101, 0]]
    >>> one.tokens, one.utf8_bytes(), one.longest
    (6, 5.0, 4)
    """

    def __init__(
        self,
        found: Sequence[Source],
        text: Text,
        *,
        encode: Callable[[str], list[int]],
        eos: int,
        max_length: int,
    ) -> None:
        self._sources, self._encode, self._eos, self._stride = found, encode, eos, max_length - 1
        self._source, self._places = array("I"), (array("Q"), array("Q"), array("Q"))
        self._counts, self._sizes = array("Q"), array("Q")
        self._ends = array("Q")
        """One past the last row of each document."""
        self._kept: OrderedDict[int, array[int]] = OrderedDict()
        self._kept_tokens = 0
        for number, piece, document in limited(found, text):
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
        """How many documents there are."""
        return len(self._counts)

    @property
    def tokens(self) -> int:
        """Tokens that are predicted in all rows, the end of each document among them."""
        return sum(self._counts) + len(self._counts)

    @property
    def longest(self) -> int:
        """Tokens of the longest row, the given one included."""
        return min(max(self._counts) + 1, self._stride) + 1

    def utf8_bytes(self, rows: Iterable[int] | None = None) -> float:
        """Bytes, in UTF-8, of the text that these rows predict; of all of it if none are named.

        End tokens stand for no byte. A document is shared out among its rows by their tokens, so the
        number is exact wherever all rows of a document are taken together.
        """
        if rows is None:
            return float(sum(self._sizes))
        taken: Counter[int] = Counter()
        for i in rows:
            document, window = self._place(i)
            start, stop = self._window(document, window)
            taken[document] += min(stop, self._counts[document] + 1) - (start + 1)
        return math.fsum(self._sizes[d] * count / self._counts[d] for d, count in taken.items())

    def _place(self, i: int) -> tuple[int, int]:
        """(document, window of it) of a row."""
        if not -len(self) <= i < len(self):
            raise IndexError(f"there are {len(self)} rows, and none is {i}")
        i %= len(self)
        document = bisect_right(self._ends, i)
        return document, i - (self._ends[document - 1] if document else 0)

    def _window(self, document: int, window: int) -> tuple[int, int]:
        """Where the window begins and ends among eos, the document's tokens, eos."""
        start = window * self._stride
        return start, min(start + self._stride + 1, self._counts[document] + 2)

    def _tokens(self, document: int) -> "array[int]":
        """The document's tokens, remembered until many others were asked for."""
        if document in self._kept:
            self._kept.move_to_end(document)
            return self._kept[document]
        start, stop, line = (column[document] for column in self._places)
        tokens = array("I", self._encode(self._sources[self._source[document]].read((start, stop, line))))
        if len(tokens) != self._counts[document]:
            raise RunError(
                "read text", f"the text of document {document + 1} changed while it was being learnt"
            )
        self._kept[document] = tokens
        self._kept_tokens += len(tokens)
        while len(self._kept) > 1 and self._kept_tokens > KEPT_TOKENS:
            self._kept_tokens -= len(self._kept.popitem(last=False)[1])
        return tokens


def load_corpus(
    text: Text, *, encode: Callable[[str], list[int]], eos: int, max_length: int, say: Callable[[str], None]
) -> Corpus:
    """The rows of the text, at most max_length tokens each, after one pass over all of it.

    encode: the tokens of a text, without any that begin or end it. eos: the end token.
    say: told one line before the pass and one after.

    Raises UserError at the first document that cannot be read, is empty, or has no token, and for rows too
    short to predict anything.
    """
    if max_length < 2:
        raise UserError("batch.max_length", "a row of 1 token predicts nothing", "raise it")
    found = sources(text)
    say(f"counting the tokens of {', '.join(text.paths)}")
    corpus = Corpus(found, text, encode=encode, eos=eos, max_length=max_length)
    size = corpus.utf8_bytes()
    say(
        f"{corpus.documents:,} documents, {corpus.tokens:,} tokens in {len(corpus):,} rows, "
        f"{size / corpus.tokens:.2f} bytes a token"
    )
    return corpus


def bits_per_byte(nats: float, size: float) -> float:
    """nats / (ln 2 · bytes): what a text costs per byte of it, whatever the tokenizer.

    nats: -Σ log π over the tokens that were predicted, ends of documents included.
    size: the UTF-8 bytes of their text, as Corpus.utf8_bytes counts them; ends have none.

    >>> round(bits_per_byte(3 * math.log(2), 2), 3)
    1.5
    """
    return nats / (math.log(2) * size)
