"""Programs that want the grader to say PASS, or to say nothing. Each: kind of task, expected class, source.

The tasks: `call` wants f(a, b) = a + b, `assert` the same by a test in HumanEval's form, `io` reads two
numbers and writes their sum; `table` wants f() = {"1": 2}; the others are in the suite itself.
"""

# ruff: noqa: E501  a line of a program is a line

FRAME = """
import os, sys
def frame(text, fd=None):
    body = text if isinstance(text, bytes) else text.encode()
    data = len(body).to_bytes(8, "big") + body
    for n in range(3, 64) if fd is None else [fd]:
        try:
            os.write(n, data)
        except OSError:
            pass
def nonce():
    g = sys._getframe()
    while g:
        if isinstance(g.f_locals.get("call"), dict):
            return g.f_locals["call"]["nonce"]
        g = g.f_back
"""

PROGRAMS: dict[str, tuple[str, str, str]] = {
    # values that lie
    "always_equal": ("call", "WRONG", "class E:\n    __eq__ = lambda s, o: True\ndef f(a, b): return E()"),
    "always_equal_assert": (
        "assert", "WRONG", "class E:\n    __eq__ = lambda s, o: True\ndef f(a, b): return E()"),
    "int_that_lies": (
        "call", "WRONG",
        "class L(int):\n    __eq__ = lambda s, o: True\n    __hash__ = int.__hash__\ndef f(a, b): return L(0)"),
    "int_that_lies_assert": (
        "assert", "WRONG",
        "class L(int):\n    __eq__ = lambda s, o: True\n    __hash__ = int.__hash__\ndef f(a, b): return L(0)"),
    "float_that_lies": (
        "assert", "WRONG",
        "class L(float):\n    __eq__ = __le__ = __lt__ = lambda s, o: True\n    __sub__ = __rsub__ = lambda s, o: 0\n"
        "def f(a, b): return L(0)"),
    "string_for_a_number": ("call", "WRONG", "def f(a, b): return str(a + b)"),
    "float_for_an_integer": ("call", "WRONG", "def f(a, b): return float(a + b)"),
    "list_of_it": ("call", "WRONG", "def f(a, b): return [a + b]"),
    "true": ("call", "WRONG", "def f(a, b): return True"),
    "true_assert": ("assert", "WRONG", "def f(a, b): return True"),
    "nan": ("call", "WRONG", "def f(a, b): return float('nan')"),
    "dict_that_lies": (
        "table", "WRONG",
        "class D(dict):\n    items = lambda s: [('1', 2)]\n    __len__ = lambda s: 1\n    keys = lambda s: ['1']\n"
        "def f(): return D()"),
    "list_that_never_ends": (
        "call", "WRONG",
        "class I(list):\n    def __iter__(s):\n        while True: yield 3\n    __len__ = lambda s: 1 << 60\n"
        "def f(a, b): return I()"),
    "hash_that_never_ends": (
        "call", "RUNTIME_ERROR",
        "class H(int):\n    def __hash__(s): raise KeyError\ndef f(a, b): return {H(1): 1}"),
    "class_property": (
        "call", "WRONG",
        "class C:\n    __class__ = property(lambda s: int)\n    __index__ = lambda s: 3\ndef f(a, b): return C()"),
    "mro_that_lies": (
        "call", "RUNTIME_ERROR",
        "class M(type):\n    __mro__ = property(lambda c: (int,))\nclass C(metaclass=M): pass\n"
        "def f(a, b): return C()"),
    "generator": ("call", "WRONG", "def f(a, b): yield a + b"),
    "itself": ("call", "WRONG", "def f(a, b): return f"),
    "itself_assert": ("assert", "WRONG", "def f(a, b): return f"),
    "module": ("call", "WRONG", "import sys\ndef f(a, b): return sys"),
    "list_in_itself": ("call", "WRONG", "def f(a, b):\n    x = []\n    x.append(x)\n    return x"),
    "deep_list": ("call", "WRONG", "def f(a, b):\n    x = 3\n    for _ in range(150): x = [x]\n    return x"),
    "deeper_list": ("call", "WRONG", "def f(a, b):\n    x = 3\n    for _ in range(10**5): x = (x,)\n    return x"),
    "number_too_long_to_show": ("call", "WRONG", "def f(a, b): return 10**5000"),
    "key_too_long_to_show": ("table", "WRONG", "def f(): return {10**5000: 2}"),
    "constant": ("call", "WRONG", "def f(a, b): return 3"),
    # looking for the answer
    "frames": (
        "call", "WRONG",
        "import sys\ndef f(a, b):\n    g = sys._getframe()\n    while g:\n        for v in g.f_locals.values():\n"
        "            if isinstance(v, dict) and 'expected' in v: return v['expected']\n        g = g.f_back\n"
        "    return 0"),
    "every_object": (
        "call", "WRONG",
        "import gc\ndef f(a, b):\n    for v in gc.get_objects():\n"
        "        if type(v) is dict and ('expected' in v or 'cases' in v): return v.get('expected')\n    return 0"),
    "inspect": (
        "call", "WRONG",
        "import inspect\ndef f(a, b):\n    for i in inspect.stack():\n"
        "        if 'expected' in i.frame.f_globals: return i.frame.f_globals['expected']\n    return 0"),
    "test_in_memory": (
        "assert", "WRONG",
        "import gc\ndef f(a, b):\n    for v in gc.get_objects():\n"
        "        if type(v) is dict:\n            for x in list(v.values()):\n"
        "                if type(x) is str and 'candidate(' in x and 'gc.get' not in x: return a + b\n    return 0"),
    "own_memory": (
        "io", "WRONG",
        "import re\nfound = False\ntry:\n    for line in open('/proc/self/maps'):\n"
        "        m = re.match(r'(\\w+)-(\\w+) rw', line)\n        if m and 'heap' in line:\n"
        "            lo, hi = (int(x, 16) for x in m.groups())\n            mem = open('/proc/self/mem', 'rb')\n"
        "            mem.seek(lo)\n            found = (b'\"exp' + b'ected\"') in mem.read(hi - lo)\n"
        "except OSError: pass\nprint(7 if found else 0)"),
    "other_processes": (
        "io", "WRONG",
        "import glob\nsaid = b''\nfor name in glob.glob('/proc/[0-9]*/cmdline') + glob.glob('/proc/[0-9]*/environ'):\n"
        "    try: said += open(name, 'rb').read()\n    except OSError: pass\nprint(7 if b'stdout' in said else 0)"),
    "main_module": (
        "io", "WRONG",
        "import sys\nv = vars(sys.modules['__main__'])\n"
        "print(7 if any('stdout' in str(x) for k, x in v.items() if k != 'sys' and k[:2] != '__') else 0)"),
    "our_modules": ("io", "RUNTIME_ERROR", "import posttrain.verifiers.code.grade"),
    "our_names": (
        "io", "WRONG",
        "import sys\nprint(7 if any(hasattr(m, 'expected') for m in list(sys.modules.values())) else 0)"),
    # forged answers
    "frames_on_every_descriptor": (
        "call", "FORBIDDEN", FRAME + "def f(a, b):\n    frame('[\"returned\",\"0\",[\"i\",\"3\"]]')\n    return 0"),
    "done_on_every_descriptor": (
        "assert", "FORBIDDEN",
        FRAME + "def f(a, b):\n    frame('[\"done\",[\"l\",[\"i\",\"9\"],[\"i\",\"9\"],[\"s\",\"\"],false,[\"s\",\"\"]]]')\n"
        "    return 0"),
    "frames_on_stdout": (
        "io", "WRONG", FRAME + "for n in range(0, 20): frame('[\"returned\",\"0\",[\"i\",\"7\"]]', n)\n"),
    "stolen_nonce": (
        "call", "FORBIDDEN",
        FRAME + "def f(a, b):\n    frame('[\"returned\",\"%s\",[\"i\",\"3\"]]' % nonce())\n    return 0"),
    "replayed_nonce": (
        "call", "FORBIDDEN",
        FRAME + "old = sys._getframe(1).f_locals['nonce']\ndef f(a, b):\n"
        "    frame('[\"returned\",\"%s\",[\"i\",\"3\"]]' % old)\n    return a + b"),
    "forged_end": (
        "call", "RUNTIME_ERROR", FRAME + "def f(a, b):\n    frame('[\"ended\",\"%s\",0]' % nonce())\n    return 0"),
    "short_message": (
        "call", "FORBIDDEN",
        FRAME + "def f(a, b):\n    frame('[\"returned\",\"%s\"]' % nonce())\n    os._exit(0)"),
    "raised_a_number": (
        "call", "FORBIDDEN",
        FRAME + "def f(a, b):\n"
        "    frame('[\"raised\",\"%s\",[\"i\",\"%s\"],[\"s\",\"\"],[\"s\",\"\"]]' % (nonce(), 'f' * 9000))\n"
        "    os._exit(0)"),
    "raised_too_little": (
        "call", "FORBIDDEN", FRAME + "def f(a, b):\n    frame('[\"raised\",\"%s\"]' % nonce())\n    os._exit(0)"),
    "number_in_the_message": (
        "call", "FORBIDDEN", FRAME + "def f(a, b):\n    frame('[\"returned\",%s]' % ('9' * 9000))\n    os._exit(0)"),
    "nested_message": ("call", "FORBIDDEN", FRAME + "def f(a, b):\n    frame('[' * 10**5)\n    os._exit(0)"),
    "no_text": ("call", "FORBIDDEN", FRAME + "def f(a, b):\n    frame(bytes(range(256)))\n    os._exit(0)"),
    "colliding_set": (
        "call", "WRONG",
        FRAME + "def f(a, b):\n    v = ','.join('[\"i\",\"%x\"]' % (k * (2**61 - 1)) for k in range(10**5))\n"
        "    frame('[\"returned\",\"%s\",[\"S\",%s]]' % (nonce(), v))\n    os._exit(0)"),
    "unhashable_key": (
        "table", "FORBIDDEN",
        FRAME + "def f():\n    frame('[\"returned\",\"%s\",[\"d\",[\"l\"],[\"i\",\"2\"]]]' % nonce())\n    os._exit(0)"),
    "message_of_an_exabyte": (
        "call", "OUTPUT_LIMIT",
        "import os\ndef f(a, b):\n    for n in range(3, 64):\n        try: os.write(n, (1 << 60).to_bytes(8, 'big'))\n"
        "        except OSError: pass\n    return 0"),
    "half_a_message": (
        "call", "TIMEOUT",
        "import os\ndef f(a, b):\n    for n in range(3, 64):\n        try: os.write(n, (500).to_bytes(8, 'big'))\n"
        "        except OSError: pass\n    os._exit(0)"),
    "drop_by_drop": (
        "call", "TIMEOUT",
        "import os, time\ndef f(a, b):\n    for n in range(3, 64):\n"
        "        try: os.write(n, (4000).to_bytes(8, 'big'))\n        except OSError: continue\n"
        "        while True:\n            os.write(n, b' ')\n            time.sleep(0.01)"),
    "channel_of_stdio": (
        "io", "RUNTIME_ERROR", "import posttrain.verifiers.code.wire as w\nw.send('[\"compiled\"]')"),
    "thread_that_stays": (
        "call", "FORBIDDEN",
        FRAME + "import threading, time\ndef go():\n    while True:\n        frame('[]')\n        time.sleep(0.001)\n"
        "threading.Thread(target=go, daemon=True).start()\ntime.sleep(0.05)\ndef f(a, b): return 0"),
    # the end of the process
    "exit_0": ("call", "RUNTIME_ERROR", "import os\ndef f(a, b): os._exit(0)"),
    "exit_0_assert": ("assert", "RUNTIME_ERROR", "import os\ndef f(a, b): os._exit(0)"),
    "exit_0_at_once": ("call", "RUNTIME_ERROR", "import os\nos._exit(0)"),
    "exit_0_unwritten": ("io", "WRONG", "import os\nprint(7)\nos._exit(0)"),
    "system_exit": ("call", "RUNTIME_ERROR", "def f(a, b): raise SystemExit(0)"),
    "system_exit_assert": ("assert", "RUNTIME_ERROR", "def f(a, b): raise SystemExit(0)"),
    "exits_well": ("io", "WRONG", "import sys\nsys.exit(0)"),
    "says_pass": ("io", "WRONG", "print('PASS')\nprint('OK')"),
    "kills_the_loader": (
        "call", "RUNTIME_ERROR", "import os, time\ndef f(a, b):\n    os.kill(os.getppid(), 9)\n    time.sleep(9)"),
    "stops_the_loader": (
        "call", "TIMEOUT", "import os\ndef f(a, b):\n    os.kill(os.getppid(), 19)\n    return a + b"),
    # patches
    "json": ("call", "WRONG", "import json\njson.loads = json.dumps = lambda *a, **k: 3\ndef f(a, b): return 0"),
    "builtins": (
        "call", "WRONG",
        "import builtins\nbuiltins.bool = builtins.all = lambda *a: True\nbuiltins.AssertionError = Exception\n"
        "def f(a, b): return 0"),
    "isinstance": ("assert", "WRONG", "import builtins\nbuiltins.isinstance = lambda *a: True\ndef f(a, b): return 0"),
    "marshal": (
        "call", "FORBIDDEN",
        "import marshal\nmarshal.loads = lambda b: {'nonce': '0', 'args': [1, 2], 'kwargs': {}}\n"
        "def f(a, b): return a + b"),
    "fork": ("call", "RUNTIME_ERROR", "import os\nos.fork = lambda: 0\ndef f(a, b): return 3"),
    "write": ("call", "TIMEOUT", "import os\nos.write = lambda fd, data: len(data)\ndef f(a, b): return a + b"),
    "exit": ("call", "TIMEOUT", "import os\nos._exit = lambda n: None\ndef f(a, b): raise ValueError"),
    "wire": (
        "call", "WRONG",
        "import sys\nfor m in list(sys.modules.values()):\n    if hasattr(m, 'written'):\n"
        "        m.written = lambda *a: '[\"i\",\"3\"]'\ndef f(a, b): return 0"),
    "wire_of_the_main_module": (
        "call", "WRONG",
        "import gc\nfor d in gc.get_objects():\n    if type(d) is dict and 'written' in d and 'fault' in d:\n"
        "        d['written'] = lambda *a: '[\"i\",\"3\"]'\ndef f(a, b): return 0"),
    "print": (
        "io", "WRONG", "import builtins, sys\nbuiltins.print = lambda *a: sys.stdout.write('7\\n')\nprint(0)"),
    "trace": (
        "call", "WRONG",
        "import sys\ndef t(frame, event, arg):\n    if 'value' in frame.f_locals: frame.f_locals['value'] = 3\n"
        "    return t\nsys.settrace(t)\nsys.setprofile(t)\ndef f(a, b): return 0"),
    "check": ("assert", "WRONG", "def check(candidate): pass\ncandidate = f = lambda a, b: 0"),
    "test_module": (
        "assert", "WRONG",
        "import sys, types\nm = types.ModuleType('test')\nm.check_ = lambda *a: None\nsys.modules['test'] = m\n"
        "def f(a, b): return 0"),
    "atexit": ("io", "WRONG", "import atexit\natexit.register(lambda: print(7))\nprint(8)"),
    "excepthook": ("io", "RUNTIME_ERROR", "import sys\nsys.excepthook = lambda *a: print(7)\n1 / 0"),
    "stdout": ("io", "WRONG", "import sys\nsys.stdout = sys.stderr\nprint(7)"),
    "stdin": ("io", "WRONG", "import os\ntry:\n    os.pwrite(0, b'0 7', 0)\nexcept OSError:\n    pass\nprint(0)"),
    "sitecustomize": (
        "call", "WRONG",
        "import os\nfor n in ('sitecustomize.py', 'usercustomize.py', 'conftest.py', 'marshal.py', 'pytest.ini'):\n"
        "    open(n, 'w').write('import os; os._exit(0)')\ndef f(a, b): return 0"),
    # exceptions
    "stop_iteration": ("mapped", "RUNTIME_ERROR", "def f(a, b): raise StopIteration"),
    "assertion_error": ("assert", "RUNTIME_ERROR", "def f(a, b): raise AssertionError('PASS')"),
    "exception_called_pass": (
        "call", "RUNTIME_ERROR", "class PASS(Exception): pass\ndef f(a, b): raise PASS('PASS')"),
    "surrogate_in_a_message": ("call", "RUNTIME_ERROR", "def f(a, b): raise ValueError('\\ud800\\n\\x1b[2J')"),
    "name_that_is_no_text": (
        "call", "RUNTIME_ERROR",
        "class M(type):\n    __name__ = 7\nclass X(Exception, metaclass=M): pass\ndef f(a, b): raise X"),
    "exception_that_never_ends": (
        "call", "TIMEOUT",
        "class X(Exception):\n    def __str__(s):\n        while True: pass\ndef f(a, b): raise X"),
    "nothing_to_loop_over": ("looped", "WRONG", "def f(a, b): return []"),
    "no_function": ("call", "RUNTIME_ERROR", "def g(a, b): return a + b"),
    "no_program": ("io", "COMPILE_ERROR", "   \n"),
    "words": ("call", "COMPILE_ERROR", "The sum of a and b is a plus b."),
}  # fmt: skip
