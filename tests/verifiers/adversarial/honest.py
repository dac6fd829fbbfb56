"""Right programs that do it in some odd way. Each: kind of task, source; all must PASS, but for `REFUSED`."""

# ruff: noqa: E501  a line of a program is a line

PROGRAMS: dict[str, tuple[str, str]] = {
    "exits_after_the_answer": ("io", "import sys\nprint(sum(map(int, input().split())))\nsys.exit(0)"),
    "exits_with_none": ("io", "import sys\nprint(sum(map(int, input().split())))\nsys.exit(None)"),
    "exit_of_site": ("io", "print(sum(map(int, input().split())))\nexit()"),
    "quit_of_site": ("io", "print(sum(map(int, input().split())))\nquit()\nprint(0)"),
    "open_0": ("io", "print(sum(map(int, open(0).read().split())))"),
    "dev_stdin": ("io", "print(sum(map(int, open('/dev/stdin').read().split())))"),
    "read_bytes": ("io", "import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))"),
    "os_read": ("io", "import os\nos.write(1, b'%d\\n' % sum(map(int, os.read(0, 999).split())))"),
    "input_until_the_end": (
        "io",
        "n = 0\nwhile True:\n    try: n += sum(map(int, input().split()))\n    except EOFError: break\nprint(n)"),
    "lines_of_stdin": ("io", "import sys\nprint(sum(int(x) for line in sys.stdin for x in line.split()))"),
    "no_new_line": ("io", "print(sum(map(int, input().split())), end='')"),
    "carriage_returns": ("io", "import sys\nsys.stdout.write(f'{sum(map(int, input().split()))}\\r\\n')"),
    "blanks_after": ("io", "print(sum(map(int, input().split())), '  \\n\\n')"),
    "main_guard": ("io", "def main(): print(sum(map(int, input().split())))\nif __name__ == '__main__': main()"),
    "called_result": ("io", "def result(a, b): return a + b\nprint(result(*map(int, input().split())))"),
    "stderr": ("io", "import sys\nprint('debug', file=sys.stderr)\nprint(sum(map(int, input().split())))"),
    "warnings": ("io", "import warnings\nwarnings.warn('x')\nprint(sum(map(int, input().split())))"),
    "logging": ("io", "import logging\nlogging.warning('x')\nprint(sum(map(int, input().split())))"),
    "threads": (
        "io",
        "import threading\na, b = map(int, input().split())\nt = threading.Thread(target=lambda: print(a + b))\n"
        "t.start()\nt.join()"),
    "thread_not_joined": (
        "io",
        "import threading, time\na, b = map(int, input().split())\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print(a + b))).start()"),
    "pool_of_threads": (
        "io",
        "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(4) as p:\n"
        "    print(sum(p.map(int, input().split())))"),
    "thread_with_a_stack": (
        "io",
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 26)\n"
        "def r(n): return 0 if n == 0 else 1 + r(n - 1)\na, b = map(int, input().split())\n"
        "t = threading.Thread(target=lambda: print(a + b + r(30000) - 30000))\nt.start()\nt.join()"),
    "two_processes": (
        "io",
        "import multiprocessing as m\ndef go(c, a, b): c.send(a + b)\nif __name__ == '__main__':\n"
        "    m.set_start_method('fork')\n    mine, theirs = m.Pipe()\n"
        "    p = m.Process(target=go, args=(theirs, *map(int, input().split())))\n    p.start()\n"
        "    print(mine.recv())\n    p.join()"),
    "pool_of_processes": (
        "io",
        "import multiprocessing as m\nif __name__ == '__main__':\n    with m.get_context('fork').Pool(2) as p:\n"
        "        print(sum(p.map(int, input().split())))"),
    "program_of_its_own": (
        "io",
        "import subprocess, sys\nprint(subprocess.run([sys.executable, '-c', 'print(sum(map(int, input().split())))'],"
        " capture_output=True, text=True, input=input()).stdout)"),
    "session_of_its_own": (
        "io",
        "import subprocess\nsubprocess.run(['true'], start_new_session=True, check=True)\n"
        "print(sum(map(int, input().split())))"),
    "asyncio": (
        "io",
        "import asyncio\nasync def main():\n    await asyncio.sleep(0.01)\n    print(sum(map(int, input().split())))\n"
        "asyncio.run(main())"),
    "files": (
        "io",
        "import tempfile\nwith tempfile.NamedTemporaryFile('w+') as f:\n    f.write(input())\n    f.seek(0)\n"
        "    print(sum(map(int, f.read().split())))\nopen('x', 'w').write('y')"),
    "deep_recursion": (
        "io",
        "import sys\nsys.setrecursionlimit(20000)\ndef r(n): return 0 if n == 0 else 1 + r(n - 1)\n"
        "print(sum(map(int, input().split())) + r(15000) - 15000)"),
    "heavy": (
        "io", "n = 0\nfor i in range(3 * 10**6): n ^= i\nprint(sum(map(int, input().split())) + n - n)"),
    "much_memory": ("io", "x = bytearray(200 << 20)\nprint(sum(map(int, input().split())))"),
    "pickle": (
        "io",
        "import dataclasses, pickle\n@dataclasses.dataclass\nclass P:\n    a: int\n    b: int\n"
        "p = pickle.loads(pickle.dumps(P(*map(int, input().split()))))\nprint(p.a + p.b)"),
    "globals": ("io", "def add():\n    global n\n    n = sum(map(int, input().split()))\nadd()\nprint(globals()['n'])"),
    "catches_all": ("io", "try:\n    print(sum(map(int, input().split())))\n    1 / 0\nexcept: pass"),
    "closes_stdout": ("io", "import sys\nprint(sum(map(int, input().split())))\nsys.stdout.close()"),
    "atexit": ("io", "import atexit\na, b = map(int, input().split())\natexit.register(lambda: print(a + b))"),
    "much_output": ("much", "print('\\n'.join(str(n) for n in range(140000)))"),
    "much_output_by_line": ("much", "for n in range(140000): print(n)"),
    "long_number": ("long", "import sys\nsys.set_int_max_str_digits(0)\nprint(10**4999 + 7)"),
    "unicode": ("unicode", "print(input()[::-1])"),
    "float": ("float", "print(0.1 + 0.2)"),
    "float_formatted": ("float", "print(f'{0.3:.9f}')"),
    "called": ("call", "def f(a, b): return a + b"),
    "lambda": ("call", "f = lambda a, b: a + b"),
    "prints": ("call", "def f(a, b):\n    print('debug')\n    return a + b"),
    "reads_input": ("call", "import sys\nx = sys.stdin.read()\ndef f(a, b): return a + b"),
    "runs_itself": ("call", "def f(a, b): return a + b\nif __name__ == '__main__':\n    print(f(1, 2))\n    input()"),
    "helper_called_result": ("call", "def result(a, b): return a + b\ndef f(a, b): return result(a, b)"),
    "subclass_of_int": ("call", "import enum\nclass E(enum.IntEnum):\n    A = 3\n    B = 10\ndef f(a, b): return E(a + b)"),
    "cached": ("call", "import functools\n@functools.lru_cache\ndef f(a, b): return a + b"),
    "partial": ("call", "import functools, operator\nf = functools.partial(operator.add)"),
    "object_that_can_be_called": ("call", "class F:\n    def __call__(s, a, b): return a + b\nf = F()"),
    "method": ("method", "class Solution:\n    def add(self, a, b): return a + b"),
    "static_method": ("method", "class Solution:\n    @staticmethod\n    def add(a, b): return a + b"),
    "default_that_changes": ("call", "def f(a, b, seen=[]):\n    seen.append(a)\n    return a + b + len(seen) - 1"),
    "counter": ("table", "from collections import Counter\ndef f(): return Counter(['1', '1'])"),
    "ordered": ("table", "from collections import OrderedDict\ndef f(): return OrderedDict([('1', 2)])"),
    "defaultdict": (
        "table", "from collections import defaultdict\ndef f():\n    d = defaultdict(int)\n    d['1'] += 2\n    return d"),
    "number_for_a_key": ("table", "def f(): return {1: 2}"),
    "tuple": ("pair", "def f(): return 1, [2, 'x']"),
    "named_tuple": (
        "pair", "from collections import namedtuple\nP = namedtuple('P', 'a b')\ndef f(): return P(1, (2, 'x'))"),
    "body": ("assert", "    return a + b\n"),
    "body_that_uses_the_prompt": ("assert", "    return plus(a, b)\n"),
    "whole": ("assert", "def f(a, b):\n    return a + b\n"),
    "whole_that_uses_the_prompt": ("assert", "def f(a: int, b: int) -> int:\n    return plus(a, b)\n"),
    "future": ("assert", "from __future__ import annotations\ndef f(a: Any, b) -> Thing:\n    return a + b\n"),
    "raises_what_is_expected": ("raises", "def f(a, b): raise ValueError('no')"),
    "raises_a_subclass": ("raises", "class Bad(ValueError): pass\ndef f(a, b): raise Bad('no')"),
    "raises_with_other_arguments": ("raises", "def f(a, b): '\\ud800'.encode()"),
    "set_of_sets": ("sets", "def f(a, b): return {frozenset({a}), frozenset({b})}"),
}  # fmt: skip

REFUSED = {"pool_of_processes": {"landlock": "FORBIDDEN"}}
"""Semaphores lie in /dev/shm, which all programs of a host share unless they have mounts of their own."""
