"""The inside of the sandbox of the reward `code`: drops the rights of its process, then runs an untrusted program.

It is run by path as a script in a new interpreter, so it imports nothing of the package. The restrictions:
  * limits on CPU time, address space, file size and open files, enforced by the kernel, and no capabilities to raise them;
  * seccomp: only the calls in `_ALLOWED`. No sockets, processes, signals, tracing, mounts or namespaces; no change of modes, owners or
    times of files, because Landlock does not cover those;
  * Landlock: files can be read under Python and the system's libraries, and written in the working directory only. If the kernel has no
    Landlock and the user runs programs nevertheless, seccomp refuses to open any file for writing.
Cumulative quantities, bytes written and threads, are counted from outside (sandbox.py).
The sandbox is meant for the output of a model in training, not for an attacker with a kernel exploit.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import runpy
import signal
import struct
import sys
import types

NO_LANDLOCK = "this kernel has no Landlock"
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 1, 38, 22, 2
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_EPERM, _ENOSYS = 1, 38
_NEWER = 424  # libc has fallbacks for unknown calls from this number on; older calls get a permission error, which is clearer
_O_WRITES, _O_TMPFILE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0x400000
_FILE_BYTES, _OPEN_FILES = 16 << 20, 64

# Number of each system call: (x86_64, aarch64); None where the architecture lacks it. What can reach another process, or a file that
# Landlock does not watch, is not here: nor is what is newer than this table.
_ALLOWED = {
    # Files: Landlock decides which.
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67), "pwrite64": (18, 68),
    "preadv": (295, 69), "pwritev": (296, 70), "preadv2": (327, 286), "pwritev2": (328, 287), "lseek": (8, 62), "sendfile": (40, 71),
    "close": (3, 57), "close_range": (436, 436), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "pipe": (22, None),
    "pipe2": (293, 59), "fsync": (74, 82), "fdatasync": (75, 83), "fadvise64": (221, 223), "ftruncate": (77, 46), "stat": (4, None),
    "fstat": (5, 80), "lstat": (6, None), "newfstatat": (262, 79), "statx": (332, 291), "statfs": (137, 43), "fstatfs": (138, 44),
    "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439), "readlink": (89, None), "readlinkat": (267, 78),
    "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50), "getdents": (78, None), "getdents64": (217, 61), "umask": (95, 166),
    # Waiting.
    "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "epoll_create": (213, None),
    "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22), "epoll_pwait2": (441, 441),
    "eventfd": (284, None), "eventfd2": (290, 19), "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "pause": (34, None),
    "alarm": (37, None), "setitimer": (38, 103), "getitimer": (36, 102), "restart_syscall": (219, 128),
    # What asyncio says to itself, through a pair of sockets (below) that are connected to each other.
    "recvfrom": (45, 207), "shutdown": (48, 210), "getsockopt": (55, 209), "getsockname": (51, 204), "getpeername": (52, 205),
    # Memory.
    "munmap": (11, 215), "mprotect": (10, 226), "mremap": (25, 216), "brk": (12, 214), "madvise": (28, 233), "msync": (26, 227),
    "mincore": (27, 232), "mlock": (149, 228), "munlock": (150, 229),
    # Threads, and signals to itself.
    "futex": (202, 98), "set_robust_list": (273, 99), "rseq": (334, 293), "membarrier": (324, 283), "set_tid_address": (218, 96),
    "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "getcpu": (309, 168), "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136), "rt_sigsuspend": (130, 133),
    "rt_sigtimedwait": (128, 137), "sigaltstack": (131, 132), "exit": (60, 93), "exit_group": (231, 94),
    # Questions.
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153),
    "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173), "getpgrp": (111, None), "getpgid": (121, 155), "getsid": (124, 156),
    "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177), "getresuid": (118, 148),
    "getresgid": (120, 150), "getgroups": (115, 158), "uname": (63, 160), "sysinfo": (99, 179), "getrusage": (98, 165),
    "getrlimit": (97, 163), "setrlimit": (160, 164), "getrandom": (318, 278),
}  # fmt: skip
_WRITING_CALLS = {
    "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None),
    "unlink": (87, None), "unlinkat": (263, 35),
}  # fmt: skip
# Allowed for some of their arguments: call -> (numbers, which argument, the values it may have).
_COMMANDS = {
    # Locks, flags and copies of descriptors. F_SETOWN and F_SETSIG send signals to others, F_SETPIPE_SZ takes the kernel's memory.
    "fcntl": ((72, 25), 1, (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032)),
    # Is it a terminal, how large, how much is there to read, blocking, close on exec. Others set attributes of any file of the user.
    "ioctl": ((16, 29), 1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),
    # Names of threads and of memory. Others switch off the death of this process with its parent.
    "prctl": ((157, 167), 0, (15, 16, 0x53564D41)),
    "prlimit64": ((302, 261), 0, (0,)),
}
_CLONE, _SOCKETPAIR, _SENDTO, _MMAP, _OPEN, _OPENAT = (56, 220), (53, 199), (44, 206), (9, 222), (2, None), (257, 56)
_CLONE_THREAD, _CLONE_NEW = 0x00010000, 0x7E020000  # all CLONE_NEW* flags: namespaces


def main() -> None:
    """Run a job.

    Command line arguments: descriptor of the job (JSON), descriptor of the link between program and tests (or -1), process ID of the
    parent.
    """
    job_file, link, parent = (int(argument) for argument in sys.argv[1:4])
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    with os.fdopen(job_file, "rb") as source:
        job = json.loads(source.read())
    hidden_tests = runpy.run_path(os.path.join(os.path.dirname(os.path.abspath(__file__)), "hidden_tests.py")) if link >= 0 else {}
    _limit(job["seconds"], job["memory_bytes"])
    if _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs")
    has_landlock = job["landlock"] != "never" and _restrict_files(os.getcwd())
    if job["landlock"] == "must" and not has_landlock:
        raise OSError(_ENOSYS, NO_LANDLOCK)
    _give_up_capabilities()
    _filter_calls(may_write=has_landlock)
    _run(job, link, hidden_tests)


def _run(job: dict, link: int, hidden_tests: dict) -> None:
    """Run the program and then serve requests of the tests; or, in the other process, run the tests.

    An exception of the program ends this process, which is sufficient.

    Args:
        link: Descriptor of the connection to the other process, or -1.
    """
    del sys.argv[1:]
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, job["seconds"])
    if "tests" in job:
        return hidden_tests["run_tests"](job["tests"], link, job["report"])
    module = types.ModuleType("__main__" if job["as_main"] else "program")
    sys.modules.setdefault(module.__name__, module)  # dataclasses look modules up there
    exec(compile(job["program"], "<program>", "exec"), vars(module))
    if hidden_tests:
        hidden_tests["RpcConnection"](link, own=vars(module)).serve()


def _limit(seconds: float, memory_bytes: int) -> None:
    cpu = int(seconds) + 1
    for kind, value in (
        (resource.RLIMIT_CPU, cpu), (resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_FSIZE, _FILE_BYTES),
        (resource.RLIMIT_NOFILE, _OPEN_FILES), (resource.RLIMIT_CORE, 0),
    ):  # fmt: skip
        resource.setrlimit(kind, (value, value))


def _give_up_capabilities() -> None:
    """Drop the capabilities of root, which allow raising the limits above and opening files of other users."""
    if _LIBC.capset(struct.pack("=Ii", 0x20080522, 0), bytes(24)):
        raise OSError(ctypes.get_errno(), "capset")


def _restrict_files(writable: str) -> bool:
    """Apply Landlock. Return False if the kernel has none."""
    version = _LIBC.syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    if version < 1:
        return False
    all_access = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    network = 0b11 if version >= 4 else 0
    scopes = 0b11 if version >= 6 else 0
    attributes = struct.pack("QQQ", all_access, network, scopes)[: 24 if version >= 6 else 16 if version >= 4 else 8]
    ruleset = _LIBC.syscall(444, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0))
    if ruleset < 0:
        return False
    execute, write, read, list_, truncate = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
    for path in {sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime"}:
        _allow(ruleset, path, (execute | read | list_) if os.path.isdir(path) else read)
    for path in ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"):
        _allow(ruleset, path, read | write | (truncate & all_access))
    _allow(ruleset, writable, all_access & ~execute)
    if _LIBC.syscall(446, ctypes.c_int(ruleset), ctypes.c_uint(0)):
        raise OSError(ctypes.get_errno(), "landlock_restrict_self")
    os.close(ruleset)
    return True


def _allow(ruleset: int, path: str, access: int) -> None:
    if not os.path.exists(path):
        return
    descriptor = os.open(path, os.O_PATH)
    rule = struct.pack("=Qi", access, descriptor)
    if _LIBC.syscall(445, ctypes.c_int(ruleset), ctypes.c_int(1), rule, ctypes.c_uint(0)):
        raise OSError(ctypes.get_errno(), f"landlock_add_rule {path}")
    os.close(descriptor)


def _filter_calls(*, may_write: bool) -> None:
    """Install the seccomp filter. Raises OSError if the kernel or the architecture does not support it."""
    machine = platform.machine()
    if machine not in ("x86_64", "aarch64"):
        raise OSError(f"no table of system calls for {machine}")
    architecture = ("x86_64", "aarch64").index(machine)
    program = [_load(4), _jump(0x15, (0xC000003E, 0xC00000B7)[architecture], 1, 0), _return(_KILL), _load(0)]
    if architecture == 0:
        program += [_jump(0x35, 0x40000000, 0, 1), _return(_ERRNO | _ENOSYS)]  # x32 numbers are aliases of the same calls
    for numbers in {**_ALLOWED, **(_WRITING_CALLS if may_write else {})}.values():
        program += _on_call(numbers[architecture], [_return(_ALLOW)])
    for numbers, argument, values in _COMMANDS.values():
        allowed = [part for value in values for part in (_jump(0x15, value, 0, 1), _return(_ALLOW))]
        program += _on_call(numbers[architecture], [_argument(argument), *allowed, _return(_ERRNO | _EPERM)])
    for numbers, body in _by_flags(may_write=may_write):
        program += _on_call(numbers[architecture], [*body, _return(_ERRNO | _EPERM)])
    program += [_jump(0x35, _NEWER, 0, 1), _return(_ERRNO | _ENOSYS), _return(_ERRNO | _EPERM)]
    code = ctypes.create_string_buffer(b"".join(program))
    header = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code))
    if _LIBC.prctl(_PR_SET_SECCOMP, _FILTER, header, 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


def _by_flags(*, may_write: bool) -> list[tuple[tuple[int, int | None], list[bytes]]]:
    """Return the filters of calls that depend on bits of their arguments; anything not allowed is rejected."""
    # Writes through a shared mapping of a file are not counted. Bit 0: shared; 0x20: anonymous memory, no file.
    mmap = [_argument(3), _jump(0x45, 1, 0, 1), _jump(0x45, 0x20, 0, 1), _return(_ALLOW)]
    # Unix sockets that are streams: a pair of any other kind can still be sent to an address.
    pair = [_argument(0), _jump(0x15, 1, 0, 4), _argument(1), _and(0xF), _jump(0x15, 1, 0, 1), _return(_ALLOW)]
    no_address = [_argument(4), _jump(0x15, 0, 0, 3), _argument(4, half=1), _jump(0x15, 0, 0, 1), _return(_ALLOW)]
    clone = [_argument(0), _jump(0x45, _CLONE_NEW, 2, 0), _jump(0x45, _CLONE_THREAD, 0, 1), _return(_ALLOW)]
    calls: list[tuple[tuple[int, int | None], list[bytes]]] = [(_MMAP, mmap), (_SOCKETPAIR, pair), (_SENDTO, no_address), (_CLONE, clone)]
    for numbers, argument in ((_OPEN, 1), (_OPENAT, 2)):
        # O_TRUNC empties a file that is opened for reading: Landlock watches that from its version 3 on.
        reads_only = [_argument(argument), _jump(0x45, _O_WRITES | _O_TMPFILE, 1, 0), _return(_ALLOW)]
        writes = [_jump(0x45, _O_TMPFILE, 3, 0), _jump(0x45, os.O_WRONLY | os.O_RDWR, 1, 0), _jump(0x45, os.O_TRUNC, 1, 0), _return(_ALLOW)]
        calls.append((numbers, [*reads_only, *(writes if may_write else [])]))
    return calls


def _instruction(code: int, if_true: int, if_false: int, value: int) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _load(offset: int) -> bytes:
    """Load 32 bits of the call's description: offset 0 is its number, 4 the architecture."""
    return _instruction(0x20, 0, 0, offset)


def _argument(number: int, half: int = 0) -> bytes:
    """Load the low half (or with 1 the high half) of an argument. For arguments that the kernel reads as int, only the low half counts."""
    return _load(16 + 8 * number + 4 * half)


def _and(value: int) -> bytes:
    return _instruction(0x54, 0, 0, value)


def _jump(code: int, value: int, if_true: int, if_false: int) -> bytes:
    """Compare and skip instructions: 0x15 equal, 0x35 greater or equal, 0x45 any bit in common."""
    return _instruction(code, if_true, if_false, value)


def _return(action: int) -> bytes:
    return _instruction(0x06, 0, 0, action)


def _on_call(number: int | None, body: list[bytes]) -> list[bytes]:
    """Apply `body` to one system call. `body` must return; for other calls the accumulator still holds the call's number afterwards."""
    return [] if number is None else [_jump(0x15, number, 0, len(body)), *body]


if __name__ == "__main__":
    main()
