"""Corpora: every token predicted once, rows that do not depend on the form of the text, faults by line."""

import gzip
import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.curriculum.stream import Stream
from posttrain.data.corpus import Corpus, Text, bits_per_byte, load_corpus
from posttrain.data.documents import InMemoryDocuments, documents
from posttrain.types import RunError, UserError

EOS = 0


def spelt(text: str) -> list[int]:
    """One token a character, none of them the end."""
    return [ord(c) for c in text]


def by_pairs(text: str) -> list[int]:
    """Two characters a token, so that bytes and tokens differ."""
    return [sum(map(ord, text[i : i + 2])) for i in range(0, len(text), 2)]


def corpus(*paths: Path, max_length: int = 8, limit: int | None = None, encode=spelt) -> Corpus:
    text = Text(path=tuple(str(p) for p in paths), limit=limit)
    return load_corpus(text, encode=encode, eos=EOS, max_length=max_length, say=lambda line: None)


def written(path: Path, data: str | bytes) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def jsonl(path: Path, *texts: str) -> Path:
    return written(path, "".join(json.dumps({"text": t, "id": i}) + "\n" for i, t in enumerate(texts)))


texts = st.lists(st.text("ab\nż🐢", min_size=1, max_size=40), min_size=1, max_size=6)


@settings(deadline=None, max_examples=100)
@given(texts=texts, max_length=st.integers(2, 12))
def test_every_token_is_predicted_exactly_once_in_order(texts, max_length):
    made = Corpus([InMemoryDocuments(texts)], Text(path="-"), encode=by_pairs, eos=EOS, max_length=max_length)
    predicted = [t for row in made for t, yes in zip(row.tokens, row.sampled, strict=True) if yes]
    assert predicted == [t for text in texts for t in (*by_pairs(text), EOS)]
    assert made.tokens == len(predicted)
    assert made.longest == max(len(row.tokens) for row in made) <= max_length
    assert all(
        len(row.tokens) >= 2 and row.sampled == [False] + [True] * (len(row.tokens) - 1) for row in made
    )
    assert sum(map(made.utf8_bytes, ([i] for i in range(len(made))))) == pytest.approx(made.utf8_bytes())
    assert made.utf8_bytes() == sum(len(text.encode()) for text in texts)


def test_a_window_begins_with_the_last_token_of_the_one_before():
    made = Corpus([InMemoryDocuments(["abcdefg", "x"])], Text(path="-"), encode=spelt, eos=EOS, max_length=4)
    assert ["".join(map(chr, row.tokens)) for row in made] == ["\0abc", "cdef", "fg\0", "\0x\0"]
    assert [made.utf8_bytes([i]) for i in range(4)] == [3, 3, 1, 1]
    assert made.documents == 2


def test_a_document_that_just_fits_is_one_row():
    for n in range(1, 12):
        made = Corpus([InMemoryDocuments(["a" * n])], Text(path="-"), encode=spelt, eos=EOS, max_length=6)
        assert len(made) == math.ceil((n + 1) / 5), n


def test_rows_are_a_sequence():
    made = Corpus([InMemoryDocuments(["abcdefg", "x"])], Text(path="-"), encode=spelt, eos=EOS, max_length=4)
    assert made[-1] == made[3] == list(made)[3]
    assert made[1:3] == [made[1], made[2]]
    for i in (4, -5):
        with pytest.raises(IndexError, match="4 rows"):
            made[i]


def test_the_same_text_gives_the_same_rows_as_text_and_as_records(tmp_path):
    texts = ["one\ntwo\n\nthree", "  żółw 🐢\tend", "last <|endoftext|> within a line"]
    parted = written(tmp_path / "a.txt", "\n<|endoftext|>\n".join(texts) + "\n")
    begun = written(
        tmp_path / "b.txt", b"\xef\xbb\xbf<|endoftext|>\r\n" + parted.read_bytes() + b"<|endoftext|>"
    )
    lines = jsonl(tmp_path / "c.jsonl", *texts)
    marked = written(tmp_path / "d.jsonl", b"\xef\xbb\xbf" + lines.read_bytes().replace(b"\n", b"\n\n"))
    array = written(tmp_path / "e.json", json.dumps([{"text": t} for t in texts]))
    zipped = written(tmp_path / "f.jsonl.gz", gzip.compress(lines.read_bytes()))
    wanted = list(Corpus([InMemoryDocuments(texts)], Text(path="-"), encode=spelt, eos=EOS, max_length=8))
    for path in (parted, begun, lines, marked, array, zipped):
        assert list(corpus(path)) == wanted, path
        assert list(documents(Text(path=str(path)))) == texts, path


def test_a_file_without_a_separator_is_one_document(tmp_path):
    path = written(tmp_path / "book", "\nline one\n\nline two\r\n")
    assert list(documents(Text(path=str(path)))) == ["\nline one\n\nline two"]


def test_several_files_one_after_the_other_and_a_limit_over_all(tmp_path):
    first = jsonl(tmp_path / "a.jsonl", "one", "two")
    second = written(tmp_path / "b.txt", "three\n<|endoftext|>\nfour")
    both = corpus(first, second)
    assert ["".join(map(chr, row.tokens[1:-1])) for row in both] == ["one", "two", "three", "four"]
    assert list(corpus(first, second, limit=3)) == list(both)[:3]
    assert list(corpus(first, second, limit=99)) == list(both)


def test_a_set_of_the_hub_is_read_through_datasets(monkeypatch):
    import datasets

    asked = []

    def load_dataset(name, subset, split, revision):
        asked.append((name, subset, split))
        return [{"text": "one", "score": 0.5}, {"text": "two", "score": 0.25}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert list(documents(Text(path="owner/name", subset="mini", limit=1))) == ["one"]
    assert list(documents(Text(path="owner/name", split="test"))) == ["one", "two"]
    assert asked == [("owner/name", "mini", "train"), ("owner/name", None, "test")]


def test_the_number_taken_is_the_whole_state(tmp_path):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    dice = random.Random(seed)
    path = jsonl(tmp_path / "a.jsonl", *("xyz" * dice.randrange(1, 9) for _ in range(7)))
    whole = Stream(corpus(path), seed=seed)
    rows = [whole.take() for _ in range(3 * len(whole.items))]
    for taken in (0, 1, dice.randrange(len(rows)), len(rows) - 1):
        again = Stream(corpus(path), seed=seed)
        again.taken = taken
        assert [again.take() for _ in range(len(rows) - taken)] == rows[taken:]
    n = len(whole.items)
    for epoch in range(3):
        seen = [tuple(row.tokens) for e, row in rows if e == epoch]
        assert sorted(seen) == sorted(tuple(row.tokens) for row in corpus(path))
        assert len(seen) == n


def test_the_text_is_not_kept_but_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr("posttrain.data.corpus.CACHED_TOKENS", 10)
    path = jsonl(tmp_path / "a.jsonl", "a" * 8, "b" * 8, "c" * 30)
    calls = []

    def counted(text: str) -> list[int]:
        calls.append(text[0])
        return spelt(text)

    made = corpus(path, encode=counted)
    assert calls == ["a", "b", "c"]
    calls.clear()
    rows = [made[i] for i in (0, 1, 0, 2, 0)]
    assert rows[0] == rows[2] == rows[4]
    assert calls == ["a", "b", "a"]
    calls.clear()
    assert len([made[i] for i in range(4, len(made))]) == 5  # the windows of the third document
    assert calls == ["c"]


def test_a_text_that_changes_under_the_run_stops_it(tmp_path):
    made = corpus(written(tmp_path / "a.txt", "one two three"))
    written(tmp_path / "a.txt", "one two")
    with pytest.raises(RunError, match=r"^read text: "):
        made[0]


def test_bits_per_byte_do_not_depend_on_the_tokenizer():
    text, nats_a_byte = "abcdefgh" * 5, 1.25
    for encode in (spelt, by_pairs):
        made = Corpus([InMemoryDocuments([text])], Text(path="-"), encode=encode, eos=EOS, max_length=7)
        rows = range(len(made))
        nats = nats_a_byte * len(text)  # whoever spends the same on the text, in however many tokens
        assert bits_per_byte(nats, made.utf8_bytes(rows)) == pytest.approx(nats_a_byte / math.log(2))


BAD = [
    ("a.jsonl", '{"text": "x"}\n{"txt": "y"}\n', "a.jsonl:2: there is no field 'text'; did you mean 'txt'?"),
    ("a.jsonl", '{"id": 5}\n', "a.jsonl:1: there is no field 'text'; it has id"),
    ("a.jsonl", '{"text": ["x"]}\n', "a.jsonl:1: text is ['x'], not text"),
    ("a.jsonl", '{"text": null}\n', "a.jsonl:1: text is null"),
    ("a.jsonl", '{"text": ""}\n\n{"text": " \\n"}\n', "there is no text in it"),
    ("a.csv", "id,txt\n1,hello\n", "a.csv:2: there is no field 'text'; did you mean 'txt'?"),
    ("a.JSONL", '{"txt": "y"}\n', "a.JSONL:1: there is no field 'text'"),
    ("a.jsonlines", '{"txt": "y"}\n', "a.jsonlines:1: there is no field 'text'"),
    ("a.jsonl", '{"text": "x"}\n{"text": \n', "a.jsonl:2: it is not JSON"),
    ("a.jsonl", '{"text": "x', "a.jsonl:1: the record is cut off"),
    ("a.jsonl", '{"text": "x"}\n"y"\n', "a.jsonl:2: it is a string, not an object"),
    ("a.jsonl", '{"text": "x", "text": "y"}\n', "a.jsonl:1: the key 'text' is given twice"),
    ("a.jsonl", '{"text": "x", "score": NaN}\n', "a.jsonl:1: NaN is not JSON"),
    ("a.jsonl", '{"text": "\\ud83d"}\n', "a.jsonl:1: \\ud83d is half of a surrogate pair"),
    ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}\n', "a.jsonl:2: it is not UTF-8 (byte 0xff)"),
    ("a.jsonl", "\n\n", "there is no text in it"),
    ("a.txt", "", "there is no text in it"),
    ("a.txt", " \n<|endoftext|>\n\n", "there is no text in it"),
    ("a.txt", "a\n<|endoftext|>\n \n<|endoftext|>\nb\n", "a.txt:3: the document is empty"),
    ("a.txt", b"a\n<|endoftext|>\nb\nc\xff\n", "a.txt:4: it is not UTF-8 (byte 0xff)"),
    ("a.txt", "text".encode("utf-16"), "a.txt:1: it is not UTF-8 (UTF-16)"),
    ("a.json", '[{"text": "x"}, {"t": "y"}]', "a.json:1:17: there is no field 'text'"),
    ("a.txt.gz", gzip.compress(b"text"), "of gzipped files only records are read"),
]


@pytest.mark.parametrize(("name", "data", "line"), BAD, ids=[line[:40] for _, _, line in BAD])
def test_what_cannot_be_learnt_is_named_with_its_line(tmp_path, name, data, line):
    path = written(tmp_path / name, data)
    with pytest.raises(UserError) as found:
        corpus(path)
    assert line in str(found.value)


def test_a_file_that_is_not_there_is_named_with_its_neighbour(tmp_path):
    written(tmp_path / "text.txt", "x")
    with pytest.raises(UserError, match=r"there is no such file; did you mean 'text.txt'"):
        corpus(tmp_path / "tekst.txt")
    with pytest.raises(UserError, match="it is a directory"):
        corpus(tmp_path)
    with pytest.raises(UserError, match="a file has no split"):
        documents(Text(path=str(tmp_path / "text.txt"), split="train"))


def test_a_document_without_a_token_is_an_error(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", "x", "y")
    with pytest.raises(UserError, match=r"a\.jsonl:2: the tokenizer finds no token"):
        corpus(path, encode=lambda text: spelt(text.replace("y", "")))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"path": ""}, "path must not be empty"),
        ({"path": ()}, "path must not be empty"),
        ({"path": ("a", " ")}, "path must not be empty"),
        ({"path": ("a", "b", "a")}, "path names a twice"),
        ({"path": "a", "limit": 0}, "limit must be 1 or more"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(options, what):
    with pytest.raises(ValueError, match=what):
        Text(**options)


def test_a_row_of_one_token_predicts_nothing():
    with pytest.raises(UserError, match=r"^batch\.max_length: "):
        corpus(Path("-"), max_length=1)
