"""Owns the inside of the sandbox of the reward `code`: takes its own rights away, then runs a program that nobody has read.

Run by path as a script in a fresh interpreter, so it imports nothing of the package. What holds the program:
  * limits on CPU time, address space, file size and open files, which the kernel enforces;
  * seccomp: no sockets, no processes, no signals to others, no tracing, no namespaces. One process is all there is to kill;
  * Landlock: files can be read under Python and the system's libraries, and written in the working directory only. Where the kernel has no
    Landlock, seccomp refuses to open any file for writing.
It is meant for what a model writes while it learns, not for an attacker with a kernel exploit.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 1, 38, 22, 2
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_EPERM, _ENOSYS = 1, 38
_CLONE_THREAD, _CLONE_NEW = 0x00010000, 0x7E020000  # all CLONE_NEW* flags: namespaces
_O_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_FILE_BYTES, _OPEN_FILES = 16 << 20, 64

# Number of each system call: (x86_64, aarch64); None where the architecture lacks it.
_CALLS = {
    "socket": (41, 198), "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281), "kill": (62, 129),
    "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "unshare": (272, 97), "setns": (308, 268), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "io_uring_setup": (425, 425), "setpriority": (141, 140),
    "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119), "ioprio_set": (251, 30), "shmget": (29, 194), "shmat": (30, 196),
    "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180), "kcmp": (312, 272), "reboot": (169, 142), "kexec_load": (246, 104),
}  # fmt: skip
_WRITING_CALLS = {
    "creat": (85, None), "truncate": (76, 45), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "mkdir": (83, None),
    "mkdirat": (258, 34), "rmdir": (84, None), "unlink": (87, None), "unlinkat": (263, 35), "link": (86, None), "linkat": (265, 37),
    "symlink": (88, None), "symlinkat": (266, 36), "chmod": (90, None), "fchmodat": (268, 53), "chown": (92, None), "fchownat": (260, 54),
    "lchown": (94, None), "mknod": (133, None), "mknodat": (259, 33), "utimensat": (280, 88), "setxattr": (188, 5), "openat2": (437, 437),
}  # fmt: skip
_CLONE, _CLONE3, _PRLIMIT, _OPEN, _OPENAT = (56, 220), (435, 435), (302, 261), (2, None), (257, 56)


def main() -> None:
    """Arguments: descriptor of the job (JSON), descriptor for verdicts, the parent's process id."""
    job_file, verdict_file, parent = (int(argument) for argument in sys.argv[1:4])
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    with os.fdopen(job_file, "rb") as source:
        job = json.loads(source.read())
    _limit(job["seconds"], job["memory_bytes"])
    if _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs")
    _filter_calls(may_write=job["landlock"] and _restrict_files(os.getcwd()))
    _run(job, os.fdopen(verdict_file, "w"))


def _run(job: dict, verdicts) -> None:
    """Runs the program, then each test in its namespace; a line of verdict for each as soon as it is known: a hang loses only the rest.

    What the program raises ends this process, which says enough. The lines begin with a word that the program has not seen, so that what
    it prints by itself is no verdict.
    """
    del sys.argv[1:]
    word = job["word"]
    namespace = {"__name__": "__main__" if job["as_main"] else "program", "__builtins__": __builtins__}
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, job["seconds"])
    exec(compile(job["program"], "<program>", "exec"), namespace)
    for test in job["tests"]:
        try:
            exec(compile(test, "<test>", "exec"), namespace)
            passed = 1
        except BaseException:  # noqa: BLE001 - a test that exits has not passed either
            passed = 0
        verdicts.write(f"{word} {passed}\n")
        verdicts.flush()


def _limit(seconds: float, memory_bytes: int) -> None:
    cpu = int(seconds) + 1
    for kind, value in (
        (resource.RLIMIT_CPU, cpu), (resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_FSIZE, _FILE_BYTES),
        (resource.RLIMIT_NOFILE, _OPEN_FILES), (resource.RLIMIT_CORE, 0),
    ):  # fmt: skip
        resource.setrlimit(kind, (value, value))


def _restrict_files(writable: str) -> bool:
    """Landlock. False where the kernel has none."""
    version = _LIBC.syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    if version < 1:
        return False
    everything = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    network = 0b11 if version >= 4 else 0
    scopes = 0b11 if version >= 6 else 0
    attributes = struct.pack("QQQ", everything, network, scopes)[: 24 if version >= 6 else 16 if version >= 4 else 8]
    ruleset = _LIBC.syscall(444, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0))
    if ruleset < 0:
        return False
    execute, write, read, list_, truncate = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
    for path in {sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64", "/opt", "/etc/ld.so.cache", "/etc/localtime"}:
        _allow(ruleset, path, (execute | read | list_) if os.path.isdir(path) else read)
    for path in ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"):
        _allow(ruleset, path, read | write | (truncate & everything))
    _allow(ruleset, writable, everything & ~execute)
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
    """Installs the seccomp filter. Raises OSError where the kernel or the architecture has none."""
    machine = platform.machine()
    if machine not in ("x86_64", "aarch64"):
        raise OSError(f"no table of system calls for {machine}")
    here = ("x86_64", "aarch64").index(machine)
    architecture = (0xC000003E, 0xC00000B7)[here]
    load_number, load_architecture = _load(0), _load(4)
    refused = {**_CALLS, **({} if may_write else _WRITING_CALLS)}
    program = [load_architecture, _jump(0x15, architecture, 1, 0), _return(_KILL), load_number]
    if here == 0:
        program += [_jump(0x35, 0x40000000, 0, 1), _return(_ERRNO | _ENOSYS)]  # the x32 numbers are the same calls once more
    for numbers in refused.values():
        if (number := numbers[here]) is not None:
            program += [_jump(0x15, number, 0, 1), _return(_ERRNO | _EPERM)]
    program += [_jump(0x15, _CLONE3[here], 0, 1), _return(_ERRNO | _ENOSYS)]  # its flags are out of sight; libc falls back to clone
    program += _on_call(_CLONE[here], [
        _load(16), _jump(0x45, _CLONE_NEW, 2, 0), _jump(0x45, _CLONE_THREAD, 0, 1), _return(_ALLOW), _return(_ERRNO | _EPERM),
    ])  # fmt: skip
    program += _on_call(_PRLIMIT[here], [_load(16), _jump(0x15, 0, 0, 1), _return(_ALLOW), _return(_ERRNO | _EPERM)])
    if not may_write:
        for number, argument in ((_OPEN[here], 1), (_OPENAT[here], 2)):
            if number is not None:
                flags = _load(16 + 8 * argument)
                program += _on_call(number, [flags, _jump(0x45, _O_WRITES, 0, 1), _return(_ERRNO | _EPERM), _return(_ALLOW)])
    program.append(_return(_ALLOW))
    code = ctypes.create_string_buffer(b"".join(program))
    header = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code))
    if _LIBC.prctl(_PR_SET_SECCOMP, _FILTER, header, 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


def _instruction(code: int, if_true: int, if_false: int, value: int) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _load(offset: int) -> bytes:
    """Loads 32 bits of the call's description: 0 its number, 4 the architecture, 16 + 8 i the low half of argument i."""
    return _instruction(0x20, 0, 0, offset)


def _jump(code: int, value: int, if_true: int, if_false: int) -> bytes:
    """0x15 equal, 0x35 greater or equal, 0x45 any bit in common; skips that many instructions."""
    return _instruction(code, if_true, if_false, value)


def _return(action: int) -> bytes:
    return _instruction(0x06, 0, 0, action)


def _on_call(number: int, body: list[bytes]) -> list[bytes]:
    """`body` must return; the accumulator holds the call's number before and, for other calls, after."""
    return [_jump(0x15, number, 0, len(body)), *body]


if __name__ == "__main__":
    main()
