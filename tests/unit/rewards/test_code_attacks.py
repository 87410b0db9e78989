"""Attacks on the reward `code`: programs that really run in the real sandbox and report how each attempt ended."""

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

from megatron_grpo.plugins.rewards.code import CodeReward
from megatron_grpo.plugins.rewards.sandbox import run_program
from megatron_grpo.run.config.settings import RewardConfig
from megatron_grpo.run.rewards.protocol import RowFailure

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


def run_attack(attack, *, landlock="must", **names):
    """What each attempt got: an errno, or what it has done."""
    program = PRELUDE + "".join(f"{name} = {value!r}\n" for name, value in names.items()) + textwrap.dedent(attack) + "\ntell()"
    outcome = run_program(program, as_main=True, seconds=20, memory_mb=512, landlock=landlock)
    assert outcome.clean, outcome.errors
    return json.loads(outcome.output)


def find_allowed(ended):
    return {name: how for name, how in ended.items() if how not in REFUSED}


@pytest.mark.parametrize("landlock", ["must", "never"])
def test_code_program_system_calls_to_outside_are_denied(landlock):
    numbers = {f"{kind} {name}": number[HERE] for kind, calls in CALLS.items() for name, number in calls.items()}
    ended = run_attack("for name, number in numbers.items():\n    call(name, number)", numbers=numbers, landlock=landlock)
    assert ended.keys() == numbers.keys()
    assert find_allowed(ended) == {}


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
def test_code_program_cannot_change_outside_files_or_their_times(tmp_path, landlock):
    path = tmp_path / "precious"
    path.write_text("kept")
    os.setxattr(path, "user.mine", b"0")
    before = [os.stat(one) for one in (path, tmp_path, os.__file__)]
    ended = run_attack(METADATA, path=str(path), landlock=landlock)
    assert find_allowed(ended).keys() == ({"read"} if landlock == "never" else set())
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
def test_code_program_cannot_reach_processes_sockets_or_its_limits(tmp_path, landlock):
    address, abstract = str(tmp_path / "socket"), f"\0megatron_grpo_{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        one.bind(address)
        other.bind(abstract)
        ended = run_attack(OTHERS, landlock=landlock, parent=os.getpid(), address=address, abstract=abstract)
        for listener in (one, other):
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):
                listener.recv(1)
    assert len(ended) == 40 and find_allowed(ended) == {}


@pytest.mark.skipif(os.getuid() != 0, reason="only root has capabilities to give up")
def test_code_program_as_root_cannot_read_files_of_other_users(tmp_path):
    path = tmp_path / "theirs"
    path.write_text("a secret")
    os.chown(path, 12345, 12345)
    path.chmod(0o600)
    tmp_path.chmod(0o755)
    ended = run_attack('tried("read", lambda: open(path).read())', path=str(path), landlock="never")
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
def test_code_program_total_resources_are_limited(bomb, exceeded):
    started = time.monotonic()
    outcome = run_program(bomb, as_main=True, seconds=60, memory_mb=512)
    assert outcome.exceeded == exceeded and not outcome.clean and not outcome.timed_out
    assert time.monotonic() - started < 30


def test_code_cleanup_removes_directories_deeper_than_path_limit(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program = """
import os, time
os.mkdir("closed", 0)
for _ in range(60): os.mkdir("d" * 100); os.chdir("d" * 100)
open("x", "w").close()
time.sleep(60)
"""
    outcome = run_program(program, as_main=True, seconds=60, memory_mb=512)
    assert outcome.exceeded == "directories nested deeper than the maximum path length"
    assert list(tmp_path.iterdir()) == []


def test_code_program_has_no_descriptor_with_the_tests():
    program = """
import os
def f():  # while the tests wait: before, their request may lie in the link, and reading would take it away
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
    assert len(found) == 4, found  # stdin, stdout, stderr, the link to the tests
    return 31337
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


def test_code_program_cannot_find_expected_values_in_its_memory():
    right = 31337271828182  # long enough not to stand in an address or a time by chance
    tests = [f"assert f(1) == {right}", f"assert {right} == f(2)", f"def check(g):\n    assert g(1) == {right}, 'no'\ncheck(f)",
             "assert f() is None", f"assert abs(f(3) - {right}) < 1e-3"]  # fmt: skip
    at_once = run_program(SPY + "found = seen()\ndef f(n=0): return found", tests=tests, seconds=10, memory_mb=512)
    when_asked = run_program(SPY + "def f(n=0): return seen()", tests=tests, seconds=10, memory_mb=512)
    assert at_once.passed == when_asked.passed == (False,) * 5
    others = [f"assert f(1) < {right + 1} and f(2) == {right}", f"for n in (1, 2): assert sorted([f(n)]) == [{right}]"]
    assert run_program(SPY + "def f(n=0): return seen()", tests=others, seconds=10, memory_mb=512).passed == (False, False)


def score_program(program, tests, **columns):
    """What the reward gives a program."""
    reward = CodeReward(RewardConfig(code_timeout=10, code_memory_mb=512, code_num_workers=1, reward_timeout=60), landlock="must")
    return reward([f"```python\n{program}\n```"], tests=[tests], **{name: [value] for name, value in columns.items()})[0]


HUMANEVAL = """
METADATA = {'author': 'jt'}

def check(candidate):
    assert candidate(1) == 2, "the message"
    for given, wanted in [(2, 3), (3, 4)]:
        assert candidate(given) == wanted
    import math
    assert math.isclose(candidate(0.5), 1.5) and abs(candidate(7) - 8) < 1e-6
    assert True, "said when all is well"
    with open(__import__("os").devnull) as nothing:
        assert sorted([candidate(3), candidate(1)]) == [2, 4]
"""
UNITTEST = """
import unittest
class TestF(unittest.TestCase):
    def setUp(self):
        self.given = 1
    def test_values(self):
        self.assertEqual(f(self.given), 2)
        self.assertAlmostEqual(f(0.5), 1.5)
    def test_errors(self):
        with self.assertRaises(TypeError):
            f("one")
if __name__ == "__main__":
    unittest.main()
"""
SHAPES = {
    "HumanEval": HUMANEVAL + "\ncheck(f)", "MBPP": ["assert f(1) == 2", "assert f(2) == 3", "assert math.isclose(f(0.5), 1.5)"],
    "distances": ["assert abs(f(7) - 8) < 1e-6", "assert not f(7) - 8", "assert isclose(f(7), 8)", "assert f(7) in (8, 9)",
                  "assert max(f(7), 1) == 8", "assert 8 in [f(7)]", "assert round(f(0.7)) == 2",
                  "x = f(7)\nx -= 8\nassert x == 0", "assert 8 in f([7])"],
    "unittest": UNITTEST, "pytest": "def test_f():\n    assert f(1) == 2 and isinstance(f(1), int)",
    "with a reference": "def g(n): return n + 1\nfor n in range(5):\n    assert f(n) == g(n)\nassert all(f(n) == g(n) for n in (1, 2))",
}  # fmt: skip
ALIKE = """
class Alike(float):
    def __eq__(self, other): return True
    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__
    def __sub__(self, other): return self
    __rsub__ = __add__ = __radd__ = __abs__ = __round__ = __float__ = __sub__
    def __hash__(self): return 0
"""
ATTACKS = {
    "always equal": ALIKE + "def f(n): return Alike()",
    "always equal, and no number": ALIKE.replace("(float)", "") + "def f(n): return Alike()",
    "always equal, deep inside": ALIKE + "class All(list): __eq__ = lambda self, other: True\ndef f(n): return All([Alike()])",
    "replaces what judges": """
import builtins, sys
def check(*_): pass
def f(n):
    for module in (sys.modules["__main__"], builtins, sys.modules[__name__]):
        for name in ("check", "_verdict", "run_tests", "isinstance", "all", "abs", "sorted", "TestF", "test_f", "g"):
            setattr(module, name, lambda *_, **__: True)
    return 0
""",
    "brings helpers of its own": """
class math: isclose = staticmethod(lambda *_, **__: True)
class unittest:
    class TestCase: pass
    main = staticmethod(lambda: None)
abs = sorted = all = isinstance = lambda *_: True
def f(n): return 0
""",
    "writes on every descriptor": """
import os
for fd in range(3, 64):
    try: os.write(fd, b"true\\n" * 9)
    except OSError: pass
def f(n): return 0
""",
    "takes part in arithmetic": """
class Near:
    def __sub__(self, other): return 0
    __rsub__ = __sub__
    def __round__(self, *_): return 8
    def __contains__(self, other): return True
    def __iter__(self): return iter([])
def f(n): return Near()
def isclose(*_): return True
""",
    "leaves with success": "import os\ndef f(n): os._exit(0)", "raises what ends loops": "def f(n): raise StopIteration",
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_code_correct_program_scores_one_for_every_test_form(shape):
    assert score_program("import math\ndef f(n):\n    return n + 1 if not isinstance(n, list) else [n[0] + 1]", SHAPES[shape]) == 1.0


@pytest.mark.parametrize("attack", ATTACKS)
def test_code_attacks_score_zero(attack):
    tests = [test for shape in SHAPES.values() for test in ([shape] if isinstance(shape, str) else shape)]
    assert score_program(ATTACKS[attack], tests) == 0.0


# Speaks the language of the link by itself: what stands in `message` comes instead of the first answer.
SPEAKS = """
import os, pickle
def text(word): return b"\\x8c" + bytes([len(word)]) + word
def named(module, name): return text(module) + text(name) + b"\\x93"
def say(message):
    for fd in range(3, 64):
        try: os.write(fd, len(message).to_bytes(4, "little") + message)
        except OSError: pass
def gave(value): return b"\\x80\\x04" + text(b"gave") + value + b")\\x87."
"""


@pytest.mark.parametrize(
    "program",
    [
        # A pickle that gives a class another __eq__, names that are no data, a look at the tests' own objects. The last program is honest.
        'say(gave(named(b"fractions", b"Fraction") + b"N}" + text(b"__eq__") + named(b"builtins", b"complex") + b"s\\x86b"))',
        'say(gave(named(b"os", b"getcwd") + b")R"))', 'say(gave(named(b"builtins", b"eval")))',
        'def f(g):\n    say(pickle.dumps(("do", "__getattr__", None, ("__globals__",), {}), 4))\n    return 1',
        "def f(g):\n    return 7",
    ],
)  # fmt: skip
def test_code_program_messages_cannot_change_the_test_process(program):
    test = "import fractions, collections\nassert f is not None\nassert fractions.Fraction(1, 2) == 7 or f(lambda n: n) == 7"
    is_honest = program == "def f(g):\n    return 7"
    assert run_program(SPEAKS + program, tests=[test], seconds=10, memory_mb=512).passed in (((True,),) if is_honest else ((False,), ()))


def test_code_test_without_check_is_rejected_with_reason():
    always = "def f(*_): return True\ndef isclose(*_): return True\ndef check(*_): pass"
    for tests, why in [
        (HUMANEVAL, "does not use the program"), ("f(1)", "compares nothing"), ("import math", "compares nothing"),
        (["assert f(1)", "assert f(1) =="], "is not Python"),
        ("class Own: pass\nassert f(Own()) == 1", "an object of type Own"),
        ("def test_f(fixture): assert f(1)", "does not use the program"),
    ]:  # fmt: skip
        failure = score_program(always, tests)
        assert isinstance(failure, RowFailure) and why in failure.reason, (tests, failure)
    assert score_program("def f(n): return n + 1", HUMANEVAL, entry_point="f") == 1.0
    assert score_program("def f(n): return []", "for n in f(3): assert n == 1") == 0.0


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
        ("assert f() == {'a': 1}", "__import__('collections').Counter('a')", True), ("assert f() * 1j == -1", "1j", True),
        ("assert 2 == f()", "__import__('fractions').Fraction(2)", True), ("assert f() == 1", "float('nan')", False),
        ("assert str(f()) == '0.10'", "__import__('decimal').Decimal('0.10')", True), ("assert f() == -1", "-1", True),
        ("assert f().year == 2020", "__import__('datetime').date(2020, 1, 1)", True), ("assert f()(3) == 4", "lambda n: n + 1", True),
        ("assert f() == [1]", "__import__('numpy').array([1, 2])", False), ("assert list(f()) == [0, 1]", "iter(range(2))", True),
        ("assert (f() == 1).all() and f().shape == (2,)", "__import__('numpy').ones(2)", True),
        ("for n in (1, 1): assert f() == 1", "1", True), ("assert f() == 10 ** 2, 'a message'", "100", True),
    ],
)  # fmt: skip
def test_code_comparison_outside_sandbox_equals_python(test, value, passes):
    """The same statement in this process is the oracle."""
    namespace = {}
    exec(f"def f(): return {value}", namespace)
    try:
        exec(test, namespace)
        here = True
    except (AssertionError, TypeError, ValueError):
        here = False
    assert here == passes
    assert run_program(f"def f(): return {value}", tests=[test], seconds=20, memory_mb=512).passed == (passes,)


def test_code_tests_can_use_program_objects_and_see_list_changes():
    program = """
import dataclasses
@dataclasses.dataclass
class Stack:
    items: "list[int]"
    def push(self, item): self.items.append(item)
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __enter__(self): return self
    def __exit__(self, *what): self.items.clear()
class Empty(ValueError): pass
def in_place(numbers): numbers.sort()
def clear_all(numbers): numbers.clear(); return []
def twice(g, n): return g(g(n))
def fail(target): raise Empty("nothing", target)
def sum(a, b): return 6
"""
    right = [
        "with Stack([]) as stack:\n    stack.push(3)\n    assert len(stack) == 1 and list(stack) == [3]\nassert stack.items == []",
        "numbers = [3, 1, 2]\nin_place(numbers)\nassert numbers == [1, 2, 3]",
        "assert twice(lambda n: n + 1, 3) == 5", "assert sum(10, 15) == 6",
        "try:\n    fail(target=4)\nexcept ValueError as error:\n    assert error.args == ('nothing', 4)",
        "try:\n    fail(1)\n    assert False\nexcept ValueError:\n    pass",
    ]  # fmt: skip
    wrong = [
        "numbers = [3, 1, 2]\nassert clear_all(numbers) == sorted(numbers)",
        "assert Stack([1]) == Stack([1])",
        "assert sum(1, 2) == len([1] * 6) == 6",
    ]
    passed = run_program(program, tests=right + wrong, seconds=10, memory_mb=512).passed
    assert passed == (True,) * len(right) + (False,) * len(wrong)


def test_code_without_landlock_runs_only_if_allowed():
    """In a process whose kernel answers as one without it: a seccomp filter of its own, under which the sandbox lays its filter."""
    program = """
import ctypes, errno
from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.plugins.rewards import jail
from megatron_grpo.plugins.rewards.sandbox import run_program
from megatron_grpo.run.rewards.loading import load_rewards
from megatron_grpo.run.config.settings import Config
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
tests = ["assert f() == 1", "assert f(1) == 1"]
print(code.function(completions=["def f(): return 1"], tests=[tests]))
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stderr
    assert "has no Landlock" in told.stdout and "code_without_landlock true" in told.stdout and told.stdout.endswith("[0.5]\n")
