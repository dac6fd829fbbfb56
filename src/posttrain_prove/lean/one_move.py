"""What one move of a proof in Lean may be: one tactic, in one line, and nothing that is no tactic."""

import re

from posttrain_prove.lean.source import foul

MOST = 2000
"""Characters of a move."""
NAME = "_PtStep"
"""The beginning of each tried theorem's name; no move may say it, so none can use another's theorem."""

# What begins a command, or changes how later lines are read. Where a move is no tactic, Lean reads on at the
# next of these words as if it stood on a line of its own.
_COMMANDS = (
    r"theorem|lemma|def|abbrev|axiom|opaque|instance|example|(?:co)?inductive|structure|class|deriving|where|mutual",
    r"namespace|section|end|open|export|variable|universe|include|omit|set_option|attribute|prelude|module|private",
    r"protected|public|meta|noncomputable|partial|nonrec|local|scoped|init_quot|docs_to_verso|compile_inductive",
    r"deprecated_\w+|grind_pattern|gen_injective_theorems%|init_grind_norm|unlock_limits|recommended_spelling",
    r"tactic_extension|add_decl_doc|assert_not_\w+|library_note|irreducible_def|proof_wanted|alias|unseal|seal",
    r"suppress_compilation|unsuppress_compilation|initialize_simps_projections|stop|native_decide",
    r"with_weak_namespace|end_local_scope|show_deprecated_modules|dump_\w+",
)
_COMMAND = re.compile(rf"(?<![^\W\d])(?:{'|'.join(_COMMANDS)})(?![\w'!?])|#[a-z]\w+!?|@\[")
_NOT_READ = re.compile(r"""--|/-|-/|"|«|»|```|(?<![\w!?'])'""")
"""Comments, strings, characters and quoted names, in which a bracket is none."""
_PAIRS = {")": "(", "]": "[", "}": "{", "⟩": "⟨"}


def forbidden(move: str) -> str:
    """Why this is no single tactic; "" if it may be one.

    >>> forbidden("exact h"), forbidden("intro h; exact h"), forbidden("skip) (skip")
    ('', 'a move is one tactic, without ;', 'its brackets do not match')
    """
    if not move or not move.isprintable():
        return "a move is one line of text"
    if len(move) > MOST:
        return f"a move has at most {MOST} characters"
    if found := _NOT_READ.search(move):
        return f"{found[0]} may not be used in a move"
    word = foul(move)[1]
    if found := _COMMAND.search(move):
        word = word or found[0]
    if word or NAME in move:
        return f"{word or NAME} may not be used in a move"
    return _brackets(move.replace("<;>", "   "))


def _brackets(move: str) -> str:
    """Why a text is not one whole: its brackets do not match, or a ; stands outside of all."""
    open_ones: list[str] = []
    for letter in move:
        if letter in "([{⟨":
            open_ones.append(letter)
        elif letter in _PAIRS:
            if not open_ones or open_ones.pop() != _PAIRS[letter]:
                return "its brackets do not match"
        elif letter == ";" and not open_ones:
            return "a move is one tactic, without ;"
    return "its brackets do not match" if open_ones else ""
