"""The ready reward `code`: what passes, and that hostile code neither passes nor gets out."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from fastrl.rewards import sandbox
from fastrl.rewards.code_reward import make_code_reward
from fastrl.rewards.functions import load_reward
from fastrl.rewards.identity import identity_of
from tests.patience import PATIENCE


def cannot_isolate() -> str:
    try:
        sandbox.check_isolation()
    except (sandbox.CannotIsolate, OSError) as error:
        return str(error)
    return ""


needs_isolation = pytest.mark.skipif(bool(cannot_isolate()), reason=cannot_isolate() or "-")
ADDS = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"]
ECHO = [{"input": "4\n", "output": "16"}]


def score(code: str, tests: Any, entry_point: str | None = None, **limits: Any) -> float | None:
    reward = make_code_reward(**{"seconds": 3, **limits})
    return reward(completions=[code], tests=[tests], entry_point=[entry_point])[0]


GOOD = """Here it is:
```python
from dataclasses import dataclass
from collections import Counter, deque

def add(a, b):
    return a + b

def halve(x):
    if x % 2:
        raise ValueError("odd")
    return x // 2

def order(items):
    items.sort()

def count(n):
    yield from range(n)

@dataclass
class Point:
    x: int
    y: tuple = (1, 2)
    def moved(self, by):
        return Point(self.x + by, self.y)

def counted(text):
    return Counter(text)

def ends(items):
    return deque(items, maxlen=2), {1.5: b"x", None: {1}}
```
I am sure."""
WORK = [
    "assert add(2**70, 1) == 2**70 + 1 and add([1], [(2,)]) == [1, (2,)]",
    "try:\n halve(3)\nexcept ValueError as error:\n assert str(error) == 'odd'\nelse:\n 1 / 0",
    "numbers = [3, 1, 2]\norder(numbers)\nassert numbers == [1, 2, 3]",
    "assert list(count(3)) == [0, 1, 2] and next(count(1)) == 0",
    "p = Point(1).moved(2)\nassert p.x == 3 and p.y == (1, 2) and 'x=3' in str(p)",
    "assert counted('aab') == {'a': 2, 'b': 1}",
    "from collections import deque\nassert ends('abc') == (deque('bc'), {1.5: b'x', None: {1}})",
    "assert math.isclose(halve(4), 2.0)",
    "def check(candidate):\n    assert candidate(1, 1) == 2\ncheck(add)",
    "assert add(1, 2) == 4",
]


@needs_isolation
def test_the_score_is_the_share_of_tests_that_pass() -> None:
    reward = load_reward('code:{"workers": 2}')
    program = "n = int(input())\nprint(n * n, ' ')\n"
    said = [
        *(GOOD, "def add(a, b): return a + b", "no code", program),
        *(program, [{"role": "assistant", "content": program}], program + "raise SystemExit(1)"),
    ]
    pairs = [{"input": "2", "output": "4\n\n"}, {"input": "3\n", "output": "8"}]
    columns = {"input": ["2"] * 10, "output": ["4"] * 10}
    tests = [WORK, ADDS, ADDS[0], json.dumps(pairs), None, columns, columns]
    assert reward(completions=said, tests=tests) == [0.9, 1.0, 0.0, 0.5, None, 1.0, 0.0]
    with pytest.raises(ValueError, match=r"row 1 of the column tests has .*'input': 3.*output"):
        reward(completions=["", ""], tests=[ADDS, [{"input": 3, "output": "3"}]])
    with pytest.raises(ValueError, match=r"row 0 of .* no Python"):
        reward(completions=[""], tests=["assert ("])


# Each would have a score by TRL-like judging in one process, where exec() ran both.
FORGERIES = {
    "empty": "",
    "long": "a" * 10_000_000,
    "other scripts": "جمع = 'é🙂'\ndef add(a, b): return جمع",
    "half a surrogate": "add = lambda a, b: '\ud800'",
    "NUL": "def add(a, b):\0 return a + b",
    "deeply nested": "add = " + "(" * 100_000,
    "a huge number": "add = lambda a, b: 10**100_000",
    "endless answers": "def add(a, b):\n l = []\n l.append(l)\n return l",
    "exits early": "import os, sys\ntry: sys.exit(0)\nfinally: os._exit(0)",
    "exits as it is called": "import os\ndef add(a, b): os._exit(0)",
    "is equal to all": "class A:\n __eq__ = __ge__ = lambda *_: True\nadd = lambda a, b: A()",
    "is a number equal to all": "class A(int):\n __eq__ = lambda *_: True\nadd = lambda a, b: A(9)",
    "a dict that has all": "class A(dict):\n __eq__ = lambda *_: True\nadd = lambda a, b: A()",
    "replaces builtins": "import builtins\nbuiltins.AssertionError = Exception\n"
    "builtins.exec = builtins.compile = builtins.all = lambda *_, **__: True\nassert_ = all",
    "replaces the encoder": "import __main__, json\n__main__.encode = lambda *_: True\n"
    "json.dumps = lambda *_: '[true, true, [null, null]]'\nadd = 1",
    "writes verdicts": "import os\nfor fd in range(256):\n try: os.write(fd, b'11')\n"
    " except OSError: pass",
    "writes answers": "import os\nfor fd in range(3, 256):\n"
    ' try: os.write(fd, b\'[true, ["list", ["add"]], []]\\n[true, 3, []]\\n\' * 3)\n'
    " except OSError: pass\nimport time; time.sleep(60)",
    "looks at frames": "import sys, gc\nf = sys._getframe()\nwhile f:\n f.f_globals['job'] = 0\n"
    " f = f.f_back\nadd = lambda *a: [x for x in gc.get_objects() if x == 'ab' * 1][:1]",
    "traces": "import sys\nsys.settrace(lambda *_: None)\nsys.setrecursionlimit(10)",
}


@needs_isolation
def test_no_score_is_forged() -> None:
    reward = make_code_reward(seconds=1)
    tests = [[*ADDS, "assert add(1, 1) != 3", "assert add(1, 1) in [2]"]] * len(FORGERIES)
    scores = reward(completions=list(FORGERIES.values()), tests=tests)
    # Anything but 3 is not 3, as an honest 10**100000 is; objects are not compared at all.
    right = dict.fromkeys(FORGERIES, 0.0)
    right |= {"other scripts": 0.25, "is a number equal to all": 0.25}
    right |= {"a dict that has all": 0.25, "looks at frames": 0.25}
    assert dict(zip(FORGERIES, scores, strict=True)) == right


@needs_isolation
def test_builtins_and_modules_are_the_real_ones_but_for_the_entry_point() -> None:
    code = "def add(a, b): return 9\ndef abs(x): return 0\nclass math: isclose = lambda *_: True"
    tests = ["assert abs(add(1, 2) - 3) == 0", "assert math.isclose(add(1, 2), 3)"]
    assert score(code, tests) == score(code, tests, "add") == 0.0
    assert score("def bisect(x): return x", ["assert bisect(1) == 1"]) == 0.0
    assert score("def bisect(x): return x", ["assert bisect(1) == 1"], "bisect") == 1.0


@needs_isolation
def test_a_program_has_no_expected_output_to_print() -> None:
    looks = "import sys, os, gc\nprint([x for x in gc.get_objects() if '16' in str(x)][:0])"
    for program in ("import os; os._exit(0)", "print('1' * 100)", "print(16 == 16)", looks):
        assert score(program, ECHO) == 0.0


# What each does is seen by what is there afterwards, and by what it says it could do.
ATTACKS = {
    "reads": "import os\nfor path in ('/etc/passwd', '/../etc/hosts', '/proc/1', {outside!r}):\n"
    " assert not os.path.exists(path), path\n"
    "home = {home!r}\nif os.path.isdir(home):\n"  # Python may be installed in it
    " assert not [x for x in os.listdir(home) if os.path.isfile(os.path.join(home, x))]\n"
    "assert not os.environ.keys() & {{'SECRET_TOKEN', 'USER'}}",
    "writes": "import os\nfor path in ('/x', '/usr/lib/x', os.__file__, {outside!r} + '/x'):\n"
    " try: open(path, 'w').write('x'); raise SystemExit(path)\n except OSError: pass",
    "deletes": "import json, os, shutil\ncached = os.path.dirname(json.__cached__)\n"
    "was = os.path.exists(cached)\nfor path in ('/tmp', '/dev', cached, {outside!r}):\n"
    " shutil.rmtree(path, ignore_errors=True)\n"
    "assert os.path.exists('/tmp') and os.path.exists(cached) == was",
    "connects": "import socket\n"
    "for address in (('127.0.0.1', {port}), ('8.8.8.8', 53), {abstract!r}):\n"
    " s = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)\n"
    " s.settimeout(1)\n try: s.connect(address); raise SystemExit(1)\n except OSError: pass",
    "runs programs": "import subprocess\nfor path in ('/bin/sh', '/usr/bin/env', 'python3'):\n"
    " try: subprocess.run([path, '-c', '']); raise SystemExit(path)\n except OSError: pass",
    "asks for more": "import os, resource\nfor name in ('CPU', 'AS', 'FSIZE', 'NPROC', 'NOFILE'):\n"
    " try:\n  resource.setrlimit(getattr(resource, 'RLIMIT_' + name), (-1, -1))\n"
    "  raise SystemExit(name)\n except ValueError: pass\n"
    "try: os.nice(-1); raise SystemExit(1)\nexcept OSError: pass",
    "kills": "import os, signal\nfor pid in (os.getppid(), 1, {pid}):\n"
    " try: os.kill(pid, signal.SIGKILL)\n except OSError: pass",
    "starts processes": "import os, time\ntry:\n for _ in range(20):\n"
    "  if os.fork() == 0: time.sleep(600)\n raise SystemExit(1)\nexcept OSError: pass",
    "regains rights": "import ctypes, os\nlibc = ctypes.CDLL(None)\n"
    "assert libc.unshare(0x20000) and libc.mount(b'x', b'/tmp', b'tmpfs', 0, 0) and os.getuid()\n"
    "assert libc.ptrace(16, 1, 0, 0), 'attached to process 1'",
}
BOUND = {
    "forks": "import os\nwhile True:\n try: os.fork()\n except OSError: pass",
    "ignores signals": "import signal, time\nfor n in range(1, 65):\n try:"
    " signal.signal(n, signal.SIG_IGN)\n except (OSError, ValueError): pass\nwhile True: pass",
    "daemonises": "import os, time\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n"
    "  time.sleep(600)\n  raise SystemExit\nos._exit(1)",
    "sleeps": "import time; time.sleep(600)",
    "stops": "import os, signal\nfor pid in (os.getppid(), os.getpid()):\n"
    " os.kill(pid, signal.SIGSTOP)",
    "crashes": "import ctypes; ctypes.string_at(0)",
    "starts threads": "import threading, time\nwhile True:\n try: threading.Thread(\n"
    "  target=time.sleep, args=(600,)).start()\n except RuntimeError: pass",
    "allocates": "x = bytearray(10 << 30)",
    "allocates slowly": "x = []\nwhile True: x.append(bytes(1 << 16))",
    "fills files": "for i in range(9999):\n with open(f'{i}', 'wb') as f: f.write(bytes(1 << 24))",
    "makes folders": "import os\nfor i in range(10**6): os.mkdir(str(i))",
    "prints": "while True: print('16' * 10_000)",
    "prints errors": "import sys\nwhile True: print('16' * 10_000, file=sys.stderr)",
    "closes its streams": "import os, time\nfor fd in range(3): os.close(fd)\ntime.sleep(600)",
}


@needs_isolation
def test_nothing_is_reached_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        (tmp_path / "kept").touch()
        with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as own:
            known = {
                "outside": str(tmp_path), "home": os.path.expanduser("~"), "pid": bystander.pid,
                "abstract": f"\0fastrl {os.getpid()}",
            }  # fmt: skip
            known["port"] = server.getsockname()[1]
            own.bind(known["abstract"])
            own.listen()
            programs = [x.format(**known) + "\nprint(16)" for x in ATTACKS.values()]
            reward = make_code_reward(seconds=5)
            scores = reward(completions=programs, tests=[ECHO] * len(programs))
        assert dict(zip(ATTACKS, scores, strict=True)) == dict.fromkeys(ATTACKS, 1.0)
        assert bystander.poll() is None
        assert [x.name for x in tmp_path.iterdir()] == ["kept"]
    finally:
        bystander.kill()
        bystander.wait()


@needs_isolation
def test_hostile_programs_end_and_leave_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = alive_below(os.getpid())
    reward = make_code_reward(seconds=0.5, memory_mib=256, workers=4)
    scores = reward(completions=list(BOUND.values()), tests=[ECHO] * len(BOUND))
    assert scores == [0.0] * len(BOUND)
    stays = "import os, time\nif os.fork():\n print(16)\nelse:\n os.setsid(); time.sleep(600)"
    assert score(stays, ECHO) == 1.0
    assert not list(tmp_path.iterdir())
    assert alive_below(os.getpid()) == before


HOARDS = """
import ctypes, os
held = 0
try:
    while True:
        held += os.write(os.memfd_create("x"), bytes(1 << 20))
except OSError:
    print(held <= 64 << 20)
libc = ctypes.CDLL(None)
print(libc.shmget(0, ctypes.c_size_t(1 << 20), 0o1600), libc.msgget(0, 0o1600))
"""


@needs_isolation
@pytest.mark.skipif(os.geteuid() != 0, reason="others may not limit what System V has")
def test_memory_that_no_process_has_is_bounded() -> None:
    assert score(HOARDS, [{"input": "", "output": "True\n-1 -1"}], disk_mib=1) == 1.0


def alive_below(process: int) -> set[int]:
    """The processes that one has started, and those of these."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(path.parent.name)] = int(parent)
    found = {process}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {process}


KILLED = """
import threading
from fastrl.rewards.sandbox import Sandbox
sandbox = Sandbox(10_000, 1 << 29, 1 << 20, 4)
with sandbox.started("print(1, flush=True); import time; time.sleep(10_000)") as child:
    child.stdout.readline()
    print(child.pid, flush=True)
    threading.Event().wait()
"""


@needs_isolation
def test_other_limits_are_another_reward() -> None:
    one, same, other = (make_code_reward(seconds=x) for x in (1, 1, 2))
    assert identity_of(one) == identity_of(same) != identity_of(other)


@needs_isolation
def test_a_run_that_is_killed_leaves_no_program() -> None:
    run = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True)
    with run:
        assert run.stdout is not None
        child = int(run.stdout.readline())
        programs = alive_below(child)
        run.kill()
    assert len(programs) == 2
    end = time.monotonic() + PATIENCE
    while any(os.path.exists(f"/proc/{program}") for program in programs):
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="programs are run on Linux alone")
def test_without_isolation_it_is_refused_or_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_why_not", lambda: "unshare: Operation not permitted")
    with pytest.raises(sandbox.CannotIsolate, match=r"unshare: Operation.*allow_unisolated=True"):
        load_reward("code")
    with pytest.warns(UserWarning, match="this process's own rights"):
        reward = make_code_reward(allow_unisolated=True)
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    code = "import os\ndef add(a, b): return a + b + ('SECRET_TOKEN' in os.environ)"
    assert reward(completions=[code], tests=[ADDS[:1]]) == [1.0]
    with pytest.warns(UserWarning, match="this process's own rights"):
        reward = make_code_reward(allow_unisolated=True, seconds=0.5)
    assert reward(completions=[BOUND["sleeps"]], tests=[ECHO]) == [0.0]
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(OSError, match="on Linux alone"):
        load_reward("code")


@pytest.mark.parametrize("wrong", ["seconds", "memory_mib", "disk_mib", "processes", "workers"])
def test_limits_that_are_none_are_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=f"{wrong} must be a positive number"):
        make_code_reward(**{wrong: 0})
