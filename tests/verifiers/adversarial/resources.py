"""Programs that take more than they may. Each: kind of task, expected class (or one for each level), source."""

# ruff: noqa: E501  a line of a program is a line

PROGRAMS: dict[str, tuple[str, str | dict[str, str], str]] = {
    "fork_bomb": (
        "io", "TIMEOUT", "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"),
    "fork_bomb_that_moves": (
        "io", "TIMEOUT",
        "import os, time\nif os.fork():\n    time.sleep(99)\nwhile True:\n    try:\n        if os.fork(): os._exit(0)\n"
        "    except OSError: pass"),
    "thread_bomb": (
        "io", "RUNTIME_ERROR",
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,), daemon=True).start()"),
    "list": ("io", "MEMORY", "x = [0] * 10**9"),
    "bytes": ("io", "MEMORY", "x = b''\nwhile True: x += bytes(1 << 24)"),
    "list_called": ("call", "MEMORY", "def f(a, b): return [0] * 10**9"),
    "list_loaded": ("call", "MEMORY", "x = [0] * 10**9\ndef f(a, b): return a + b"),
    "mmap": ("io", "MEMORY", "import mmap\nmmap.mmap(-1, 1 << 30)"),
    "number": ("io", "MEMORY|TIMEOUT", "x = 1 << (1 << 33)"),
    "text": ("io", "MEMORY", "x = 'x' * (1 << 33)"),
    "processes": (
        "io", {"strict": "MEMORY", "landlock": "WRONG", "rlimits": "WRONG"},
        "import os, time\nfor _ in range(5):\n    if not os.fork():\n        x = bytearray(b'x') * (150 << 20)\n"
        "        time.sleep(0.3)\n        os._exit(0)\nfor _ in range(5): os.wait()\nprint(0)"),
    "shared_memory": (
        "io", {"strict": "RUNTIME_ERROR", "landlock": "FORBIDDEN", "rlimits": "RUNTIME_ERROR"},
        "import os\nf = open('/dev/shm/posttrain-test', 'wb')\nos.unlink('/dev/shm/posttrain-test')\n"
        "while True: f.write(bytes(1 << 22))"),
    "one_file": ("io", "RUNTIME_ERROR", "f = open('x', 'wb')\nwhile True: f.write(bytes(1 << 22))"),
    "files": (
        "io", {"strict": "RUNTIME_ERROR", "landlock": "WRONG", "rlimits": "WRONG"},
        "for n in range(4): open(f'x{n}', 'wb').write(bytes(20 << 20))\nprint(0)"),
    "small_files": ("io", "WRONG", "for n in range(3000): open(f'x{n}', 'w')\nprint(0)"),
    "deep_directories": (
        "io", "WRONG",
        "import os\nfor _ in range(1100):\n    os.mkdir('d')\n    os.chdir('d')\nos.mkdir('locked', 0)\nprint(0)"),
    "descriptors": ("io", "RUNTIME_ERROR", "x = [open('/dev/null') for _ in range(10**4)]"),
    "stdout": ("io", "OUTPUT_LIMIT", "while True: print('x' * 10**5)"),
    "stderr": ("io", "OUTPUT_LIMIT", "import sys\nwhile True: print('x' * 10**5, file=sys.stderr)"),
    "long_message": ("io", "OUTPUT_LIMIT", "raise ValueError('x' * 10**7)"),
    "long_text": ("call", "OUTPUT_LIMIT", "def f(a, b): return 'x' * (3 << 20)"),
    "long_list": ("call", "OUTPUT_LIMIT", "def f(a, b): return [0] * (1 << 19)"),
    "long_list_assert": ("assert", "OUTPUT_LIMIT", "def f(a, b): return [0] * (1 << 19)"),
    "list_of_itself": ("call", "TIMEOUT|MEMORY", "def f(a, b):\n    x = []\n    for _ in range(99): x = [x, x]\n    return x"),
    "sleep": ("io", "TIMEOUT", "import time\ntime.sleep(99)"),
    "sleep_loaded": ("call", "TIMEOUT", "import time\ntime.sleep(99)"),
    "sleep_assert": ("assert", "TIMEOUT", "import time\ndef f(a, b): time.sleep(99)"),
    "loop": ("io", "TIMEOUT", "while True: pass"),
    "loop_called": ("call", "TIMEOUT", "def f(a, b):\n    while True: pass"),
    "loop_in_c": ("io", "TIMEOUT", "sum(range(10**11))"),
    "regex": ("io", "TIMEOUT", "import re\nre.match(r'(a+)+$', 'a' * 60 + 'b')"),
    "power": ("call", "TIMEOUT|MEMORY", "def f(a, b): return pow(3, 10**9)"),
    "loop_in_threads": (
        "io", "TIMEOUT",
        "import threading\ndef go():\n    while True: pass\nfor _ in range(4): threading.Thread(target=go).start()"),
    "loop_in_processes": (
        "io", "TIMEOUT", "import os\nfor _ in range(3): os.fork()\nwhile True: pass"),
    "stops_itself": ("io", "TIMEOUT", "import os\nos.kill(os.getpid(), 19)"),
    "ignores_signals": (
        "io", "TIMEOUT",
        "import signal\nfor n in (1, 2, 3, 15, 24): signal.signal(n, signal.SIG_IGN)\nwhile True: pass"),
    "closes_all": ("io", "TIMEOUT", "import os, time\nos.closerange(0, 256)\ntime.sleep(99)"),
    "waits_for_input": ("io", "RUNTIME_ERROR", "while True: input()"),
    "zombies": (
        "io", "WRONG", "import os\nfor _ in range(20):\n    if not os.fork(): os._exit(0)\nprint(0)"),
    "recursion": ("io", "RUNTIME_ERROR", "def r(n): return r(n + 1)\nr(0)"),
    "recursion_without_limit": (
        "call", "MEMORY|RUNTIME_ERROR|TIMEOUT",
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(a, b): return f(a, b + 1)"),
    "crash": ("io", "RUNTIME_ERROR", "import ctypes\nctypes.string_at(0)"),
    "crash_called": ("call", "RUNTIME_ERROR", "import ctypes\ndef f(a, b): ctypes.string_at(0)"),
    "brackets": ("io", "COMPILE_ERROR", "(" * 10**5),
    "brackets_closed": ("call", "COMPILE_ERROR", "x = " + "[" * 10**5 + "]" * 10**5),
    "minus": ("call", "COMPILE_ERROR", "x = " + "-" * 10**5 + "1"),
    "dots": ("assert", "COMPILE_ERROR", "x = a" + ".b" * 10**5),
    "powers": ("io", "MEMORY|TIMEOUT|COMPILE_ERROR", "x = 9**9**9**9"),
    "null_character": ("io", "COMPILE_ERROR", "print(7)\0"),
    "surrogate": ("io", "COMPILE_ERROR", "print('\ud800')"),
}  # fmt: skip
