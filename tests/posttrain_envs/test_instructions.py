"""instructions: each of the 25 kinds says yes and no where a person would, strictly and loosely."""

import json

import pytest

from posttrain.types import Task, UserError
from posttrain_envs.instructions.checks import CHECKS, sentences
from posttrain_envs.instructions.language import language
from posttrain_envs.instructions.verifier import Instructions

PAIRS = [
    ("keywords:existence", {"keywords": ["Sea", "sky"]}, "The SEA and the sky.", "The sea alone."),
    ("keywords:existence", {"keywords": ["a.c"]}, "An a.c is there", "abc is no a-c"),
    (
        "keywords:frequency",
        {"keyword": "tea", "frequency": 2, "relation": "at least"},
        "Tea, more tea",
        "tea",
    ),
    ("keywords:frequency", {"keyword": "tea", "frequency": 2, "relation": "less than"}, "tea", "tea tea"),
    ("keywords:forbidden_words", {"forbidden_words": ["rain"]}, "a train", "Rain again"),
    ("keywords:forbidden_words", {"forbidden_words": ["C++"]}, "C alone", "I like C++ best"),
    (
        "keywords:letter_frequency",
        {"letter": "z", "let_frequency": 2, "let_relation": "at least"},
        "Zig zag",
        "zig",
    ),
    (
        "keywords:letter_frequency",
        {"letter": "#", "let_frequency": 2, "let_relation": "less than"},
        "# one",
        "## two",
    ),
    ("language:response_language", {"language": "de"}, "Das ist nicht der Hund.", "This is not the dog."),
    ("language:response_language", {"language": "de"}, "42!", "Գիրը սեղանին է"),
    ("language:response_language", {"language": "hi"}, "यह एक किताब है", "हे एक पुस्तक आहे आणि ते"),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": "at least"},
        "One. Two! Three?",
        "Dr. Who saw 3.5 of them. Yes.",
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": "less than"},
        "One. Two.",
        "A b. C d. E f.",
    ),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n***\ntwo", "one\n\ntwo"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one *** two ***", "a *** *** b"),
    (
        "length_constraints:number_words",
        {"num_words": 3, "relation": "less than"},
        "two words",
        "and now three",
    ),
    (
        "length_constraints:number_words",
        {"num_words": 3, "relation": "at least"},
        "one two three",
        "one, two",
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "weekend"},
        "One.\n\n'Weekend', they said",
        "Weekend.\n\nNo",
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 1, "first_word": "so"},
        "So?\n\nYes",
        "So it is",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name], [address]", "[name] ["),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Yours.\nP. S. more", "Yours, ps"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "P.P.S. and", "P.S. and"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* one\n  - two", "* one\n** two **"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 1}, "- one", "- one\n* two"),
    ("detectable_format:constrained_response", {}, "Well: My answer is maybe.", "maybe"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and *b*", "*a* and **"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1\nx\nSECTION 2\ny",
        "SECTION one\nSECTION 2",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": [1]}\n```', "{'a': 1}"),
    ("detectable_format:json_format", {}, '{"a": 1}', "[" * 100_000),
    ("detectable_format:title", {}, "<<A day>>\nIt was", "<< >>\n<A day>"),
    ("combination:two_responses", {}, "one\n******\ntwo", "same ****** same"),
    ("combination:two_responses", {}, "one ****** two ******", "one ****** ****** two"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Why so? "}, " why so?\nBecause", "Because. Why so?"),
    ("startend:end_checker", {"end_phrase": "The end."}, '... the END."', "The end. Or not"),
    ("startend:quotation", {}, ' "All of it." ', '"Some" of it'),
    ("startend:quotation", {}, '""', '"'),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "NOW or NEVER-EVER",
        "NOW or Never",
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "less than"},
        "U.S. or Them",
        "U.S. AND us",
    ),
    ("change_case:english_capital", {}, "THIS IS THE ANSWER!", "THIS is THE ANSWER"),
    ("change_case:english_capital", {}, "IT IS NOT", "DAS IST NICHT DER HUND"),
    ("change_case:english_lowercase", {}, "this is the answer: 42.", "this is the Answer"),
    ("punctuation:no_comma", {}, "one; two", "one, two"),
]


def asked(*instructions: tuple[str, dict]) -> Task:
    names, numbers = zip(*instructions, strict=True)
    return Task(id="q", messages=(), fields={"instruction_id_list": list(names), "kwargs": list(numbers)})


@pytest.mark.parametrize(("name", "numbers", "yes", "no"), PAIRS)
def test_a_kind_says_yes_and_no(name: str, numbers: dict, yes: str, no: str) -> None:
    judge, unread = Instructions(), {"keywords": None, "language": None, "frequency": None}
    task = asked((name, unread | numbers))  # the data set has every key, and null for most
    judge.check(task)
    assert judge(task, yes).label == "right"
    verdict = judge(task, no)
    assert verdict.label == "wrong"
    assert name in verdict.reason


def test_every_kind_has_a_pair() -> None:
    assert {name for name, *_ in PAIRS} == set(CHECKS)
    assert len(CHECKS) == 25


def test_an_empty_response_follows_nothing() -> None:
    task = asked(("punctuation:no_comma", {}), ("keywords:forbidden_words", {"forbidden_words": ["x"]}))
    verdict = Instructions()(task, " \n")
    assert verdict.parts["strict"] == verdict.parts["loose"] == 0
    assert Instructions()(task, "<think>y").parts["loose"] == 0


def test_a_thought_is_not_looked_at() -> None:
    task = asked(("punctuation:no_comma", {}), ("keywords:existence", {"keywords": ["cat"]}))
    assert Instructions()(task, "<think>Well, no commas.</think>A cat").score == 1.0
    assert Instructions()(task, "<think>a cat</think>A dog").score == 0.0


def test_parts_count_prompts_and_instructions_strictly_and_loosely() -> None:
    task = asked(
        ("startend:quotation", {}),
        ("punctuation:no_comma", {}),
        ("length_constraints:number_words", {"num_words": 50, "relation": "at least"}),
    )
    parts = Instructions()(task, 'Sure, here:\n"*Quoted*"\nBye, then').parts
    assert parts == {"instructions": 3, "strict": 0, "loose": 2, "all_strict": 0, "all_loose": 0}


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("en", "This is the cat."),
        ("fr", "Le chat est sur la table et il dort."),
        ("es", "El gato no está en la casa."),
        ("pt", "O gato não está em casa com você."),
        ("fi", "Kissa on talossa ja se ei ole täällä."),
        ("sw", "Paka ni wa mtu na watu wa hii"),
        ("ru", "Это не кошка, а собака, и она дома"),
        ("bg", "Това е котка и тя не са на дома"),
        ("fa", "این گربه است و در خانه را"),
        ("ur", "یہ بلی ہے اور گھر میں ہیں"),
        ("ar", "هذا هو القط في البيت من"),
        ("ne", "यो एक बिरालो हो र छ"),
        ("th", "นี่คือแมว"),
        ("ko", "고양이는 집에 있다"),
        ("zh-cn", "这是一只猫"),
        (None, "3 + 4 = 7"),
    ],
)
def test_the_language_of_a_sentence(code: str | None, text: str) -> None:
    assert language(text) == code


def test_sentences_end_where_a_person_ends_them() -> None:
    assert sentences("It costs 3.50, i.e. little. J. R. came at 5 p.m. today! Really?!") == 3
    assert sentences("no end") == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "needs instruction_id_list"),
        (
            {"instruction_id_list": ["punctuation:no_commas"], "kwargs": [{}]},
            "did you mean 'punctuation:no_comma'",
        ),
        ({"instruction_id_list": ["startend:end_checker"], "kwargs": [{}]}, "no 'end_phrase'"),
        *(
            ({"instruction_id_list": [name], "kwargs": [given]}, says)
            for name, given, says in [
                (
                    "length_constraints:number_words",
                    {"num_words": 3, "relation": "at most"},
                    "at least, less than as 'relation', not 'at most'",
                ),
                ("length_constraints:number_words", {"num_words": "3", "relation": "at least"}, "'3'"),
                ("length_constraints:number_paragraphs", {"num_paragraphs": 2.5}, "2.5"),
                ("keywords:existence", {"keywords": "cat"}, "a list of texts as 'keywords', not 'cat'"),
                ("keywords:forbidden_words", {"forbidden_words": []}, "not \\[\\]"),
                ("startend:end_checker", {"end_phrase": " "}, "not ' '"),
                ("language:response_language", {"language": "da"}, "not 'da'"),
                ("punctuation:no_comma", "x", "kwargs"),
            ]
        ),
    ],
)
def test_a_task_that_cannot_be_judged_is_refused(fields: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Instructions().check(Task(id="q", messages=(), fields=fields))


def test_shares_and_loose_readings_are_options() -> None:
    task = asked(
        ("startend:quotation", {}),
        ("punctuation:no_comma", {}),
        ("length_constraints:number_words", {"num_words": 50, "relation": "at least"}),
    )
    said = 'Sure, here:\n"*Quoted*"\nBye, then'
    scores = {
        (partial, loose): (verdict.score, verdict.label)
        for partial in (False, True)
        for loose in (False, True)
        for verdict in [Instructions(partial=partial, loose=loose)(task, said)]
    }
    assert scores[False, False] == scores[False, True] == scores[True, False] == (0.0, "wrong")
    assert scores[True, True] == (pytest.approx(2 / 3), "partial")
    assert (
        Instructions(loose=True)(asked(("punctuation:no_comma", {})), "Sure, here:\nno comma").label
        == "right"
    )


def test_a_recipe_names_them(online, write, run_cli, tmp_path) -> None:
    record = {"prompt": "Hi", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    file = tmp_path / "d.jsonl"
    file.write_text("".join(json.dumps({**record, "id": str(n)}) + "\n" for n in range(4)))
    tables = {
        "task": {"arithmetic": None, "data": {"path": str(file)}},
        "verifier": {"number": None, "instructions": {"partial": True}},
        "run": {"updates": 1},
    }
    done = run_cli("train", write(online, tables), "--run-dir", tmp_path / "run")
    assert done.code == 0, done.err
    file.write_text(json.dumps({**record, "instruction_id_list": ["no:such"]}) + "\n")
    done = run_cli("validate", write(online, tables))
    assert done.code == 2
    assert "there is no instruction 'no:such'" in done.err.replace("\n", " ")
