"""What one move of a proof in Coq may be: one tactic, and no command."""

from posttrain.search.protocol import Refused
from posttrain.verifiers.proof.coq.screen import refusal
from posttrain.verifiers.proof.coq.script import is_tactic, sentences, unselected


def allowed(said: str) -> str | Refused:
    """The tactic that a move is; a class and a reason if it is none, or none that may be said.

    >>> allowed("apply h3"), allowed("2: split.")
    ('apply h3.', '2: split.')
    >>> [allowed(each).label for each in ("Abort.", "all: Abort.", "admit.", "auto. auto.", "- auto", "")]
    ['forbidden', 'forbidden', 'forbidden', 'form', 'form', 'form']
    """
    text = said.strip()
    text = text if text.endswith(".") else f"{text}."
    found, wrong = sentences(text)
    if wrong or len(found) != 1 or found[0].is_structure:
        return Refused("form", wrong or "a move is one tactic")
    code = found[0].code
    if not is_tactic(code):
        label = "forbidden" if unselected(code)[:1].isupper() else "form"
        return Refused(label, "it is a command, and no tactic")
    if unfit := refusal(found):
        return Refused("forbidden", unfit.why)
    return code if "(*" in text else text
