"""lean: what a response is read as, before Lean sees it."""

import random
import re
import time

import pytest

from posttrain_prove.lean.script import find_script, split_tactics
from posttrain_prove.lean.source import (
    Header,
    LeanCode,
    blank_comments,
    classify,
    find_forbidden,
    statement_forms,
    write_command,
    write_submission,
)

LIBRARY = Header.of(
    "import Mathlib\nimport Aesop\nset_option maxHeartbeats 400000\nopen Nat Real\ndef two := 2"
)
PRELUDE = Header.of("prelude\nuniverse u")


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("a -- b\nc", "a     \nc"),
        ("a /- b\nc -/ d", "a     \n     d"),
        ("/- /- -/ x -/ y", "              y"),
        ("/-- doc -/ theorem", "           theorem"),
        ('"-- no" -- yes', '"-- no"       '),
        (r'"\"-- no" x', r'"\"-- no" x'),
        ("'\"' -- c", "'\"'     "),
        ("h' -- c", "h'     "),
        ("x /- open", "x        "),
        ("-/ x", "-/ x"),
    ],
)
def test_comments_become_blanks(text, left):
    assert blank_comments(text) == left


def test_blanking_moves_nothing_and_finds_nothing_new():
    seed = random.randrange(1 << 30)
    print("seed", seed)
    draw = random.Random(seed)
    for _ in range(500):
        text = "".join(draw.choices(["/-", "-/", "--", '"', "\\", "'", "\n", " ", "macro", "x"], k=30))
        blanked = blank_comments(text)
        assert len(blanked) == len(text)
        assert [i for i, c in enumerate(text) if c == "\n"] == [i for i, c in enumerate(blanked) if c == "\n"]
        assert all(c in (" ", d) for c, d in zip(blanked, text, strict=True))


@pytest.mark.parametrize(
    "text",
    [
        "macro x",
        "local macro x",
        "scoped[N] notation x",
        "3macro",
        '"a macro"',
        "syntax",
        "«macro»",
        "x;elab y",
        "run_tac z",
        "(run_meta)",
        "builtin_initialize",
        "declare_syntax_cat t",
        "register_simp_attr a",
        "#eval 1",
        "#eval! 1",
        "unsafe def",
        "import A",
        "meta import A",
        "@[simp, csimp] x",
        "@[implemented_by f]",
        "@[  init  ]",
        "@[norm_num]",
        "@[simp, tactic t] x",
        "attribute [-instance, macro_inline] x",
        "attribute /- -/ [ init ] x",
        "attribute",
        "@[simp",
        "set_option debug.skipKernelTC true",
        "set_option debug.byAsSorry true in",
        "set_option\n\tcompiler.extract_closed false",
        "set_option",
        "set_option «maxHeartbeats» 1",
        "PtSpec.statement",
        "«PtCheck»",
        "simproc s",
        "binder_predicate x",
    ],
)
def test_what_could_run_is_forbidden(text):
    assert find_forbidden(blank_comments(text))[0] == "forbidden"


@pytest.mark.parametrize(
    "text",
    [
        "Polynomial.eval 2 p",
        "exact macro' h",
        "have syntax_ok := h",
        "simp [importance]",
        "initialize_simps_projections Foo",
        "@[simp, norm_cast] lemma x",
        "@[local simp] lemma x",
        "attribute [local simp, -ext] foo",
        "@[simp high, ext] lemma x",
        "set_option maxHeartbeats 0 in",
        "set_option synthInstance.maxHeartbeats 200",
        "set_option linter.unusedVariables false",
        "#check x",
        "@foo [x] y",
        "h.prefix_append",
        "axiom x : False",
        "opaque y : Nat",
    ],
)
def test_what_is_honest_may_be_said(text):
    assert find_forbidden(text) == ("", "", -1)


@pytest.mark.parametrize("text", ["sorry", "by admit", "exact sorryAx _", "(sorry)", "3sorry", "«sorry»"])
def test_holes_are_found(text):
    assert find_forbidden(text)[0] == "incomplete"


@pytest.mark.parametrize("text", ["sorry'", "not_sorry", "admits", "sorry_free"])
def test_names_like_holes_are_none(text):
    assert find_forbidden(text)[0] == ""


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ("simp", "simp"),
        ("```lean\nsimp\n```", "simp\n"),
        ("```\na\n```\n```\nb\n```\n", "b\n"),
        ("```lean4\na\n```\nsays\n```\nb\n```\n", "a\n"),
        ("```lean\na\n```\n```lean\nb", "a\n"),
        ("```\n```", ""),
        ("<think>\n```lean\nsorry\n```\n</think>simp", "simp"),
    ],
)
def test_the_last_complete_block_is_the_code(response, text):
    code = LeanCode.of(response)
    assert code.text == text
    assert response[code.begin :].startswith(text)


@pytest.mark.parametrize(
    ("text", "sort"),
    [
        ("theorem t : p := h", "development"),
        ("lemma  t (x) : p := h", "development"),
        ("@[simp] protected theorem N.t : p := h", "development"),
        ("theorem _root_.t : p := h", "development"),
        ("axiom t : p", "development"),
        ("theorem t' : p := h", "script"),
        ("theorem tt : p := h", "script"),
        ("by simp", "term"),
        (":= h", "term"),
        ("fun x => h", "term"),
        ("⟨a, b⟩", "term"),
        ("intro x\nsimp", "script"),
        ("bypass", "script"),
    ],
)
def test_what_a_response_is(text, sort):
    assert classify(LIBRARY, "t", text) == sort
    assert classify(PRELUDE, "t", text) == (sort if sort == "development" else "term")


def test_the_headers_imports_may_be_repeated_and_no_others():
    text = "import Mathlib\nimport  Aesop\n\ntheorem t : p := h"
    read = write_command(LIBRARY, "t", "", text)
    assert read == "\n\n\ntheorem t : p := h"
    other = write_command(LIBRARY, "t", "", "import Mathlib\nimport Other\ntheorem t : p := h")
    assert find_forbidden(other)[:2] == ("forbidden", "import")


def test_the_scope_of_the_header_stands_before_the_response_and_its_definitions_do_not():
    module, before = write_submission(LIBRARY, "t", " : p", "theorem t : p := h")
    assert module == ("import PtHeader\nset_option maxHeartbeats 400000\nopen Nat Real\ntheorem t : p := h\n")
    assert module.split("\n")[before] == "theorem t : p := h"
    assert Header.of("x", prelude=True).text == "prelude\nx\n"
    assert (
        write_submission(PRELUDE, "t", " : p", "h")[0]
        == "prelude\nimport PtGuard\nuniverse u\ntheorem t : p :=\nh\n"
    )


@pytest.mark.parametrize("text", ["intro x\nsimp", "by\n  simp", "fun x => h", "theorem t : p := h\n"])
def test_lines_before_the_response_are_counted(text):
    module, before = write_submission(LIBRARY, "t", statement_forms("p")[0], text)
    first, last = text.strip().split("\n")[0], text.strip().split("\n")[-1]
    assert module.split("\n")[before].strip().endswith(first.strip())
    assert last.strip() in module.split("\n")[before + text.strip().count("\n")]


def test_a_statement_may_be_a_type_or_binders():
    assert statement_forms("p") == (" : (\np\n)", " p")
    assert statement_forms(".{u} (a : α) : p")[1] == ".{u} (a : α) : p"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("intro x\nsimp", ["intro x", "simp"]),
        ("  intro x\n\n  simp\n", ["intro x", "simp"]),
        ("constructor\n· simp\n  ring\n· rfl", ["constructor", "· simp\n  ring", "· rfl"]),
        ("simp\n  [a,\n   b]\nrfl", ["simp\n  [a,\n   b]", "rfl"]),
        (
            "induction n with\n| zero => rfl\n| succ n h => simp",
            ["induction n with\n| zero => rfl\n| succ n h => simp"],
        ),
        ("simp\n<;> ring", ["simp\n<;> ring"]),
        ("exact foo (\n  a\n)", ["exact foo (\n  a\n)"]),
        ("", []),
    ],
)
def test_a_script_is_cut_into_its_tactics(text, parts):
    found = split_tactics(text)
    assert [tactic.text for tactic in found] == parts
    assert all(re.sub(r"\s", "", text[: t.end]).endswith(re.sub(r"\s", "", t.text)) for t in found)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("theorem t : p := by\n  intro x\n  simp", ["intro x", "simp"]),
        ("theorem t : p := by intro x\n                    simp", ["intro x", "simp"]),
        ("lemma s : q := by rfl\n\ntheorem t : p := by\n  simp", ["simp"]),
        ("by\n  intro x\n  simp", ["intro x", "simp"]),
        ("by simp", ["simp"]),
        (":= by\n  simp", ["simp"]),
        ("intro x\nsimp", ["intro x", "simp"]),
    ],
)
def test_the_tactics_of_every_kind_of_response_are_found(text, parts):
    found = find_script(LIBRARY, "t", text)
    listed = split_tactics(found.text)
    assert [tactic.text for tactic in listed] == parts
    for tactic in listed:
        assert text[: found.begin + tactic.end].endswith(tactic.text)


@pytest.mark.parametrize(
    "text", ["theorem t : p := h", "fun x => h", "theorem t : p := by\n  simp\n\nend N", "by", "⟨a, b⟩"]
)
def test_what_has_no_tactics_of_its_own_is_not_walked(text):
    assert find_script(LIBRARY, "t", text) is None


@pytest.mark.parametrize(
    "part",
    [
        "/-",
        "-/",
        "theorem ",
        "theorem t ",
        "theorem t := b",
        '"',
        '\\"',
        "@[",
        "attribute ",
        "```\n",
        "'",
        "t.",
    ],
)
def test_a_long_response_is_read_in_no_time(part):
    text = '"' * (part == '\\"') + part * (1_000_000 // len(part))
    begin = time.process_time()
    code = LeanCode.of(text)
    find_forbidden(code.text)
    classify(LIBRARY, "t", code.text)
    find_script(LIBRARY, "t", code.text)
    assert time.process_time() - begin < 5.0
