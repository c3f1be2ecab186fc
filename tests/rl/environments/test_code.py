"""Code that must pass tests: what passes, and what code tries in order to pass without being right."""

import json
import sys

import pytest

from lockstep.errors import UserError
from lockstep.rl.environments.code import Code, run_tests
from lockstep.rl.environments.protocol import Example
from lockstep.rl.grading.sandbox import missing_protections
from lockstep.rl.rollouts.prompts import examples_of
from tests.rl.conversations.scripted import converse

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or bool(missing_protections()),
    reason="this machine allows no sandbox: lockstep.rl.grading.sandbox.missing_protections() says what is missing",
)

TESTS = "assert add(2, 3) == 5\nassert add(-1, 1) == 0\nassert add(10, 5) == 15"
RIGHT = "def add(a, b):\n    return a + b"


def share(code, tests=TESTS, seconds=10.0):
    passed, count = run_tests(code, tests, seconds)
    return passed / max(1, count)


def test_right_code_passes_and_wrong_code_passes_what_it_gets_right():
    assert run_tests(RIGHT, TESTS, 10.0) == (3, 3)
    assert run_tests("def add(a, b):\n    return 5 if a == 2 else 0", TESTS, 10.0) == (2, 3)
    assert run_tests("add = 3", TESTS, 10.0) == (0, 3)
    assert run_tests(RIGHT + "\nraise SystemExit", TESTS, 10.0) == (0, 3), "a module that raises cannot be imported"


ALL_KINDS = """
import math
from collections import Counter

CASES = [(1, 2), (3, 4)]

assert all(echo(case) == case for case in CASES)
for case in CASES:
    assert echo(case) == case
assert math.isnan(echo(math.nan)) and echo(-math.inf) == -math.inf
assert echo({(1, "a"): {1, 2}, None: [b"x", 1j, frozenset()]}) == {(1, "a"): {1, 2}, None: [b"x", 1j, frozenset()]}
assert list(squares(3)) == [0, 1, 4]
assert echo(x=10**5000) == 10**5000
assert Counter(echo("abca"))["a"] == 2
try:
    fails()
    assert False
except KeyError:
    pass

def test_function():
    assert echo(True) is True

import unittest
class TestEcho(unittest.TestCase):
    def setUp(self):
        self.value = 3
    def test_value(self):
        self.assertEqual(echo(self.value), 3)
    def test_error(self):
        with self.assertRaises(KeyError):
            fails()

class TestPlain:
    def test_one(self):
        assert echo(1) == 1
"""


def test_tests_of_all_kinds_call_the_code_with_plain_data():
    code = (
        "class Missing(KeyError): pass\ndef echo(x): return x\n"
        "def squares(n):\n    yield from (i * i for i in range(n))\n"
        "def fails(): raise Missing('x')"
    )
    assert run_tests(code, ALL_KINDS, 10.0) == (12, 12)
    assert run_tests("def echo(x): return x\n", ALL_KINDS, 10.0) == (9, 12)


# Each would pass the tests in one process with them.
FORGED = {
    "an object that equals everything": "class A:\n    __eq__ = lambda *a: True\nadd = lambda a, b: A()",
    "an early exit": "def add(a, b):\n    import os; os._exit(0)",
    "a forged verdict": "print('[3, 3]', flush=True)\nprint('OK')\ndef add(a, b): print('[3, 3]', flush=True)",
    "a verdict on every descriptor": """
import os
for n in range(64):
    try: os.write(n, b'[3, 3]\\n{"value": true}\\n')
    except OSError: pass
def add(a, b): return None
""",
    "an end of the parent with a verdict": """
import os
def add(a, b):
    os.write(1, b'[3, 3]'); os.kill(os.getppid(), 9)
""",
    "other built-in functions": """
import builtins
builtins.all = builtins.abs = builtins.isinstance = lambda *a: True
def add(a, b): raise StopIteration
""",
    "tests in the frames above": """
import sys, gc
def add(a, b):
    frame = sys._getframe()
    while frame:
        for value in list(frame.f_globals.values()) + list(frame.f_locals.values()):
            if isinstance(value, str) and 'assert add(' + '2' in value: return 5
        frame = frame.f_back
    if any(isinstance(o, str) and 'assert add(' + '2' in o for o in gc.get_objects()): return 5
""",
    "tests in files": """
import os, sys
def add(a, b):
    for folder, _, names in os.walk('/'):
        if folder.startswith(('/usr', '/lib', '/bin', sys.prefix)): continue
        for name in names:
            try: text = open(os.path.join(folder, name), errors='replace').read(10**6)
            except OSError: continue
            if 'add(2' + ', 3)' in text: return 5
""",
    "the parent's memory": """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def add(a, b):
    # PTRACE_ATTACH, then PTRACE_SEIZE
    if libc.ptrace(16, os.getppid(), 0, 0) == 0 or libc.ptrace(0x4206, os.getppid(), 0, 0) == 0: return a + b
""",
    "the parent's files": """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def add(a, b):
    parent = os.pidfd_open(os.getppid())
    if libc.syscall(438, parent, 1, 0) >= 0: return a + b
""",
}


QUICK = ("an object that equals everything", "a forged verdict", "other built-in functions", "the parent's files")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n not in QUICK else ()) for n in FORGED])
def test_code_cannot_forge_what_it_does_not_compute(name):
    assert share(FORGED[name]) == 0.0


def test_no_built_in_and_no_exception_of_the_codes_own_decides_a_test():
    tests = "assert all(map(add, [1, 2], [3, 4]))\nassert abs(add(1, 2) - 3) < 1e-6\nassert isinstance(add(1, 2), int)"
    assert share("class E(StopIteration): pass\ndef add(a, b): raise E", tests) == 0.0
    other = "def abs(x): return 0\ndef isinstance(*x): return True\ndef all(x): return True\ndef add(a, b): return 'x'"
    assert share(other, tests) == 1 / 3, "a text is true, and that is all that the first of these asks"


HANGING = [
    "while True: pass",
    "def add(a, b):\n    while True: print('x' * 10000)",
    "def add(a, b): return [0] * 10**12",
    "def add(a, b):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x",
    "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)",
]


@pytest.mark.parametrize(
    "code",
    [
        "def add(a, b):\n    import os\n    while True: os.fork()",
        *(pytest.param(code, marks=pytest.mark.slow) for code in HANGING),
    ],
)
def test_code_that_hangs_floods_or_forks_costs_its_own_tests(code):
    assert share(code, seconds=1.0) == 0.0


PROGRAMS = [{"input": "2 3\n", "output": "5\n"}, {"input": "-1 1\n", "output": "0"}]


@pytest.mark.parametrize(
    ("code", "passed"),
    [
        ("import sys\nif __name__ == '__main__':\n    print(sum(map(int, sys.stdin.read().split())), '\\n')", 2),
        ("print(5)", 1),
        ("import os; os.kill(os.getppid(), 9)", 0),
        pytest.param("print(sum(map(int, input().split())))", 2, marks=pytest.mark.slow),
        pytest.param("print(5); raise SystemExit(1)", 0, marks=pytest.mark.slow),
        pytest.param("while True: print(5)", 0, marks=pytest.mark.slow),
    ],
)
def test_programs_are_judged_by_what_they_print(code, passed):
    assert run_tests(code, PROGRAMS, 5.0)[0] == passed


def test_a_conversation_is_rewarded(tmp_path):
    lines = [
        {"prompt": "Write add(a, b).", "tests": TESTS.splitlines()},
        {"prompt": "Write it.", "test": "def check(candidate):\n    assert candidate(1, 2) == 3", "entry_point": "add"},
        {"prompt": "A program that adds.", "tests": PROGRAMS},
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    environment = Code(str(tmp_path))
    first, second, third = examples_of(environment, "train")
    reply = f"So:\n```python\n{RIGHT}\n```"
    rewards, chat = converse(environment, first, reply)
    assert rewards == {"correct": 1.0, "passed": 1.0} and "Write add(a, b)." in chat.messages[0]["content"]
    assert environment.reward(second, reply) == {"correct": 1.0, "passed": 1.0}
    assert environment.reward(third, reply) == {"correct": 0.0, "passed": 0.0}
    assert environment.reward(first, "") == {"correct": 0.0, "passed": 0.0}
    assert environment.reward(first, "```python\nadd = lambda a, b: 5\n```") == {"correct": 0.0, "passed": 1 / 3}
    assert environment.reward(first, "\ud800") == {"correct": 0.0, "passed": 0.0}
    without_methods = Example("p", metadata={"tests": "class TestNothing:\n    pass"})
    assert environment.reward(without_methods, "pass") == {"correct": 0.0, "passed": 0.0}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "p"}, "train.jsonl:1: needs `tests`"),
        ({"prompt": "p", "tests": "assert ("}, "train.jsonl:1: its `tests` are not valid Python"),
        ({"prompt": "p", "tests": "x = 1"}, "train.jsonl:1: its `tests` have no assertion"),
        ({"prompt": "p", "tests": [{"input": "1"}]}, "train.jsonl:1: each of `tests` needs the strings"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    good = {"prompt": "p", "tests": TESTS}
    (tmp_path / "train.jsonl").write_text(json.dumps(line) + "\n" + json.dumps(good) + "\n")
    with pytest.raises(UserError, match=message):
        examples_of(Code(str(tmp_path)), "train")
    assert [e.id.rpartition(":")[2] for e in examples_of(Code(str(tmp_path), skip_bad_lines=True), "train")] == ["2"]
