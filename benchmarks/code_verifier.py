"""Measures the verifier of programs: programs a second at each isolation level, and agreement on HumanEval.

    python benchmarks/code_verifier.py                                  # speed
    python benchmarks/code_verifier.py --humaneval HumanEval.jsonl.gz   # and agreement

Agreement: every canonical solution, and five mutations of each that HumanEval's own rule rejects. A
mutation changes one place of the solution's syntax tree (an operator, a constant, a condition, a
statement, a returned value); the rule (prompt, solution, test and `check(entry_point)` run to their
end) is applied to it in a process of its own, without the sandbox, since we have made it ourselves.
"""

import argparse
import ast
import copy
import gzip
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from posttrain.types import Task
from posttrain.verifiers.code.verifier import Code
from posttrain.verifiers.pool import Pool
from posttrain.verifiers.sandbox import LEVELS, available

MUTANTS = 5
SUM = "a, b = map(int, input().split())\nprint(a + b)\n"
_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.Lt: ast.GtE, ast.LtE: ast.Lt, ast.Gt: ast.LtE,
    ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


def changed(node: ast.AST) -> Iterator[ast.AST]:
    """Each way in which one node of a tree can be changed."""
    for name in ("op", "ops"):
        found = getattr(node, name, None)
        swapped = _SWAPS.get(type(found[0] if isinstance(found, list) else found))
        if swapped is not None:
            new = copy.deepcopy(node)
            setattr(new, name, [swapped(), *found[1:]] if isinstance(found, list) else swapped())
            yield new
    if isinstance(node, ast.Constant):
        value = node.value
        if isinstance(value, bool):
            yield ast.Constant(not value)
        elif isinstance(value, (int, float)):
            yield from (ast.Constant(value + 1), ast.Constant(value - 1))
        elif isinstance(value, str):
            yield ast.Constant(value + "x")
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        new = copy.deepcopy(node)
        new.test = ast.UnaryOp(ast.Not(), new.test)
        yield new
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.Expr)):
        yield ast.Pass()
    if isinstance(node, ast.Return):
        yield ast.Return(ast.Constant(None))
        if node.value is not None:
            yield ast.Return(ast.List([node.value], ast.Load()))


def mutations(source: str, seed: str, after: int = 0) -> Iterator[str]:
    """Every mutation of a program after that line, in an order that depends on the seed alone."""
    tree = ast.parse(source)
    nodes = [(i, node) for i, node in enumerate(ast.walk(tree)) if getattr(node, "lineno", 0) > after]
    places = [(i, n) for i, node in nodes for n, _ in enumerate(changed(node))]
    random.Random(seed).shuffle(places)
    for place, number in places:
        whole = copy.deepcopy(tree)
        target = list(ast.walk(whole))[place]
        new = list(changed(target))[number]
        for parent in ast.walk(whole):
            for field, value in ast.iter_fields(parent):
                if value is target:
                    setattr(parent, field, new)
                elif isinstance(value, list) and any(item is target for item in value):
                    value[:] = [new if item is target else item for item in value]
        try:
            mutant = ast.unparse(ast.fix_missing_locations(whole))
        except (ValueError, TypeError, AttributeError):
            continue
        if mutant != ast.unparse(tree):
            yield mutant + "\n"


def holds(row: dict[str, Any], program: str) -> bool:
    """HumanEval's own rule, for a program of ours."""
    source = f"{program}\n{row['test']}\ncheck({row['entry_point']})\n"
    try:
        ran = subprocess.run(
            [sys.executable, "-I", "-c", source], capture_output=True, timeout=3.0, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return False
    return ran.returncode == 0


def rejected(row: dict[str, Any]) -> list[str]:
    """Five mutations of a canonical solution that HumanEval's rule rejects; of those, if it has fewer."""
    source = ast.unparse(ast.parse(row["prompt"] + row["canonical_solution"]))
    prompt = len(ast.unparse(ast.parse(row["prompt"] + "    pass")).splitlines()) - 1
    found: list[str] = []
    bases = [source]
    for number, base in enumerate(bases):
        for mutant in mutations(base, f"{row['task_id']} {number}", prompt):
            if len(found) == MUTANTS:
                return found
            if mutant not in found and not holds(row, mutant):
                found.append(mutant)
                bases.append(mutant)
    return found


def agreement(file: Path, workers: int) -> None:
    """Prints how the verifier judges canonical solutions and their mutations."""
    with gzip.open(file, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    tasks = [
        Task(id=row["task_id"], messages=(), source=f"{file}:{n}", fields=row)
        for n, row in enumerate(rows, 1)
    ]
    with ThreadPoolExecutor(workers) as threads:
        mutants = list(threads.map(rejected, rows))
    canonical = [(task, row["canonical_solution"]) for task, row in zip(tasks, rows, strict=True)]
    wrong = [(task, m) for task, found in zip(tasks, mutants, strict=True) for m in found]
    with Pool(workers=workers, deadline_s=600.0) as pool:
        begin = time.monotonic()
        verdicts = pool.judge(Code(), canonical)
        seconds = time.monotonic() - begin
        said = pool.judge(Code(), wrong)
    print(f"canonical solutions: {Counter(v.label for v in verdicts)}, {len(rows) / seconds:.1f} a second")
    print(f"mutations of them that HumanEval rejects: {len(wrong)}, {Counter(v.label for v in said)}")
    for (task, program), verdict in zip([*canonical, *wrong], [*verdicts, *said], strict=True):
        if (verdict.label == "PASS") != ((task, program) in canonical) or verdict.score is None:
            print(f"disagreement: {task.id}: {verdict.label}: {verdict.reason}\n{program}")


def speed(workers: int, count: int) -> None:
    """Prints how many short programs are judged a second, and how long the first takes."""
    cases = [{"stdin": "3 4\n", "stdout": "7\n"}]
    task = Task(id="sum", messages=(), source="here:1", fields={"kind": "stdio", "cases": cases})
    for level in LEVELS:
        if available()[level]:
            print(f"{level}: {available()[level]}")
            continue
        verifier = Code(level=level)
        with Pool(workers=workers, deadline_s=120.0) as pool:
            pool.judge(verifier, [(task, f"{SUM}# {n}") for n in range(4 * workers)])
            begin = time.monotonic()
            verdicts = pool.judge(verifier, [(task, f"{SUM}# again {n}") for n in range(count)])
            seconds = time.monotonic() - begin
        assert all(v.label == "PASS" for v in verdicts), Counter(v.label for v in verdicts)
        cold = [alone(level) for _ in range(3)]
        print(
            f"{level}: {count / seconds:.1f} programs a second with {workers} workers;"
            f" {1e3 * workers * seconds / count:.0f} ms each, the first of a process {1e3 * min(cold):.0f} ms"
        )


def alone(level: str) -> float:
    """Seconds for the first verdict of a process, when no interpreter waits yet."""
    program = (
        "import sys, time; from posttrain.types import Task\n"
        "from posttrain.verifiers.code.verifier import Code\n"
        "cases = [{'stdin': '3 4', 'stdout': '7'}]\n"
        "task = Task(id='s', messages=(), source='', fields={'kind': 'stdio', 'cases': cases})\n"
        "begin = time.monotonic()\n"
        "assert Code(level=sys.argv[1])(task, sys.argv[2]).score == 1\n"
        "print(time.monotonic() - begin)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, level, SUM], capture_output=True, text=True, check=True
    )
    return float(ran.stdout)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--humaneval", type=Path, help="HumanEval.jsonl.gz")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--count", type=int, default=200)
    chosen = parser.parse_args()
    speed(chosen.workers, chosen.count)
    if chosen.humaneval:
        agreement(chosen.humaneval, chosen.workers)
