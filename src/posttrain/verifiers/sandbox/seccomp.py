"""Build the seccomp filter that denies system calls to a program in a box.

Everything that Python programs, compilers and proof assistants do is allowed. Calls that only an attack on
the kernel or on other processes needs fail with EPERM: tracing, mounts, namespaces, keys, modules, BPF,
io_uring, raw devices of the kernel, and sockets other than AF_UNIX. `clone3` fails with ENOSYS, so that the
C library falls back to `clone`, whose flags a filter can read.

Without namespaces the filter also denies what they would prevent: all sockets but connected pairs, shared
memory and queues that outlive a process, and changes to the priority or limits of other processes. Under
our own user it also denies changes to the permissions, owners, times and attributes of files, which
Landlock does not control.

Source: the kernel's Documentation/userspace-api/seccomp_filter.rst; linux/filter.h, linux/seccomp.h.
"""

import errno
import functools
import platform
import struct

_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x54, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NO = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_X32 = 0x40000000
_NEW_NAMESPACES = 0x7E020080
"""CLONE_NEWTIME | NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET."""
_AF_UNIX, _SOCK_STREAM, _SOCK_TYPE_MASK = 1, 1, 0xF

_REFUSED = {
    "x86_64": {
        "ptrace": 101, "syslog": 103, "uselib": 134, "personality": 135, "ustat": 136, "sysfs": 139,
        "pivot_root": 155, "_sysctl": 156, "adjtimex": 159, "chroot": 161, "acct": 163, "settimeofday": 164,
        "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169, "sethostname": 170,
        "setdomainname": 171, "iopl": 172, "ioperm": 173, "create_module": 174, "init_module": 175,
        "delete_module": 176, "quotactl": 179, "lookup_dcookie": 212, "clock_settime": 227, "mbind": 237,
        "set_mempolicy": 238, "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250,
        "migrate_pages": 256, "unshare": 272, "move_pages": 279, "vmsplice": 278, "perf_event_open": 298,
        "fanotify_init": 300, "name_to_handle_at": 303, "open_by_handle_at": 304, "clock_adjtime": 305,
        "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "finit_module": 313,
        "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323,
    },
    "aarch64": {
        "lookup_dcookie": 18, "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51, "quotactl": 60,
        "vmsplice": 75, "acct": 89, "personality": 92, "unshare": 97, "kexec_load": 104,
        "init_module": 105, "delete_module": 106, "clock_settime": 112, "syslog": 116, "ptrace": 117,
        "reboot": 142, "sethostname": 161, "setdomainname": 162, "settimeofday": 170, "adjtimex": 171,
        "add_key": 217, "request_key": 218, "keyctl": 219, "swapon": 224, "swapoff": 225, "mbind": 235,
        "set_mempolicy": 237, "migrate_pages": 238, "move_pages": 239, "perf_event_open": 241,
        "fanotify_init": 262, "name_to_handle_at": 264, "open_by_handle_at": 265, "clock_adjtime": 266,
        "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "finit_module": 273,
        "bpf": 280, "userfaultfd": 282, "kexec_file_load": 294,
    },
}  # fmt: skip
_REFUSED_EVERYWHERE = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_getfd": 438,
    "process_madvise": 440, "mount_setattr": 442, "quotactl_fd": 443,
}  # fmt: skip
_CLONE3 = 435
_CLONE = {"x86_64": 56, "aarch64": 220}
_SOCKET = {"x86_64": 41, "aarch64": 198}
_SOCKETPAIR = {"x86_64": 53, "aarch64": 199}
_PRLIMIT = {"x86_64": 302, "aarch64": 261}
_SHARED_HOST = {
    "x86_64": {
        "shmget": 29, "shmat": 30, "shmctl": 31, "semget": 64, "semop": 65, "semctl": 66, "msgget": 68,
        "msgsnd": 69, "msgrcv": 70, "msgctl": 71, "setpriority": 141, "sched_setparam": 142,
        "sched_setscheduler": 144, "sched_setaffinity": 203, "semtimedop": 220, "mq_open": 240,
        "mq_unlink": 241, "ioprio_set": 251, "sched_setattr": 314,
    },
    "aarch64": {
        "ioprio_set": 30, "sched_setparam": 118, "sched_setscheduler": 119, "sched_setaffinity": 122,
        "setpriority": 140, "mq_open": 180, "mq_unlink": 181, "msgget": 186, "msgctl": 187, "msgrcv": 188,
        "msgsnd": 189, "semget": 190, "semctl": 191, "semtimedop": 192, "semop": 193, "shmget": 194,
        "shmctl": 195, "shmat": 196, "sched_setattr": 274,
    },
}  # fmt: skip
_SHARED_USER = {
    "x86_64": {
        "chmod": 90, "fchmod": 91, "chown": 92, "fchown": 93, "lchown": 94, "utime": 132, "setxattr": 188,
        "lsetxattr": 189, "fsetxattr": 190, "removexattr": 197, "lremovexattr": 198, "fremovexattr": 199,
        "utimes": 235, "fchownat": 260, "futimesat": 261, "fchmodat": 268, "utimensat": 280,
    },
    "aarch64": {
        "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14, "lremovexattr": 15,
        "fremovexattr": 16, "fchmod": 52, "fchmodat": 53, "fchownat": 54, "fchown": 55, "utimensat": 88,
    },
}  # fmt: skip
_SHARED_USER_EVERYWHERE = {"fchmodat2": 452, "setxattrat": 463, "removexattrat": 466}
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


@functools.cache
def program(*, namespaces: bool, shared_user: bool) -> bytes | None:
    """Return the filter as an array of struct sock_filter; None on a processor without a table.

    namespaces: whether the program has its own namespaces. shared_user: whether it runs under our user.

    >>> code = program(namespaces=True, shared_user=False)
    >>> code is None or len(code) % 8
    0
    """
    machine = platform.machine()
    if machine not in _REFUSED:
        return None
    refused = {**_REFUSED[machine], **_REFUSED_EVERYWHERE}
    if not namespaces:
        refused |= _SHARED_HOST[machine]
    if shared_user:
        refused |= {**_SHARED_USER[machine], **_SHARED_USER_EVERYWHERE}
    lines: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _AUDIT[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":  # system calls of x32 have other numbers, which no comparison below matches
        lines += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]
    lines += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    for number in refused.values():
        lines += [(_EQUAL, 0, 1, number), _NO]
    lines += _where(_CLONE[machine], 0, [(_ANY_BIT, 0, 1, _NEW_NAMESPACES), _NO])
    if namespaces:
        lines += _where(_SOCKET[machine], 0, [(_EQUAL, 1, 0, _AF_UNIX), _NO])
    else:
        # A datagram socket of a pair could be connected to any socket of the host.
        kind = [(_AND, 0, 0, _SOCK_TYPE_MASK), (_EQUAL, 1, 0, _SOCK_STREAM), _NO]
        lines += [(_EQUAL, 0, 1, _SOCKET[machine]), _NO, *_where(_SOCKETPAIR[machine], 1, kind)]
        lines += _where(_PRLIMIT[machine], 0, [(_EQUAL, 1, 0, 0), _NO])
    lines.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", code, yes, no, value) for code, yes, no, value in lines)


def _where(
    number: int, argument: int, checks: list[tuple[int, int, int, int]]
) -> list[tuple[int, int, int, int]]:
    """Return instructions that check one argument of one system call, and then load its number again."""
    load = (_LOAD, 0, 0, _FIRST_ARGUMENT + 8 * argument)
    return [(_EQUAL, 0, len(checks) + 1, number), load, *checks, (_LOAD, 0, 0, _NUMBER)]
