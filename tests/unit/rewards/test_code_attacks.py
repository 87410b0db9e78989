"""The reward `code`, attacked: what a program tries is really tried, in the real sandbox, and each attempt says how it ended."""

from __future__ import annotations

import errno
import json
import os
import platform
import socket
import subprocess
import sys
import textwrap
import time

import pytest

from megatron_grpo.rewards.builtin.held import hold
from megatron_grpo.rewards.builtin.jail import canonical
from megatron_grpo.rewards.builtin.sandbox import run_program

HERE = ("x86_64", "aarch64").index(platform.machine())
REFUSED = {errno.EPERM, errno.ENOSYS, errno.EACCES}
# A call that the kernel looks at answers EFAULT, EINVAL or EBADF to these arguments: it was let through. None does harm if it is.
CALLS = {
    "metadata": {"fchmodat2": (452, 452), "fchownat": (260, 54), "utimensat": (280, 88), "setxattr": (188, 5), "fsetxattr": (190, 7),
                 "removexattr": (197, 14), "setxattrat": (463, 463), "file_setattr": (469, 469), "linkat": (265, 37),
                 "symlinkat": (266, 36), "mknodat": (259, 33), "truncate": (76, 45), "openat2": (437, 437), "name_to_handle_at": (303, 264),
                 "open_by_handle_at": (304, 265), "flock": (73, 32), "inotify_init1": (294, 26), "fanotify_init": (300, 262)},
    "processes": {"pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438), "tgkill": (234, 131),
                  "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "process_vm_readv": (310, 270),
                  "process_vm_writev": (311, 271), "process_madvise": (440, 440), "process_mrelease": (448, 448), "kcmp": (312, 272),
                  "ptrace": (101, 117), "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setscheduler": (144, 119),
                  "sched_setattr": (314, 274), "migrate_pages": (256, 238), "move_pages": (279, 239), "get_robust_list": (274, 100),
                  "setpgid": (109, 154), "setsid": (112, 157), "clone3": (435, 435), "execve": (59, 221), "execveat": (322, 281),
                  "personality": (135, 92), "seccomp": (317, 277), "acct": (163, 89)},
    "memory": {"memfd_create": (319, 279), "memfd_secret": (447, 447), "io_uring_setup": (425, 425), "userfaultfd": (323, 282),
               "bpf": (321, 280), "perf_event_open": (298, 241), "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
               "shmget": (29, 194), "shmat": (30, 196), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
               "fallocate": (285, 47), "splice": (275, 76), "tee": (276, 77), "vmsplice": (278, 75), "copy_file_range": (326, 285),
               "timer_create": (222, 107), "signalfd4": (289, 74), "sendmsg": (46, 211), "sendmmsg": (307, 269), "setsockopt": (54, 208)},
    "mounts": {"mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
               "setns": (308, 268), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
               "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "quotactl_fd": (443, 443), "statmount": (457, 457),
               "listmount": (458, 458), "open_tree_attr": (467, 467), "sethostname": (170, 161), "swapon": (167, 224)},
}  # fmt: skip
PRELUDE = """
import ctypes, fcntl, mmap, os, resource, socket, struct
libc = ctypes.CDLL(None, use_errno=True)
ended = {}
def tried(name, action):
    try:
        ended[name] = f"GOT {action()!r}"
    except OSError as error:
        ended[name] = error.errno
    except ValueError as error:  # resource.setrlimit says it so
        ended[name] = 1
def call(name, number, *arguments):
    ctypes.set_errno(0)
    got = libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments or (-9, 8, 8, -9, 0)))
    ended[name] = f"GOT {got}" if got != -1 else ctypes.get_errno()
def tell():
    import json
    print(json.dumps(ended))
"""


def how_it_ended(attack, *, landlock="must", **names):
    """What each attempt got: an errno, or what it has done."""
    program = PRELUDE + "".join(f"{name} = {value!r}\n" for name, value in names.items()) + textwrap.dedent(attack) + "\ntell()"
    outcome = run_program(program, as_main=True, seconds=20, memory_mb=512, landlock=landlock)
    assert outcome.clean, outcome.errors
    return json.loads(outcome.output)


def not_refused(ended):
    return {name: how for name, how in ended.items() if how not in REFUSED}


@pytest.mark.parametrize("landlock", ["must", "never"])
def test_no_call_reaches_files_processes_memory_or_mounts_outside(landlock):
    numbers = {f"{kind} {name}": number[HERE] for kind, calls in CALLS.items() for name, number in calls.items()}
    ended = how_it_ended("for name, number in numbers.items():\n    call(name, number)", numbers=numbers, landlock=landlock)
    assert ended.keys() == numbers.keys()
    assert not_refused(ended) == {}


METADATA = """
fd = os.open(os.__file__, os.O_RDONLY)  # files that can be read belong to this user just as well
mode = os.stat(os.__file__).st_mode & 0o7777
for name, action in {
    "chmod": lambda: os.chmod(path, 0o777), "fchmod": lambda: os.fchmod(fd, mode),
    "chown": lambda: os.chown(path, os.getuid(), os.getgid()),
    "lchown": lambda: os.lchown(path, os.getuid(), os.getgid()), "fchown": lambda: os.fchown(fd, os.getuid(), os.getgid()),
    "utime": lambda: os.utime(path, (1, 1)), "setxattr": lambda: os.setxattr(path, "user.mine", b"1"),
    "removexattr": lambda: os.removexattr(path, "user.mine"), "link": lambda: os.link(path, "mine"),
    "symlink": lambda: os.symlink(path, "mine"), "rename": lambda: os.rename(path, path + "2"), "remove": lambda: os.remove(path),
    "mkfifo": lambda: os.mkfifo(path + "3"), "mkdir": lambda: os.mkdir(path + "4"), "truncate": lambda: os.truncate(path, 0),
    "write": lambda: os.open(path, os.O_WRONLY), "empty by reading": lambda: os.open(path, os.O_RDONLY | os.O_TRUNC),
    "empty by reading, of its own": lambda: os.open("mine", os.O_CREAT | os.O_RDONLY | os.O_TRUNC),  # Landlock 1 and 2 do not see it
    "no name": lambda: os.open(os.path.dirname(path), os.O_TMPFILE | os.O_RDWR, 0o600), "read": lambda: os.open(path, 0),
    "attributes": lambda: fcntl.ioctl(fd, 0x80086601, bytes(8)),
    "leave the directory": lambda: os.open("../mine", os.O_CREAT | os.O_WRONLY),
}.items():
    tried(name, action)
"""


@pytest.mark.parametrize("landlock", ["must", "never"])
def test_no_file_outside_is_changed_not_even_its_times(tmp_path, landlock):
    path = tmp_path / "precious"
    path.write_text("kept")
    os.setxattr(path, "user.mine", b"0")
    before = [os.stat(one) for one in (path, tmp_path, os.__file__)]
    ended = how_it_ended(METADATA, path=str(path), landlock=landlock)
    assert not_refused(ended).keys() == ({"read"} if landlock == "never" else set())
    for one, was in zip((path, tmp_path, os.__file__), before):
        now = os.stat(one)
        assert (now.st_mode, now.st_uid, now.st_mtime_ns, now.st_ctime_ns, now.st_nlink, now.st_size) == (
            was.st_mode, was.st_uid, was.st_mtime_ns, was.st_ctime_ns, was.st_nlink, was.st_size)  # fmt: skip


OTHERS = """
reader, writer = os.pipe()
pair = socket.socketpair()
for name, action in {
    "F_SETOWN": lambda: fcntl.fcntl(reader, fcntl.F_SETOWN, parent), "F_SETSIG": lambda: fcntl.fcntl(reader, fcntl.F_SETSIG, 9),
    "F_SETOWN_EX": lambda: fcntl.fcntl(reader, 15, struct.pack("ii", 1, parent)), "F_SETLEASE": lambda: fcntl.fcntl(0, fcntl.F_SETLEASE, 0),
    "F_NOTIFY": lambda: fcntl.fcntl(os.open(".", 0), fcntl.F_NOTIFY, 1), "FIOASYNC": lambda: fcntl.ioctl(reader, 0x5452, b"1111"),
    "FIOSETOWN": lambda: fcntl.ioctl(pair[0], 0x8901, struct.pack("i", parent)), "TIOCSTI": lambda: fcntl.ioctl(0, 0x5412, b"x"),
    "F_SETPIPE_SZ": lambda: fcntl.fcntl(writer, 1031, 1 << 20), "SO_SNDBUFFORCE": lambda: pair[0].setsockopt(1, 32, 1 << 30),
    "kill": lambda: os.kill(parent, 0), "kill all": lambda: os.kill(-1, 0), "kill my group": lambda: os.killpg(0, 0),
    "kill its group": lambda: os.killpg(os.getpgid(parent), 0), "affinity": lambda: os.sched_setaffinity(parent, {0}),
    "limits": lambda: resource.prlimit(parent, resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE)),
    "inet": lambda: socket.socket(), "unix": lambda: socket.socket(socket.AF_UNIX), "netlink": lambda: socket.socket(socket.AF_NETLINK, 3),
    "datagrams": lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b"x", address),
    "a pair of datagrams": lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM),
    "abstract": lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].connect(abstract),
    "stream to": lambda: pair[0].sendto(b"x", address), "descriptors": lambda: pair[0].sendmsg([b"x"], [(1, 1, struct.pack("i", 0))]),
    "connect": lambda: pair[0].connect(address), "fork": lambda: os.fork() or os._exit(0), "shared file": lambda: mmap.mmap(
        os.open(os.__file__, os.O_RDONLY), 0, mmap.MAP_SHARED, mmap.PROT_READ),
    "memory": lambda: resource.setrlimit(resource.RLIMIT_AS, (-1, -1)), "cpu": lambda: resource.setrlimit(resource.RLIMIT_CPU, (-1, -1)),
    "file size": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1)), "open files": lambda: resource.setrlimit(
        resource.RLIMIT_NOFILE, (1 << 16, 1 << 16)),
}.items():
    tried(name, action)
for option, arguments in {"death with its parent": (1, 0), "dumpable": (4, 0), "mm": (35, 1, 0), "tracer": (0x59616D61, -1),
                          "reaper": (36, 1), "capabilities": (8, 1), "filter": (22, 1),
                          "speculation": (53, 0, 2), "timer": (29, 1)}.items():
    ctypes.set_errno(0)
    got = libc.prctl(*map(ctypes.c_long, (*arguments, 0, 0, 0)[:5]))
    ended["prctl " + option] = f"GOT {got}" if got != -1 else ctypes.get_errno()
"""


@pytest.mark.parametrize("landlock", ["must", "never"])
def test_a_program_reaches_no_process_no_socket_and_none_of_its_limits(tmp_path, landlock):
    address, abstract = str(tmp_path / "socket"), f"\0megatron_grpo_{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        one.bind(address)
        other.bind(abstract)
        ended = how_it_ended(OTHERS, landlock=landlock, parent=os.getpid(), address=address, abstract=abstract)
        for listener in (one, other):
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):
                listener.recv(1)
    assert len(ended) == 40 and not_refused(ended) == {}


@pytest.mark.skipif(os.getuid() != 0, reason="only root has capabilities to give up")
def test_root_is_nobody_to_the_files_of_others(tmp_path):
    path = tmp_path / "theirs"
    path.write_text("a secret")
    os.chown(path, 12345, 12345)
    path.chmod(0o600)
    tmp_path.chmod(0o755)
    ended = how_it_ended('tried("read", lambda: open(path).read())', path=str(path), landlock="never")
    assert ended == {"read": errno.EACCES}


@pytest.mark.parametrize(
    ("bomb", "exceeded"),
    [
        # Files that are gone before anybody counts them: what was written is counted, not what is there.
        ("import os\nwhile True:\n    with open('x', 'wb') as f: f.write(bytes(8 << 20))\n    os.remove('x')", "128 MiB written"),
        ("import os\nwhile True: os.pwrite(1, bytes(1 << 20), 0)", "128 MiB written"),
        ("n = 0\nwhile True: n += 1; open(str(n), 'w').close()", "1000 files"),
        ("import threading, time\nthreading.stack_size(32768)\nwhile True: threading.Thread(target=time.sleep, args=(9,)).start()",
         "256 threads"),
    ],
)  # fmt: skip
def test_what_adds_up_is_counted(bomb, exceeded):
    started = time.monotonic()
    outcome = run_program(bomb, as_main=True, seconds=60, memory_mb=512)
    assert outcome.exceeded == exceeded and not outcome.clean and not outcome.timed_out
    assert time.monotonic() - started < 30


def test_a_directory_deeper_than_a_path_is_removed(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program = """
import os, time
os.mkdir("closed", 0)
for _ in range(60): os.mkdir("d" * 100); os.chdir("d" * 100)
open("x", "w").close()
time.sleep(60)
"""
    outcome = run_program(program, as_main=True, seconds=60, memory_mb=512)
    assert outcome.exceeded == "directories nested deeper than a path is long"
    assert list(tmp_path.iterdir()) == []


def test_only_its_own_descriptors_are_open_and_none_holds_the_tests():
    program = """
import os
found = []
for fd in range(64):
    try:
        os.fstat(fd)
    except OSError:
        continue
    found.append(fd)
    for _ in range(3):
        try:
            os.lseek(fd, 0, 0)
        except OSError:
            pass
        os.set_blocking(fd, False)
        try:
            assert b'31337' not in os.read(fd, 1 << 16)
        except (BlockingIOError, OSError):
            pass
        os.set_blocking(fd, True)
assert len(found) == 4, found  # stdin, stdout, stderr, the channel
def f(): return 31337
"""
    assert run_program(program, tests=["assert f() == 31337"], seconds=10, memory_mb=512).passed == (True,)


# Finds the largest number that stands in a frame, a constant or an object of this process, below the program, around it or above it.
SPY = """
import gc, inspect, sys
def codes(code):
    yield code
    for constant in code.co_consts:
        if inspect.iscode(constant): yield from codes(constant)
def seen():
    texts, frame = [], sys._getframe(1)
    while frame:
        texts += [repr(frame.f_locals)[:10000]] + [repr(code.co_consts) for code in codes(frame.f_code)]
        frame = frame.f_back
    texts += [repr(one)[:10000] for one in gc.get_objects() if type(one) in (list, tuple, dict) and len(one) < 1000]
    texts += [repr(one.f_locals)[:10000] for one in sys._current_frames().values()]
    texts += [repr(sys.argv), repr(sys.orig_argv)]
    return answer() if any(str(answer()) in text for text in texts) else -1
def answer():
    return int("".join(["31337", "271828182"]))  # not in one piece, or it would find itself
"""


def test_a_program_finds_no_right_answer_in_its_process():
    right = 31337271828182  # long enough not to stand in an address or a time by chance
    tests = [f"assert f(1) == {right}", f"assert {right} == f(2)", f"def check(g):\n    assert g(1) == {right}, 'no'\ncheck(f)",
             "assert f() is None", f"assert abs(f(3) - {right}) < 1e-3"]  # fmt: skip
    at_once = run_program(SPY + "found = seen()\ndef f(n=0): return found", tests=tests, seconds=10, memory_mb=512)
    when_asked = run_program(SPY + "def f(n=0): return seen()", tests=tests, seconds=10, memory_mb=512)
    assert at_once.passed == when_asked.passed == (False,) * 5
    plain = f"assert f(1) < {right + 1} and f(2) == {right}"
    shown = run_program(SPY + "def f(n=0): return seen()", tests=[plain], seconds=10, memory_mb=512)
    assert shown.passed == (True,)  # the spy is one: this assert is no plain comparison, and stands in the program's process


def test_verdicts_cannot_be_written_by_the_program_nor_guessed():
    forged = """
import json, os, sys
def f(*_):
    frame = sys._getframe(1)
    while frame and 'given' not in frame.f_locals: frame = frame.f_back
    word, channel = frame.f_locals['given']['word'], frame.f_locals['channel']
    for guess in range(9):
        os.write(channel, json.dumps([word, 'compare', 0, str(guess)]).encode() + b'\\n')
    os.write(channel, json.dumps([word, 'passed']).encode() + b'\\n')
    return 0
"""
    assert not any(run_program(forged, tests=["assert f() == 5", "assert f() == 5"], seconds=10, memory_mb=512).passed)
    only_says = forged.replace("range(9)", "()")
    assert not any(run_program(only_says, tests=["assert f() == 5"] * 2, seconds=10, memory_mb=512).passed)
    early = 'import os\nfor fd in range(3, 64):\n    try: os.write(fd, b\'["ready"]\\n["", "passed"]\\n\')\n    except OSError: pass\n'
    assert not any(run_program(early, tests=["assert False"] * 2, seconds=10, memory_mb=512).passed)


@pytest.mark.parametrize(
    ("test", "value", "passes"),
    [
        ("assert f() == [1, (2, 'a'), {3: {4}}]", "[True, (2.0, 'a'), {3.0: frozenset([4])}]", True),
        ("assert f() == (1, 2)", "[1, 2]", False),
        ("assert f() != 3", "4", True), ("assert f() != 3", "3.0", False), ("assert f() is True", "1", False),
        ("assert f() is None", "None", True), ("assert f() is not False", "0", True), ("assert f() == 'x'", "b'x'", False),
        ("assert f() == 0.3", "0.1 + 0.2", False), ("assert abs(f() - 0.3) < 1e-9", "0.1 + 0.2", True),
        ("assert abs(f() - 0.3) <= 0", "'0.3'", False), ("assert f() == 5", "__import__('numpy').int64(5)", True),
        ("assert f() == (1, 2)", "__import__('collections').namedtuple('P', 'x y')(1, 2)", True),
        ("assert f() == {'a': 1}", "__import__('collections').Counter('a')", True),
        ("assert 2 == f()", "__import__('fractions').Fraction(2)", True),
        ("assert f() == 1", "float('nan')", False), ("assert f() == [1]", "__import__('numpy').array([1, 2])", False),
        ("try:\n    assert f() == 1\nexcept AssertionError:\n    pass", "2", True), ("for n in (1, 1): assert f() == 1", "1", True),
        ("assert f() == 10 ** 2, 'a message'", "100", True), ("assert f() == -1", "-1", True),
    ],
)  # fmt: skip
def test_what_is_compared_outside_is_equal_just_where_python_says_so(test, value, passes):
    """The same statement in this process is the oracle."""
    namespace = {}
    exec(f"def f(): return {value}", namespace)
    try:
        exec(test, namespace)
        here = True
    except (AssertionError, TypeError, ValueError):
        here = False
    assert here == passes
    held = hold(test)
    assert held.expected or "10 ** 2" in test
    text = canonical(namespace["f"]())
    if text is not None and held.expected and not held.expected[0].is_identity and held.expected[0].is_sure:
        assert held.expected[0].admits(text) == passes


def test_without_landlock_nothing_runs_unless_the_user_says_so():
    """In a process whose kernel answers as one without it: a seccomp filter of its own, under which the sandbox lays its filter."""
    program = """
import ctypes, errno
from megatron_grpo.errors import ConfigError
from megatron_grpo.rewards.builtin import jail
from megatron_grpo.rewards.builtin.sandbox import run_program
from megatron_grpo.rewards.loading import load_rewards
from megatron_grpo.settings.config import Config
import struct
body = [jail._load(0), *jail._on_call(444, [jail._return(jail._ERRNO | errno.EOPNOTSUPP)]), jail._return(jail._ALLOW)]
code = ctypes.create_string_buffer(b"".join(body))
jail._LIBC.prctl(jail._PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
assert jail._LIBC.prctl(jail._PR_SET_SECCOMP, jail._FILTER, struct.pack("HxxxxxxQ", len(body), ctypes.addressof(code)), 0, 0) == 0
assert run_program("print(1)", as_main=True, seconds=5, memory_mb=512).output == ""
config = Config().with_values({"reward_funcs": ["code"]})
try:
    load_rewards(config)
except ConfigError as error:
    print(error)
[code] = load_rewards(config.with_values({"code_without_landlock": True}))
tests = ["assert f() == 1", "open('x', 'w')"]
print(code.function(completions=["def f(): return 1"], tests=[tests]))
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stderr
    assert "has no Landlock" in told.stdout and "code_without_landlock true" in told.stdout and told.stdout.endswith("[0.5]\n")
