"""Counts what makes the code hard to walk through, one number a line: scripts/measure.py [ROOT] [--lower].

Names are looked up in the syntax tree:
nothing is imported, so an earlier version can be measured from its own checkout.
"""

import argparse
import ast
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

BASELINE = Path(__file__).with_name("baseline.json")
"""The most that a test allows of what should fall."""
PARTICIPLES = re.compile(
    "found|said|told|given|made|kept|left|asked|wanted|chosen|shown|drawn|held|seen|taken|what|whole|apart|own|"
    "each|meant|known|named|begun|ended|done|read|heard"
)
"""Names that say how a value came to be, and not what it is."""
DIALECT = re.compile(
    r"\b(hangs? on|is none|is no|of it|of them|so many|nobody|whoever|somebody|under way|to be had|told|said|"
    r"beside|goes? on|let go|anew|otherwise than|what is asked|how it went)\b"
)
"""Turns of phrase of the first versions, in docstrings."""


def code_lines(path: Path) -> int:
    """Return the number of lines that hold code: all but blank ones, comments and docstrings."""
    text = path.read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(text)))
    texts = [n for n in nodes if isinstance(n, (ast.Constant, ast.JoinedStr)) and n.end_lineno != n.lineno]
    # Blank lines and "#" within a string are code.
    lines = {line for n in texts for line in range(n.lineno, (n.end_lineno or n.lineno) + 1)}
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            lines.add(number)
    for node in docstrings(nodes):
        lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def bindings(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the names that a module binds: variables, parameters and targets."""
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def docstrings(nodes: Iterable[ast.AST]) -> Iterator[ast.Expr]:
    """Yield the docstrings of a module, of attributes too."""
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            yield node


def starts_processes(tree: ast.AST) -> bool:
    """Return whether a module starts or forks a process itself."""
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return bool(calls & {"subprocess.Popen", "subprocess.run", "Popen", "os.fork", "os.posix_spawn"})


def single_importers(trees: dict[str, ast.Module]) -> int:
    """Return the number of modules that one other module alone imports."""
    importers: dict[str, set[str]] = {name: set() for name in trees}
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for target in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                    if target in importers and target != name:
                        importers[target].add(name)
    return sum(len(who) == 1 for who in importers.values())


def trees_of(root: Path) -> dict[str, ast.Module]:
    """Return the syntax trees of the source by module."""
    source = root / "src"
    return {
        ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): ast.parse(
            path.read_text(encoding="utf-8")
        )
        for path in sorted(source.rglob("*.py"))
    }


def prose(modules: Sequence[Sequence[ast.AST]]) -> dict[str, int]:
    """Return the counts of names and docstrings, which should fall, by the nodes of each module."""
    classes = Counter(n.name for nodes in modules for n in nodes if isinstance(n, ast.ClassDef))
    texts = [ast.literal_eval(node.value) for nodes in modules for node in docstrings(nodes)]
    names = Counter(name for nodes in modules for name in bindings(nodes))
    participles = sum(count for name, count in names.items() if PARTICIPLES.fullmatch(name))
    return {
        "class names used twice": sum(count > 1 for count in classes.values()),
        "bindings named by participle or pronoun": participles,
        "turns of dialect in docstrings": sum(len(DIALECT.findall(text)) for text in texts),
        "docstrings of fewer than five words": sum(len(text.split()) < 5 for text in texts),
    }


def measures(root: Path) -> dict[str, int]:
    """Return every count by its name."""
    trees = trees_of(root)
    calls = [n for tree in trees.values() for n in ast.walk(tree) if isinstance(n, ast.Call)]
    kinds = re.compile(r"\b(Coq|Lean|Code|Math|Number|Guess|Maze|InProcessFunction)\b")
    types = [ast.unparse(call.args[1]) for call in calls if ast.unparse(call.func) == "isinstance"]
    keys = (root / "docs" / "recipes.md").read_text(encoding="utf-8").partition("generated: rules")[0]
    return {
        "code lines of the kernel": sum(map(code_lines, (root / "src" / "posttrain").rglob("*.py"))),
        "code lines of src": sum(map(code_lines, (root / "src").rglob("*.py"))),
        "code lines of tests": sum(map(code_lines, (root / "tests").rglob("*.py"))),
        "modules": len(trees),
        "modules with one importer": single_importers(trees),
        "modules that start processes": sum(map(starts_processes, trees.values())),
        **prose([list(ast.walk(tree)) for tree in trees.values()]),
        "checks for a kind by its class": sum(bool(kinds.search(text)) for text in types),
        "keys of a recipe": len(re.findall(r"^\| `[a-z_0-9]+` \|", keys, flags=re.MULTILINE)),
    }


def main() -> None:
    """Print the counts of a checkout."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--lower", action="store_true", help=f"write {BASELINE.name}, which only ever falls")
    options = parser.parse_args()
    counts = measures(options.root)
    for name, count in counts.items():
        print(f"{count:>7,}  {name}")
    if options.lower:
        before = json.loads(BASELINE.read_text(encoding="utf-8"))
        falling = {name: min(counts[name], most) for name, most in before.items()}
        BASELINE.write_text(json.dumps(falling, indent=4) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
