"""Check that a move of a proof in Lean is one tactic, in one line."""

import re

from posttrain_prove.lean.source import find_forbidden

MOST = 2000
"""The largest number of characters in a move."""
NAME = "_PtStep"
"""The prefix of each tried theorem's name; no move may contain it, so none can use another's theorem."""

# Words that begin a command, or change how later lines are read. After a move that is not a tactic, Lean
# continues at the next of these words as if it stood on its own line.
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
"""Comments, strings, characters and quoted names, in which Lean does not count brackets."""
_PAIRS = {")": "(", "]": "[", "}": "{", "⟩": "⟨"}


def find_fault(move: str) -> str:
    """Return why a move is not a single tactic; "" if it may be one.

    >>> find_fault("exact h"), find_fault("intro h; exact h"), find_fault("skip) (skip")
    ('', 'a move is one tactic, without ;', 'its brackets do not match')
    """
    if not move or not move.isprintable():
        return "a move is one line of text"
    return find_script_fault(move) or _find_bracket_fault(move.replace("<;>", "   "))


def find_script_fault(script: str) -> str:
    """Return why lines of tactics may reach beyond their theorem in a file of many; "" if they cannot.

    >>> find_script_fault("intro h; skip\\nexact h"), find_script_fault("skip)\\n(skip")
    ('', 'its brackets do not match')
    """
    if len(script) > MOST:
        return f"a move has at most {MOST} characters"
    if match := _NOT_READ.search(script):
        return f"{match[0]} may not be used in a move"
    word = find_forbidden(script)[1]
    if match := _COMMAND.search(script):
        word = word or match[0]
    if word or NAME in script:
        return f"{word or NAME} may not be used in a move"
    return _find_bracket_fault(script.replace(";", " "))


def _find_bracket_fault(move: str) -> str:
    """Return whether brackets do not match or a ; stands outside of all brackets, as a reason; else ""."""
    stack: list[str] = []
    for letter in move:
        if letter in "([{⟨":
            stack.append(letter)
        elif letter in _PAIRS:
            if not stack or stack.pop() != _PAIRS[letter]:
                return "its brackets do not match"
        elif letter == ";" and not stack:
            return "a move is one tactic, without ;"
    return "its brackets do not match" if stack else ""
