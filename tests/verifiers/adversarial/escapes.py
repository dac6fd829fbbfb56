"""Programs that reach for the host. Each lists `attempts`; the suite adds that it writes the right sum if all fail.

So PASS means that every attempt was refused. None means that the level promises nothing there, and
the suite only looks at the host afterwards; "-" that the program would harm a host at that level.
SECRET, SOURCE, ABSTRACT, SOCKET, DATAGRAM and SENTINEL stand for what the suite has put on the host: a file
that everyone may read, our own source, three sockets that listen, and a process.
"""

# ruff: noqa: E501  a line of a program is a line

AFTER = """
import sys
def refused(attempt):
    try:
        attempt()
    except (Exception, SystemExit):
        return True
    return False
print(sum(map(int, sys.stdin.read().split())) if all([refused(a) for a in attempts]) else "escaped")
"""

CALLS = """
import ctypes, os, platform, socket
libc = ctypes.CDLL(None, use_errno=True)
ARM = platform.machine() == "aarch64"
def call(name, *args):
    if getattr(libc, name)(*args) < 0:
        raise OSError(ctypes.get_errno(), name)
def number(x86, arm, *args):
    if libc.syscall(arm if ARM else x86, *args) < 0:
        raise OSError(ctypes.get_errno(), "syscall")
def read(*names):
    for name in names:
        if open(name, "rb").read(1 << 16): return
    raise OSError
"""

ALL = {"strict": "PASS", "landlock": "PASS", "rlimits": "PASS"}
HELD = {"strict": "PASS", "landlock": "PASS", "rlimits": None}
STRICT = {"strict": "PASS", "landlock": None, "rlimits": None}

ATTEMPTS: dict[str, tuple[dict[str, str | None], str]] = {
    "inet": (HELD, "[lambda k=k: socket.socket(socket.AF_INET, k) for k in (1, 2, 3)]"),
    "inet6": (HELD, "[lambda k=k: socket.socket(socket.AF_INET6, k) for k in (1, 2, 3)]"),
    "netlink": (HELD, "[lambda: socket.socket(16, 3, 0)]"),
    "packet": (HELD, "[lambda: socket.socket(17, 3, 0)]"),
    "vsock": (HELD, "[lambda: socket.socket(40, 1, 0)]"),
    "alg": (HELD, "[lambda: socket.socket(38, 5, 0)]"),
    "every_family": (HELD, "[lambda n=n: socket.socket(n, 1) for n in range(2, 46)]"),
    "name_look_up": (ALL, "[lambda: socket.getaddrinfo('example.com', 80)]"),
    "abstract_socket": (HELD, "[lambda: socket.socket(socket.AF_UNIX).connect(ABSTRACT)]"),
    "path_socket": (HELD, "[lambda: socket.socket(socket.AF_UNIX).connect(SOCKET)]"),
    "datagram_pair": (
        HELD, "[lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', DATAGRAM)]"),
    "ptrace": (HELD, "[lambda: call('ptrace', 0, 0, 0, 0), lambda: call('ptrace', 16, os.getppid(), 0, 0)]"),
    "memory_of_others": (
        HELD,
        "[lambda: number(310, 270, os.getppid(), 0, 0, 0, 0, 0), lambda: number(311, 271, 1, 0, 0, 0, 0, 0),\n"
        " lambda: open('/proc/1/mem', 'rb').read(1), lambda: open(f'/proc/{os.getppid()}/mem', 'r+b')]"),
    "own_memory_by_proc": (HELD, "[lambda: open('/proc/self/mem', 'r+b')]"),
    "proc_sys": (
        HELD,
        "[lambda n=n: open(f'/proc/{n}', 'w') for n in ('sys/kernel/hostname', 'sys/kernel/core_pattern',\n"
        " 'sys/vm/drop_caches', 'sysrq-trigger', 'sys/kernel/ns_last_pid', 'sys/fs/file-max', 'kcore')]"),
    "proc_of_the_host": (HELD, "[lambda: read(f'/proc/{SENTINEL}/cmdline')]"),
    "mount": (ALL, "[lambda: call('mount', b'x', b'/tmp', b'tmpfs', 0, 0), lambda: call('umount2', b'/proc', 2)]"),
    "new_mount_calls": (
        HELD, "[lambda: number(428, 428, -100, b'/', 0), lambda: number(430, 430, b'tmpfs', 0),\n"
        " lambda: number(442, 442, -100, b'/', 0, 0, 0)]"),
    "unshare": (HELD, "[lambda n=n: call('unshare', n) for n in (0x10000000, 0x20000, 0x40000000, 0x20000000)]"),
    "clone_into_namespaces": (HELD, "[lambda: number(56, 220, 0x10000000 | 17, 0, 0, 0, 0)]"),
    "clone3": (HELD, "[lambda: number(435, 435, bytes(88), 88)]"),
    "setns": (ALL, "[lambda: call('setns', os.open('/proc/1/ns/mnt', 0), 0)]"),
    "root": (
        ALL,
        "[lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.setgroups([0]), lambda: os.setresuid(0, 0, 0),\n"
        " lambda: os.chroot('/'), lambda: os.chown('/tmp', 0, 0)]"),
    "devices": (
        ALL,
        "[lambda: os.mknod('d', 0o20666, os.makedev(1, 3)), lambda: os.mknod('b', 0o60666, os.makedev(8, 0)),\n"
        " *[lambda n=n: open('/dev/' + n, 'rb').read(1) for n in ('mem', 'kmsg', 'port', 'vda', 'sda', 'fuse')]]"),
    "terminal": (ALL, "[lambda: os.open('/dev/tty', os.O_RDWR), lambda: os.open('/dev/console', os.O_RDWR)]"),
    "io_uring": (HELD, "[lambda: number(425, 425, 8, ctypes.create_string_buffer(240))]"),
    "bpf": (HELD, "[lambda: number(321, 280, 0, bytes(72), 72)]"),
    "keys": (
        HELD, "[lambda: number(248, 217, b'user', b'posttrain', b'x', 1, -3), lambda: number(250, 219, 0, -3, 1)]"),
    "perf": (HELD, "[lambda: number(298, 241, bytes([1, 0, 0, 0, 112]) + bytes(107), 0, -1, -1, 0)]"),
    "userfaultfd": (HELD, "[lambda: number(323, 282, 1)]"),
    "handles": (ALL, "[lambda: number(304, 265, -100, bytes(32), 0)]"),
    "modules": (ALL, "[lambda: number(313, 273, 0, b'', 0), lambda: number(246, 104, 0, 0, 0, 0)]"),
    "clock": (ALL, "[lambda: __import__('time').clock_settime(0, 0)]"),
    "personality": (HELD, "[lambda: call('personality', 0x0040000)]"),
    "kill_the_host": (ALL, "[lambda n=n: os.kill(SENTINEL, n) for n in (0, 9, 19)]"),
    "kill_all": (STRICT, "[lambda: os.kill(-1, 15)]"),
    "limits_of_the_host": (
        ALL, "[lambda: __import__('resource').prlimit(SENTINEL, 0, (1, 1)), lambda: os.setpriority(0, SENTINEL, 19)]"),
    "limits_of_the_parent": (
        {"strict": None, "landlock": "PASS", "rlimits": None},
        "[lambda: __import__('resource').prlimit(os.getppid(), 0, (1, 1))]"),
    "kill_the_parent": (
        {"strict": None, "landlock": "PASS", "rlimits": None}, "[lambda: os.kill(os.getppid(), 9)]"),
    "stop_the_parent": (
        {"strict": None, "landlock": "PASS", "rlimits": None}, "[lambda: os.kill(os.getppid(), 19)]"),
    "shared_memory_that_stays": (
        {"strict": None, "landlock": "PASS", "rlimits": "-"},
        "[lambda: number(29, 194, 0x70747472, 1 << 20, 0o1666), lambda: number(64, 190, 0x70747472, 1, 0o1666),\n"
        " lambda: number(68, 186, 0x70747472, 0o1666)]"),
    "secrets": (ALL, "[lambda: read('/etc/shadow'), lambda: os.listdir('/root'), lambda: read('/root/.bashrc')]"),
    "file_of_the_host": (HELD, "[lambda: read(SECRET), lambda: os.listdir(os.path.dirname(SECRET))]"),
    "file_by_a_link": (
        HELD, "[lambda: (os.symlink(SECRET, 's'), read('s')), lambda: os.link(SECRET, 'h'), lambda: read('/etc/passwd')]"),
    "file_by_another_way": (HELD, "[lambda: read('/proc/self/root' + SECRET), lambda: read('/proc/1/root' + SECRET)]"),
    "our_source": (HELD, "[lambda: read(SOURCE)]"),
    "write_to_the_host": (
        ALL,
        "[lambda n=n: open(n, 'w') for n in ('/x', '/usr/x', '/etc/x', '/bin/x', SECRET, os.__file__, '/root/x')]"),
    "write_beside": ({"strict": "PASS", "landlock": "PASS", "rlimits": "-"}, "[lambda: open(os.path.dirname(SECRET) + '/new', 'w'), lambda: os.mkdir('/var/tmp/x')]"),
    "prefix": (ALL, "[lambda: open(os.path.dirname(os.__file__) + '/x.py', 'w'), lambda: os.mkdir(os.path.dirname(os.__file__) + '/d')]"),
    "environment": (
        ALL,
        "[lambda: 1 / len(set(os.environ) - {'PATH', 'HOME', 'TMPDIR', 'LANG', 'PYTHONHASHSEED', 'LC_CTYPE', 'PWD'})]"),
    "descriptors": (ALL, "[lambda n=n: os.fstat(n) for n in range(3, 1024)]"),
    "other_processes": (STRICT, "[lambda: 1 / (len([n for n in os.listdir('/proc') if n.isdigit()]) > 3)]"),
    "host_name": (STRICT, "[lambda: 1 / (socket.gethostname() != 'box')]"),
    "interfaces": (STRICT, "[lambda: 1 / (len(open('/proc/net/dev').read().splitlines()) > 3)]"),
    "mounts": (STRICT, "[lambda: 1 / ('/root' in open('/proc/self/mounts').read())]"),
}  # fmt: skip

PROGRAMS: dict[str, tuple[str, dict[str, str | None], str]] = {
    **{
        name: ("io", expected, f"{CALLS}attempts = {attempts}\n{AFTER}")
        for name, (expected, attempts) in ATTEMPTS.items()
    },
    "double_fork": (
        "io", ALL,
        "import os, time\nif not os.fork():\n    os.setsid()\n    if not os.fork(): time.sleep(1000)\n    os._exit(0)\n"
        "os.wait()\nprint(sum(map(int, open(0).read().split())))"),
    "double_fork_called": (
        "call", ALL,
        "import os, time\ndef f(a, b):\n    if not os.fork():\n        os.setsid()\n        if not os.fork(): time.sleep(1000)\n"
        "        os._exit(0)\n    os.wait()\n    return a + b"),
    "another_program": (
        "io", ALL,
        "import os, sys\nos.environ['LD_PRELOAD'] = '/box/x.so'\n"
        "os.execv(sys.executable, ['p', '-c', 'print(sum(map(int, open(0).read().split())))'])"),
    "open_outside": ("io", {"strict": "FORBIDDEN", "landlock": "FORBIDDEN", "rlimits": "FORBIDDEN"}, "open('/x', 'w')"),
    "socket": (
        "io", {"strict": "FORBIDDEN", "landlock": "FORBIDDEN", "rlimits": None},
        "import socket\nsocket.create_connection(('127.0.0.1', 80))"),
    "socket_called": (
        "call", {"strict": "FORBIDDEN", "landlock": "FORBIDDEN", "rlimits": None},
        "import socket\ndef f(a, b):\n    socket.create_connection(('127.0.0.1', 80))"),
}  # fmt: skip
