"""The sandbox: what code may do in it, and each escape, with the protections and with those against it taken away."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from lockstep.errors import UserError
from lockstep.rl.grading.sandbox import SandboxLimits, missing_protections, run_code
from lockstep.rl.grading.sandbox.namespaces import open_to_all
from lockstep.rl.grading.sandbox.run import _run
from lockstep.workers.processes import descendants
from tests.rl.processes import is_alive, running

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or bool(missing_protections()),
    reason="this machine allows no sandbox: lockstep.rl.grading.sandbox.missing_protections() says what is missing",
)
EVERYTHING = ("namespaces", "keys", "landlock", "user")
LIMITS = SandboxLimits(seconds=60)  # the machine that runs tests may be busy


@pytest.fixture
def folder():
    """One for every user; those that pytest makes are their owner's alone."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def _run_unprotected(source, given="", limits=LIMITS):
    """The same code with the protections planted away. Nothing that tests give to it can do harm."""
    return _run(source, given, limits, (), allow_unprotected=True, without=EVERYTHING)[0]


def test_code_reads_its_input_prints_and_exits_as_a_program_does():
    source = "import math, sys\nprint(math.factorial(int(input())))\nprint('no', file=sys.stderr)\nsys.exit(3)"
    result = run_code(source, "20\n", LIMITS)
    assert (result.exit, result.stdout, result.stderr, result.cause) == (3, "2432902008176640000\n", "no\n", "")
    assert run_code("import os; os.kill(os.getpid(), 11)", "", LIMITS).exit == -signal.SIGSEGV


def test_half_a_surrogate_pair_is_the_codes_error():
    assert "SyntaxError" in run_code("print('\ud800')", "", LIMITS).stderr
    reads = "import sys; print(sys.stdin.buffer.read())"
    assert run_code(reads, "\udc80", LIMITS).stdout == r"b'\xed\xb2\x80'" + "\n"


ATTEMPTS = """
import json, os, socket, tempfile
folder, port, victim = json.loads(input())
found = {}

def attempt(name, function, *arguments):
    try:
        found[name] = function(*arguments)
    except OSError as error:
        found[name] = type(error).__name__

def is_open(number):
    try:
        return bool(os.fstat(number))
    except OSError:
        return False

def send(kind):
    with socket.socket(socket.AF_INET, kind) as connection:
        connection.connect(("127.0.0.1", port))
        return connection.send(b"x")

attempt("scratch", lambda: [open("x", "w").write("1"), tempfile.TemporaryFile().write(b"1"), sorted(os.listdir("."))])
attempt("read", lambda: open(f"{folder}/secret").read())
attempt("write", lambda: open(f"{folder}/new", "w").write("x"))
for path in ("/new", "/usr/new", "/dev/new", "/etc/new"):
    attempt(path, lambda: protected and open(path, "w").write("x"))
attempt("environment", lambda: [name for name in os.environ if name != "LC_CTYPE"])  # which Python sets by itself
attempt("files", lambda: [number for number in range(3, 256) if is_open(number)])
attempt("stream", send, socket.SOCK_STREAM)
attempt("datagram", send, socket.SOCK_DGRAM)
attempt("kill", os.kill, victim, 9)
attempt("kill the first of its namespace", lambda: protected and os.kill(os.getppid(), 9))
print(json.dumps(found))
"""


def test_code_reaches_nothing_outside_and_without_the_protections_it_would(folder, monkeypatch):
    monkeypatch.setenv("SECRET", "key")
    (folder / "secret").write_text("key")
    victim = subprocess.Popen(["sleep", "600"])
    with socket.socket() as stream, socket.socket(type=socket.SOCK_DGRAM) as datagram:
        stream.bind(("127.0.0.1", 0))
        stream.listen()
        datagram.bind(stream.getsockname())
        given = json.dumps([str(folder), stream.getsockname()[1], victim.pid]) + "\n"
        outside = "/new", "/usr/new", "/dev/new", "/etc/new"
        try:
            for _ in range(2):
                run = run_code(f"protected = True{ATTEMPTS}", given, LIMITS)
                found = json.loads(run.stdout)
                assert found["scratch"] == [1, 1, ["main.py", "x"]], "which is gone with the run"
                assert found["environment"] == found["files"] == []
                assert found["read"] == found["write"] == "FileNotFoundError" and found["kill"] == "ProcessLookupError"
                assert not any(isinstance(found[name], int) for name in ("stream", "datagram", *outside))
                assert found["kill the first of its namespace"] is None, "it cannot be killed there"
            assert victim.poll() is None and not any(Path(path).exists() for path in outside)
            # Landlock or the other user would be enough by itself.
            other_user = os.getuid() == 0 and open_to_all(os.path.realpath(sys._base_executable))
            kill = f"import os\nos.kill({victim.pid}, 9)"
            for protection in ("landlock", "user") if other_user else ("landlock",):
                without = tuple(name for name in EVERYTHING if name != protection)
                result = _run(kill, "", LIMITS, (), allow_unprotected=True, without=without)[0]
                assert "PermissionError" in result.stderr and victim.poll() is None
            found = json.loads(_run_unprotected(f"protected = False{ATTEMPTS}", given).stdout)
            assert (found["read"], found["write"], found["stream"], found["datagram"]) == ("key", 1, 1, 1)
            assert (folder / "new").exists() and victim.wait(20) == -signal.SIGKILL
        finally:
            victim.kill()
            victim.wait()


def test_a_folder_that_is_given_can_be_read_and_not_written_and_the_home_folder_cannot_be_seen(folder):
    (folder / "given").write_text("data")
    code = f"print(open('{folder}/given').read())\nopen('{folder}/given', 'w')"
    result = run_code(code, "", LIMITS, readable=[str(folder)])
    assert result.stdout == "data\n" and "Read-only file system" in result.stderr
    assert (folder / "given").read_text() == "data"
    seen = run_code(f"import os; print(os.listdir('{Path.home()}'))\n", "", LIMITS)
    # An interpreter that is installed in it is all that can be seen of it.
    assert seen.exit == 1 or "pyenv" in seen.stdout or "conda" in seen.stdout, seen.stdout


KEYS = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
add, control = (248, 250) if os.uname().machine == "x86_64" else (217, 219)
SESSION, JOIN, UPDATE, SEARCH, READ = -3, 1, 2, 10, 11
"""
FIND = """
key = libc.syscall(control, SEARCH, SESSION, b"user", b"password", 0)
data = ctypes.create_string_buffer(16)
print("found" if key > 0 else "nothing", flush=True)
if key > 0:
    libc.syscall(control, READ, key, data, ctypes.c_size_t(16))
    libc.syscall(control, UPDATE, key, b"forged", ctypes.c_size_t(6))
libc.syscall(add, b"user", b"left", b"x", ctypes.c_size_t(1), SESSION)
print(data.value)
"""


def test_it_has_none_of_the_callers_keys():
    # In a process of its own: what runs the tests keeps its keys.
    script = f"""{KEYS}
from lockstep.rl.grading.sandbox.run import SandboxLimits, _run
if libc.syscall(control, JOIN, None) < 0:
    sys.exit("no keyrings here: " + os.strerror(ctypes.get_errno()))
def key(name):
    return libc.syscall(control, SEARCH, SESSION, b"user", name, 0)
assert libc.syscall(add, b"user", b"password", b"secret", ctypes.c_size_t(6), SESSION) > 0
for without in ((), ("keys",)):
    print(_run({KEYS + FIND!r}, "", SandboxLimits(seconds=60), (), bool(without), without=without)[0].stdout.split())
    data = ctypes.create_string_buffer(16)
    libc.syscall(control, READ, key(b"password"), data, ctypes.c_size_t(16))
    print(data.value, key(b"left") > 0)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    if run.stderr.startswith("no keyrings here"):
        pytest.skip(run.stderr)
    alone, kept, shared, changed = run.stdout.splitlines()
    assert (alone, kept) == ("['nothing', \"b''\"]", "b'secret' False"), run.stderr
    assert (shared, changed) == ("['found', \"b'secret'\"]", "b'forged' True")


def test_it_cannot_mount_what_the_limits_do_not_count():
    # In a user namespace of its own anyone may mount; Landlock forbids it all the same.
    code = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print(libc.unshare(0x10000000 | 0x20000), libc.mount(b"tmpfs", b"/scratch", b"tmpfs", 0, b"size=1m"))
"""
    assert run_code(code, "", LIMITS).stdout.split()[1] == "-1"
    without = _run(code, "", LIMITS, (), allow_unprotected=True, without=("landlock",))[0]
    assert without.stdout.split()[1] == "0"


FORK = """
import os, time
children = 0
for _ in range(60):  # as a bomb does, but no further
    try:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        children += 1
    except OSError:
        break
print(children, flush=True)
"""


def test_a_fork_bomb_ends_at_the_limit_and_nothing_of_it_is_left():
    limits = SandboxLimits(seconds=60, processes=16)
    assert int(run_code(FORK, "", limits).stdout) == 15, "16 with the one that forks"
    assert int(run_code(FORK, "", SandboxLimits(seconds=60, processes=100)).stdout) == 60
    assert not running("main.py"), "the namespace ends with the code"


FILL = """
import os
written = 0
try:
    for number in range(24):  # 96 MB, in files that are small by themselves
        with open(str(number), "wb", 0) as file:
            for _ in range(4):
                written += file.write(bytes(10**6))
except OSError as error:
    print(error.strerror)
print(written)
"""


def test_it_does_not_fill_the_disk():
    limits = SandboxLimits(seconds=60, scratch_mib=16)
    said, written = run_code(FILL, "", limits).stdout.splitlines()
    assert said == "No space left on device" and 15 * 10**6 < int(written) < 17 * 10**6
    assert _run_unprotected(FILL, limits=limits).stdout == "96000000\n"


def test_it_does_not_print_more_than_the_bound():
    code = "import sys\nfor _ in range(50): sys.stdout.write('x' * 10**6)"
    result = run_code(code, "", LIMITS)
    assert (result.cause, result.exit, len(result.stdout)) == ("output", None, 64 * 1024)
    assert len(run_code("print('x' * 10**5)", "", SandboxLimits(seconds=60, output_kib=100)).stdout) == 10**5 + 1


def test_code_that_does_not_end_is_ended_with_all_it_started():
    code = "import os, time\nif os.fork() == 0: os.setsid()\nos.close(1)\ntime.sleep(1000)"
    began = time.monotonic()
    result = run_code(code, "", SandboxLimits(seconds=0.5))
    assert (result.cause, result.exit) == ("timeout", None) and time.monotonic() - began < 100
    assert not running("main.py")


def test_code_ends_with_who_runs_it_even_when_that_is_killed():
    script = (
        "from lockstep.rl.grading.sandbox import *; "
        "run_code('import time; time.sleep(600)', '', SandboxLimits(seconds=900))"
    )
    runner = subprocess.Popen([sys.executable, "-c", script])
    until = time.monotonic() + 100
    try:
        while not (started := {*running("main.py")} & {*descendants(runner.pid)}):
            assert time.monotonic() < until and runner.poll() is None, "it does not start"
            time.sleep(0.02)
    finally:
        runner.kill()
        runner.wait()
    while any(map(is_alive, started)):
        assert time.monotonic() < until, "the code outlives who runs it"
        time.sleep(0.02)


def test_it_has_no_more_memory_than_the_limit():
    code = "x = bytearray(300 * 2**20)"
    assert "MemoryError" in run_code(code, "", SandboxLimits(seconds=60, memory_mib=200)).stderr
    assert run_code(code, "", SandboxLimits(seconds=60, memory_mib=600)).exit == 0


@pytest.mark.skipif(
    os.getuid() != 0 or not os.access("/proc/sys/kernel/shmall", os.W_OK),
    reason="only root may set the namespace's limit",
)
def test_it_has_no_shared_memory_that_no_limit_counts():
    code = "import ctypes\nprint(ctypes.CDLL(None).shmget(0, 4096, 0o1600))"
    before = Path("/proc/sys/kernel/shmall").read_text()
    assert run_code(code, "", LIMITS).stdout == "-1\n"
    assert Path("/proc/sys/kernel/shmall").read_text() == before, "the limit is the sandbox's own"


@pytest.mark.parametrize("name", ["namespaces", *(pytest.param(n, marks=pytest.mark.slow) for n in EVERYTHING[1:])])
def test_where_the_kernel_offers_too_little_nothing_runs(name):
    if name == "user" and os.getuid() != 0:
        pytest.skip("only root can become another user")
    code = "print('ran')"
    with pytest.raises(
        UserError, match=f"is not run here, because the kernel cannot confine it sufficiently.*{name} \\(left out\\)"
    ):
        _run(code, "", LIMITS, (), without=(name,))
    assert _run(code, "", LIMITS, (), allow_unprotected=True, without=(name,))[0].stdout == "ran\n"
