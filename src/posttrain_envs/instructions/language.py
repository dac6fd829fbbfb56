"""Detect the language of a text by its script, and by its commonest words where several share a script."""

from collections import Counter

import regex

_OF_SCRIPT = {
    "Gurmukhi": "pa",
    "Kannada": "kn",
    "Telugu": "te",
    "Tamil": "ta",
    "Gujarati": "gu",
    "Bengali": "bn",
    "Malayalam": "ml",
    "Thai": "th",
    "Hangul": "ko",
    "Hebrew": "he",
    "Greek": "el",
    "Hiragana": "ja",
    "Katakana": "ja",
    "Han": "zh-cn",
    "Latin": "",
    "Cyrillic": "",
    "Arabic": "",
    "Devanagari": "",
}
"""The only language of a script; "" where words decide."""
_WORDS = {
    "Latin": {
        "en": "the and of to a in is that it for was on are with as his be at have this from not by you i my",
        "de": "der die und das ist nicht ein eine zu den mit sich des auf für im dem sie ich es auch wir",
        "fr": "le la les des et est une un dans que qui pour pas sur au il du vous je nous ce avec sont",
        "es": "el la los las de que y en un una es por con para se del no lo su al más como pero",
        "pt": "o os as de que e do da em um uma para é com não por mais dos na no você são ao eu",
        "it": "il di che e la è un una per non con sono del della si gli le da nel anche come ma ho",
        "nl": "de het een en van is dat niet op te zijn voor met die aan er ook ik je wij maar",
        "fi": "ja on ei se että hän oli mutta ovat kun niin myös tai joka tämä voi olla sen mitä minä",
        "sw": "ya na wa kwa ni katika la kuwa za cha hii yake kama au lakini watu hiyo mimi sana huo",
        "vi": "và của là có không được trong cho một người những các để với này tôi đã khi bạn như",
        "sv": "och att det i en är som på för av med inte den till har jag ett om de vi",
        "pl": "i w nie na się z do to jest że jak po o ale za jego dla czy tak są",
        "tr": "ve bir bu için de da ile çok ne daha gibi olarak en ama var o ben her mi",
        "id": "yang dan di dengan untuk ini itu dari dalam tidak pada adalah akan juga ke saya kami bisa",
        "ro": "și de la nu în cu este pe un o să din care mai ce pentru sunt",
    },
    "Cyrillic": {
        "ru": "и в не на что с как это по из но они мы для он она было так вы",
        "bg": "и да на се за от е са че със по това не как са в ще като който или",
        "uk": "і та що в не на є це від як до за з ми він вона але або які",
    },
    "Arabic": {
        "ar": "في من على أن إلى هذا هذه التي الذي كان لا ما مع عن هو هي كل ذلك",
        "fa": "و در به از که این است را با برای آن های یک می شود من ما هم تا",
        "ur": "کے میں کی ہے اور سے کا کو یہ ہیں نے پر اس کہ ایک بھی وہ نہیں ہم",
    },
    "Devanagari": {
        "hi": "है के में की और का हैं से को यह नहीं एक पर भी इस कि लिए हम आप",
        "mr": "आहे आणि च्या ते हे मध्ये नाही होते आहेत या एक तर मी आम्ही तो ती साठी की",
        "ne": "छ र को हो गर्न भएको छन् पनि लागि यो मा ले एक हुन् हामी म तथा गरेको",
    },
}
LANGUAGES = tuple(
    sorted({code for code in _OF_SCRIPT.values() if code} | {c for t in _WORDS.values() for c in t})
)
"""Codes of all languages that can be detected."""
_SETS = {
    script: {code: frozenset(words.split()) for code, words in table.items()}
    for script, table in _WORDS.items()
}
_LETTERS = {script: regex.compile(rf"\p{{Script={script}}}") for script in _OF_SCRIPT}


def language(text: str) -> str | None:
    """Return the ISO 639-1 code of the language (Chinese: zh-cn); None without letters of a known script.

    >>> language("The cat is on the mat."), language("Die Katze ist nicht auf dem Tisch."), language("42!")
    ('en', 'de', None)
    >>> language("यह एक किताब है और वह नहीं"), language("これは本です")
    ('hi', 'ja')
    """
    counts = Counter({script: len(pattern.findall(text)) for script, pattern in _LETTERS.items()})
    kana = counts["Hiragana"] + counts["Katakana"]
    script, most = counts.most_common(1)[0]
    if not most:
        return None
    if script == "Han" and 10 * kana > counts["Han"]:
        return "ja"
    if _OF_SCRIPT[script]:
        return _OF_SCRIPT[script]
    words = Counter(regex.findall(r"[\p{L}\p{M}]+", text.casefold()))
    frequencies = {code: sum(words[word] for word in common) for code, common in _SETS[script].items()}
    return max(frequencies, key=lambda code: frequencies[code])  # of equals the first, the commonest language
