"""The 25 kinds of instructions of IFEval, each a function of the response and the instruction's numbers.

Parameters are named like the keys of the data set. Keywords are compared as text, regardless of case, and
never as patterns. Every check is linear in the length of the response.

Sources: Zhou et al. 2023, arXiv:2311.07911, table 1; where the data set is ambiguous, its harness.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from posttrain_envs.instructions.language import language

AT_LEAST, LESS_THAN = "at least", "less than"
ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
"""Answers of which detectable_format:constrained_response requires one."""
_ABBREVIATED = re.compile(
    r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|Inc|Ltd|Co|vs|etc|No|Fig|e\.g|i\.e|a\.m|p\.m|(?-i:[A-Z]))\.",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.!?。！？]+[\"'”’)\]]*(?:\s+|$)")


def _holds(count: int, relation: str, bound: int) -> bool:
    return count < bound if relation == LESS_THAN else count >= bound


# ---------------------------------------------------------------------- words and letters


def existence(text: str, keywords: Sequence[str]) -> bool:
    """Return whether every keyword occurs."""
    return all(word.casefold() in text.casefold() for word in keywords)


def frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    """Return whether a keyword occurs at least, or less than, `frequency` times."""
    return _holds(text.casefold().count(keyword.casefold()), relation, frequency)


def forbidden_words(text: str, forbidden_words: Sequence[str]) -> bool:
    """Return whether none of the words occurs as a separate word."""
    matches = (re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) for word in forbidden_words)
    return not any(matches)


def letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    """Return whether a letter, in either case, occurs at least, or less than, `let_frequency` times."""
    return _holds(text.lower().count(letter.lower()), let_relation, let_frequency)


def response_language(text: str, language: str) -> bool:
    """Return whether the text is in this language; a text without letters is in any."""
    return _speaks(text, language)


def _speaks(text: str, code: str) -> bool:
    return language(text) == code or not any(letter.isalpha() for letter in text)


# ---------------------------------------------------------------------- lengths


def number_sentences(text: str, num_sentences: int, relation: str) -> bool:
    """Return whether there are at least, or less than, `num_sentences` sentences."""
    return _holds(sentences(text), relation, num_sentences)


def sentences(text: str) -> int:
    """Return the number of sentences: ends at . ! ? before a blank, except abbreviations and initials.

    >>> sentences("Dr. Who paid 3.50 dollars. Really?! Yes"), sentences("")
    (3, 0)
    """
    plain = _ABBREVIATED.sub(lambda match: match[0].replace(".", ""), text)
    return sum(bool(part.strip()) for part in _SENTENCE_END.split(plain))


def number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Return whether *** separates `num_paragraphs` paragraphs, of which no inner one is empty."""
    parts = [bool(part.strip()) for part in text.split("***")]
    return all(parts[1:-1]) and sum(parts) == num_paragraphs


def number_words(text: str, num_words: int, relation: str) -> bool:
    """Return whether there are at least, or less than, `num_words` words."""
    return _holds(len(re.findall(r"\w+", text)), relation, num_words)


def nth_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Return whether empty lines separate `num_paragraphs` paragraphs, and the n-th begins with the word."""
    parts = text.split("\n\n")
    if sum(bool(part.strip()) for part in parts) != num_paragraphs or nth_paragraph > len(parts):
        return False
    words = parts[nth_paragraph - 1].split()
    return bool(words) and re.split(r"[.,?!'\"]", words[0].lstrip("'\""))[0].lower() == first_word.lower()


# ---------------------------------------------------------------------- content and format


def number_placeholders(text: str, num_placeholders: int) -> bool:
    """Return whether there are at least `num_placeholders` places to fill in, such as [address]."""
    return sum(_brackets(line) for line in text.split("\n")) >= num_placeholders


def _brackets(line: str) -> int:
    count, end = 0, 0
    while (begin := line.find("[", end)) >= 0 and (close := line.find("]", begin)) >= 0:
        count, end = count + 1, close + 1
    return count


def postscript(text: str, postscript_marker: str) -> bool:
    """Return whether a postscript begins with the marker, P.S. or P.P.S."""
    patterns = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}
    return bool(
        re.search(patterns.get(postscript_marker, re.escape(postscript_marker.lower())), text.lower())
    )


def number_bullet_lists(text: str, num_bullets: int) -> bool:
    """Return whether exactly `num_bullets` lines begin with a bullet, * or -."""
    lines = [line.lstrip() for line in text.split("\n")]
    return sum(line[:1] == "-" or (line[:1] == "*" and line[1:2] not in ("", "*")) for line in lines) == (
        num_bullets
    )


def constrained_response(text: str) -> bool:
    """Return whether one of the three answers occurs."""
    return any(answer in text for answer in ANSWERS)


def number_highlighted_sections(text: str, num_highlights: int) -> bool:
    """Return whether there are at least `num_highlights` *highlighted* parts."""
    once = re.findall(r"\*([^\n*]*)\*", text)
    twice = re.findall(r"\*\*([^\n*]*)\*\*", text)
    return sum(bool(part.strip()) for part in (*once, *twice)) >= num_highlights


def multiple_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    """Return whether there are at least `num_sections` sections with headings such as SECTION 1."""
    return len(re.findall(rf"{re.escape(section_spliter)}\s?\d+", text)) >= num_sections


def json_format(text: str) -> bool:
    """Return whether the whole text is JSON, in a fence or not."""
    body = re.sub(r"^```(?:json)?", "", text.strip(), flags=re.IGNORECASE).removesuffix("```")
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


def title(text: str) -> bool:
    """Return whether a line holds a nonempty title in double angular brackets."""
    for line in text.split("\n"):
        begin, end = line.find("<<"), line.rfind(">>")
        if 0 <= begin < end and line[begin:end].strip("<> \t"):
            return True
    return False


# ---------------------------------------------------------------------- the whole text


def two_responses(text: str) -> bool:
    """Return whether ****** separates two different answers."""
    parts = [part.strip() for part in text.split("******")]
    answers = [part for part in parts if part]
    return all(parts[1:-1]) and len(answers) == 2 and answers[0] != answers[1]


def repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    """Return whether the text begins with the request, word for word."""
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(text: str, end_phrase: str) -> bool:
    """Return whether the text ends in this phrase."""
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def quotation(text: str) -> bool:
    """Return whether the whole text stands between double quotation marks."""
    stripped = text.strip()
    return len(stripped) > 1 and stripped[0] == stripped[-1] == '"'


def capital_word_frequency(text: str, capital_frequency: int, capital_relation: str) -> bool:
    """Return whether at least, or less than, n words are in capital letters; a hyphenated word is one."""
    words = re.findall(r"\w+(?:[-.'’]\w+)*", text)
    return _holds(sum(word.isupper() for word in words), capital_relation, capital_frequency)


def english_capital(text: str) -> bool:
    """Return whether the text is English in capital letters only."""
    return text.isupper() and _speaks(text, "en")


def english_lowercase(text: str) -> bool:
    """Return whether the text is English in small letters only."""
    return text.islower() and _speaks(text, "en")


def no_comma(text: str) -> bool:
    return "," not in text


CHECKS: dict[str, Callable[..., Any]] = {
    "keywords:existence": existence,
    "keywords:frequency": frequency,
    "keywords:forbidden_words": forbidden_words,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": response_language,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_words": number_words,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "punctuation:no_comma": no_comma,
}
"""Checks by their names in the data set."""
