#!/usr/bin/env python3
"""Two programs that speak as Lean does, about a world of four goals: the REPL, and `lean` itself.

    lean_scripted.py repl                          JSON both ways, an object and a blank line
    lean --print-prefix | lean --json -o O FILE    messages as JSON lines, a compiled module

The tests use them where Lean's library, and so its tactics, is not there. What they answer has the shapes
that the REPL and Lean 4.35 have, multi-line JSON and the sorry warning in back-ticks included.
"""

import json
import os
import re
import sys
import time
from pathlib import Path

ALL, MID = "⊢ ∀ n : Nat, n = n ∧ True", "n : Nat\n⊢ n = n ∧ True"
LEFT, RIGHT = "case left\nn : Nat\n⊢ n = n", "case right\nn : Nat\n⊢ True"
HARD, LIE, SLOW = "⊢ hard", "⊢ lie", "⊢ slow"
TABLE = {
    (ALL, "intro n"): [MID],
    (MID, "constructor"): [LEFT, RIGHT],
    (MID, "have h : True := trivial"): [MID.replace("⊢", "h : True\n⊢")],
    (LEFT, "rfl"): [],
    (RIGHT, "trivial"): [],
    (HARD, "apply lie"): [LIE],
    (LIE, "done"): [],
    (SLOW, "close"): [],
}
RANK = {LEFT: 1, RIGHT: 1, "⊢ True": 1, LIE: 2}
"""The rung that closes a goal; of LIE the REPL says so and `lean` does not."""


def stepped(goals, tactic, known, honest=True):
    """The goals after a tactic, or a string: why it fails."""
    if tactic.startswith("set_option maxHeartbeats"):
        if SLOW in goals:
            time.sleep(3600)
        rung = 3 if "aesop" in tactic else 2 if "omega" in tactic else 1
        if all(RANK.get(goal, 9) <= rung and (goal != LIE or not honest) for goal in goals):
            return []
        return "first: no tactic applies"
    if tactic == "hang":
        time.sleep(3600)
    if tactic == "skip":
        return goals
    if tactic.startswith("exact ") and tactic[6:] in known:
        return goals[1:]
    after = TABLE.get((goals[0], tactic)) if goals else None
    return f"unknown tactic {tactic!r}" if after is None else [*after, *goals[1:]]


def theorem(text, known, honest):
    """(name, statement, why its proof fails) of the theorem in a text."""
    found = re.fullmatch(r"\s*theorem\s+(\S+)\s*:\s*(.*?)\s*:=\s*by\b(.*)", text, re.DOTALL)
    if found is None:
        return "", "", "unexpected token; expected command"
    statement = found[2].strip("() \n")
    goals = ["⊢ " + statement]
    for line in found[3].strip("\n").split("\n"):
        if line.strip():
            goals = stepped(goals, line.strip(), known, honest)
        if isinstance(goals, str):
            return found[1], statement, goals
    return found[1], statement, "unsolved goals\n" + "\n\n".join(goals) if goals else ""


def place(line, column):
    return {"line": line, "column": column}


def message(text, severity="error", line=1):
    return {"severity": severity, "pos": place(line, 0), "endPos": place(line, 5), "data": text}


def repl():
    """Environments are the theorems known in them, proof states lists of goals; both only grow in number."""
    environments, states, lines = [], [], []
    for line in sys.stdin:
        if line.strip():
            lines.append(line)
            continue
        if not lines:
            continue
        asked, lines = json.loads("".join(lines)), []
        if "tactic" in asked:
            answer = tactic_mode(states, asked)
        else:
            answer = command_mode(environments, states, asked)
        print(json.dumps(answer, ensure_ascii=False, indent=1), end="\n\n", flush=True)


def tactic_mode(states, asked):
    tactic = asked["tactic"]
    if tactic == "die":
        os._exit(3)
    if tactic == "garble":
        print("no JSON at all\n", flush=True)
    if not 0 <= asked["proofState"] < len(states):
        return {"message": "Unknown proof state."}
    goals, known = states[asked["proofState"]]
    if tactic == "exact ghost":  # an error inside a term: the REPL puts a hole there, and says so
        states.append(([], known))
        said = [message("Unknown identifier `ghost`", line=0)]
        status = "Incomplete: contains sorry"
        return {"proofStatus": status, "proofState": len(states) - 1, "messages": said, "goals": []}
    after = stepped(goals, tactic, known, honest=False)
    if isinstance(after, str):
        return {"message": "Lean error:\n" + after}
    states.append((after, known))
    status = "Incomplete: open goals remain" if after else "Completed"
    return {"proofStatus": status, "proofState": len(states) - 1, "goals": after}


def command_mode(environments, states, asked):
    if "env" not in asked:
        environments.append({})
        wrong = [message("unknown module prefix 'Nowhere'")] if "Nowhere" in asked["cmd"] else []
        return {"env": len(environments) - 1, **({"messages": wrong} if wrong else {})}
    if not 0 <= asked["env"] < len(environments):
        return {"message": "Unknown environment."}
    known = environments[asked["env"]]
    if claim := re.fullmatch(r"theorem \S+ : \(\s*(.*?)\s*\) := @(\S+)", asked["cmd"], re.DOTALL):
        same = known.get(claim[2]) == claim[1]
        return (
            {"env": asked["env"]} if same else {"env": asked["env"], "messages": [message("Type mismatch")]}
        )
    if asked["cmd"].rstrip().endswith("by sorry"):
        name, statement, _ = theorem(asked["cmd"].replace("sorry", "skip"), known, True)
        environments.append(known | {name: statement})
        states.append((["⊢ " + statement], known))
        hole = {"proofState": len(states) - 1, "pos": place(1, 9), "goal": "⊢ " + statement}
        warned = [message("declaration uses `sorry`", "warning")]
        return {
            "sorries": [{**hole, "endPos": place(1, 14)}],
            "messages": warned,
            "env": len(environments) - 1,
        }
    name, statement, wrong = theorem(asked["cmd"], known, honest=False)
    environments.append(known if wrong else known | {name: statement})
    return {"env": len(environments) - 1, **({"messages": [message(wrong)]} if wrong else {})}


def lean(flags):
    """Compiles PtHeader, PtSpec, PtSubmission and PtCheck of this little world."""
    file, olean = Path(flags[-1]), Path(flags[flags.index("-o") + 1])
    lines = file.read_text().split("\n")
    body = "\n".join(line for line in lines if not re.match("import|open", line))
    said, module = [], ""
    if file.stem == "PtHeader":
        said = [message("unknown module prefix 'Nowhere'")] if "Nowhere" in lines[0] else []
    elif file.stem == "PtSpec":
        module = re.match(r"axiom PtSpec\.statement : \(\n(.*)\n\)", body)[1]
    elif file.stem == "PtSubmission":
        name, statement, wrong = theorem(body, frozenset(), honest=True)
        said, module = ([message(wrong, line=2)] if wrong else []), f"{name}\n{statement}"
    elif "PtSubmission" in file.read_text():
        said = checked(lines)
    for each in said:
        print(json.dumps(each, ensure_ascii=False))
    if any(each["severity"] == "error" for each in said):
        sys.exit(1)
    olean.write_text(module)


def checked(lines):
    """What Lean says to the last three lines of the check."""
    name, statement = Path("PtSubmission.olean").read_text().split("\n")
    asks, claims, rests = len(lines) - 2, len(lines) - 1, len(lines)
    if lines[asks - 1].split()[-1] != f"_root_.{name}":
        return [message(f"Unknown constant `{name}`", line=asks)]
    said = [message(f"theorem {name} : {statement} := …", "information", asks)]
    if statement != Path("PtSpec.olean").read_text():
        return [*said, message("Type mismatch", line=claims)]
    ours = lines[rests - 1].split()[-1]
    return [*said, message(f"'{ours}' does not depend on any axioms", "information", rests)]


if __name__ == "__main__":
    if "--print-prefix" in sys.argv:
        print(Path(__file__).resolve().parent.parent)
    elif sys.argv[1:] == ["repl"]:
        repl()
    else:
        lean(sys.argv[1:])
