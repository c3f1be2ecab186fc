"""Runs inside the sandbox: tests in one process, model-written code in another, plain data between them.

The process with the tests reports how many passed. The code runs in its child, which has neither the tests nor their
expected values, and can neither write to its parent's output nor read its memory. It only sees the arguments of calls,
and its results arrive as plain data, so an object that equals everything does not survive. Hence the code can pass a
test only by returning the expected value.

This file imports only the standard library, as the sandbox receives it as text.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import io
import itertools
import json
import os
import select
import subprocess
import sys
import time
import unittest
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from typing import Any

MAX_ANSWER_BYTES = 2**20
PR_SET_DUMPABLE = 4
SILENT = ("StopIteration", "StopAsyncIteration", "GeneratorExit")
"""Exceptions that end loops or generators silently: raised in `all(map(f, cases))`, the first makes it true."""


class Broken(BaseException):
    """The code's process is gone, hangs or sends invalid data: from now on every test that calls it fails, even if it
    expects an exception."""


def main() -> None:
    """Reads a job from standard input and prints `[tests passed, tests]`."""
    job = json.loads(sys.stdin.buffer.read())
    sys.set_int_max_str_digits(0)
    # Forbids processes of the same user to attach to this one, read its memory or take its open files.
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError("PR_SET_DUMPABLE")
    deadline = time.monotonic() + job["seconds"]
    results = list(programs(job, deadline) if job["programs"] else functions(job, deadline))
    print(json.dumps([sum(results), len(results)]))


def programs(job: dict[str, Any], deadline: float) -> Iterator[bool]:
    """Whether the code, run as a program with each input, prints the output."""
    with open("solution.py", "wb") as file:
        file.write(job["code"].encode(errors="surrogatepass"))
    for test in job["programs"]:
        printed = run_program(test["input"], deadline, job["output_bytes"])
        yield printed is not None and lines_of(printed) == lines_of(test["output"])


def run_program(stdin: str, deadline: float, max_bytes: int) -> str | None:
    """The code's output; None if it fails, prints too much or takes too long."""
    child = start(["solution.py"])
    assert child.stdin and child.stdout
    left, printed = memoryview(stdin.encode(errors="surrogatepass")), bytearray()
    os.set_blocking(child.stdin.fileno(), False)
    try:
        while (seconds := deadline - time.monotonic()) > 0:
            writing = [child.stdin] if not child.stdin.closed else []
            readable, writable, _ = select.select([child.stdout], writing, [], seconds)
            if writable:
                try:
                    left = left[os.write(child.stdin.fileno(), left[:4096]) if left else 0 :]
                except BrokenPipeError:
                    left = left[:0]
                if not left:
                    with suppress(BrokenPipeError):
                        child.stdin.close()
            if readable:
                part = os.read(child.stdout.fileno(), 2**16)
                printed += part
                if len(printed) > max_bytes:
                    return None
                if not part:
                    code = child.wait(max(0.0, deadline - time.monotonic()))
                    return printed.decode(errors="replace") if code == 0 else None
        return None
    except subprocess.TimeoutExpired:
        return None
    finally:
        end(child)


def lines_of(text: str) -> list[str]:
    """Lines without trailing spaces, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def functions(job: dict[str, Any], deadline: float) -> Iterator[bool]:
    """Whether each test of the source passes. Names that it does not define are the code's functions."""
    child = start(["-c", job["harness"], "child"])
    answers = Answers(child, deadline)
    namespace: dict[str, Any] = {"__name__": "tests"}
    tests = ast.parse(job["tests"])
    try:
        with suppress(Broken):
            answers.broken = "raised" in answers.ask({"code": job["code"]})
        for name in unknown_names(tests):
            namespace[name] = caller(name, answers)
        broken = False
        for statement in tests.body:
            run = compile(ast.Module([statement], []), "tests", "exec")
            passed = not broken and succeeds(lambda run=run: exec(run, namespace))  # type: ignore[misc]
            if is_test(statement):
                yield passed
            elif not passed:
                broken = True  # the tests depend on it
        for test in test_functions(namespace) if not broken else ():
            yield succeeds(test)
        if broken:
            yield from [False] * count_functions(tests)
    finally:
        end(child)


def is_test(statement: ast.stmt) -> bool:
    """A statement that asserts, or a bare call, is a test; anything else is setup."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return False
    call = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
    return call or any(isinstance(node, ast.Assert) for node in ast.walk(statement))


def count_functions(tests: ast.Module) -> int:
    """Functions `test…` and methods `test…` of classes."""
    count = 0
    for statement in tests.body:
        definitions = statement.body if isinstance(statement, ast.ClassDef) else [statement]
        count += sum(isinstance(node, ast.FunctionDef) and node.name.startswith("test") for node in definitions)
    return count


def count_tests(source: str) -> int:
    """The number of tests in a source. Raises SyntaxError or ValueError if it is not valid Python."""
    tests = ast.parse(source)
    return sum(map(is_test, tests.body)) + count_functions(tests)


def test_functions(namespace: dict[str, Any]) -> Iterator[Callable[[], Any]]:
    for name, value in list(namespace.items()):
        if isinstance(value, type) and issubclass(value, unittest.TestCase) and value is not unittest.TestCase:
            for case in unittest.defaultTestLoader.loadTestsFromTestCase(value):
                yield lambda case=case: run_case(case)  # type: ignore[misc]
        elif isinstance(value, type) and name.startswith("Test"):
            yield from (getattr(value(), test) for test in sorted(dir(value)) if test.startswith("test"))
        elif name.startswith("test") and callable(value) and hasattr(value, "__code__"):
            yield value


def run_case(case: Any) -> None:
    result = unittest.TestResult()
    case.run(result)
    if not result.wasSuccessful() or result.skipped or result.testsRun != 1:
        raise AssertionError


def succeeds(test: Callable[[], Any]) -> bool:
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        try:
            test()
        except BaseException:
            return False
    return True


def unknown_names(tests: ast.Module) -> set[str]:
    """Names that the tests read but do not define. Built-ins are excluded: the code's `abs` or `all` could decide what
    passes."""
    read: set[str] = set()
    known = set(dir(builtins))
    for node in ast.walk(tests):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else known).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            known.add(node.name)
        elif isinstance(node, ast.arg):
            known.add(node.arg)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            known.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            known.add(node.name)
    return read - known


def caller(name: str, answers: Answers) -> Callable[..., Any]:
    """A function of the code, for the tests: takes and returns plain data, or raises a built-in exception."""

    def call(*args: Any, **kwargs: Any) -> Any:
        answer = answers.ask({"name": name, "args": encode(args), "kwargs": encode(kwargs)})
        if "raised" in answer:
            for kind in (getattr(builtins, name, None) for name in answer["raised"] if name not in SILENT):
                if isinstance(kind, type) and issubclass(kind, Exception):
                    with suppress(TypeError):  # such as UnicodeDecodeError, which needs more arguments
                        error = kind("the code raised this")
                        break
            else:
                error = RuntimeError("the code raised this")
            raise error
        return decode(answer["value"])

    call.__name__ = name
    return call


class Answers:
    """Calls the code's process, with one line of JSON each way."""

    def __init__(self, child: subprocess.Popen[bytes], deadline: float):
        self.child, self.deadline, self.broken = child, deadline, False

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Raises Broken, and then at every later call."""
        if self.broken:
            raise Broken
        try:
            answer = self._ask(json.dumps(question).encode() + b"\n")
            if not isinstance(answer, dict) or not (isinstance(answer.get("raised"), list) or "value" in answer):
                raise Broken
            return answer
        except (OSError, ValueError, RecursionError, Broken) as error:
            self.broken = True
            raise Broken from error

    def _ask(self, line: bytes) -> Any:
        assert self.child.stdin and self.child.stdout
        left = memoryview(line)
        os.set_blocking(self.child.stdin.fileno(), False)
        answer = bytearray()
        while b"\n" not in answer:
            writing = [self.child.stdin] if left else []
            seconds = self.deadline - time.monotonic()
            readable, writable, _ = select.select([self.child.stdout], writing, [], max(0.0, seconds))
            if seconds <= 0 or len(answer) > MAX_ANSWER_BYTES:
                raise Broken
            if writable:
                left = left[os.write(self.child.stdin.fileno(), left[:4096]) :]
            if readable:
                part = os.read(self.child.stdout.fileno(), 2**16)
                if not part:
                    raise Broken
                answer += part
        return json.loads(answer[: answer.index(b"\n")])


def start(arguments: list[str]) -> subprocess.Popen[bytes]:
    """Starts another interpreter, which inherits only pipes for its input and output."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        start_new_session=True,
        env={},
    )


def end(child: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, 9)
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe:
            with suppress(OSError):
                pipe.close()


def child() -> None:
    """The code's process: runs the code, then calls its functions on request."""
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)  # so that output of the code is not taken for an answer
    sys.set_int_max_str_digits(0)
    namespace: dict[str, Any] = {"__name__": "solution"}
    for line in questions:
        question = json.loads(line)
        try:
            if "code" in question:
                exec(compile(question["code"], "solution", "exec"), namespace)
                value = None
            else:
                if question["name"] not in namespace:
                    raise NameError(question["name"])
                value = namespace[question["name"]](*decode(question["args"]), **decode(question["kwargs"]))
            answer: dict[str, Any] = {"value": encode(value)}
        except BaseException as error:
            answer = {"raised": [kind.__name__ for kind in type(error).__mro__]}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def encode(value: Any) -> Any:
    """Plain data as JSON, with tags for types that JSON lacks. Raises TypeError for other data."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, tuple | set | frozenset):
        kind = next(kind for kind in (tuple, set, frozenset) if isinstance(value, kind))
        return {kind.__name__: [encode(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": list(value)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if hasattr(value, "__next__"):
        return {"iter": [encode(item) for item in itertools.islice(value, 2**16)]}
    raise TypeError(f"a {type(value).__name__} is not plain data")


def decode(value: Any) -> Any:
    """The inverse of `encode`. Raises ValueError for other data."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, parts),) = value.items()
    if kind == "dict":
        return {decode(key): decode(item) for key, item in parts}
    kinds: dict[str, Callable[[Any], Any]] = {
        **{"tuple": tuple, "set": set, "frozenset": frozenset},
        **{"bytes": bytes, "iter": iter},
    }
    if kind == "complex":
        return complex(*parts)
    if kind not in kinds:
        raise ValueError(kind)
    return kinds[kind]([decode(item) for item in parts])


if __name__ == "__main__":
    child() if sys.argv[1:] == ["child"] else main()
