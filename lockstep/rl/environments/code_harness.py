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
import subprocess
import symtable
import sys
import threading
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
    # Files, not pipes: nothing can block on a program that does not read or never stops printing.
    with open("input", "wb+") as given, open("output", "wb+") as printed:
        given.write(stdin.encode(errors="surrogatepass"))
        given.seek(0)
        child = start(["solution.py"], given, printed)
        try:
            code = child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None
        finally:
            end(child)
        printed.seek(0)
        output = printed.read(max_bytes + 1)
    return output.decode(errors="replace") if code == 0 and len(output) <= max_bytes else None


def lines_of(text: str) -> list[str]:
    """Lines without trailing spaces, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def functions(job: dict[str, Any], deadline: float) -> Iterator[bool]:
    """Whether each test of the source passes. Names that it does not define are the code's functions."""
    child = start(["-c", job["harness"], "child"], subprocess.PIPE, subprocess.PIPE)
    # Its end closes the pipes, on which a question or an answer may wait.
    timer = threading.Timer(deadline - time.monotonic(), end, [child])
    timer.daemon = True
    timer.start()
    answers = Answers(child)
    namespace: dict[str, Any] = {"__name__": "tests"}
    tests = ast.parse(job["tests"])
    try:
        with suppress(Broken):
            answers.broken = "raised" in answers.ask({"code": job["code"]})
        for name in unknown_names(job["tests"]):
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


def unknown_names(source: str) -> set[str]:
    """Names that the tests read but do not define. Built-ins are excluded: the code's `abs` or `all` could decide what
    passes."""
    module = symtable.symtable(source, "tests", "exec")
    known = {symbol.get_name() for symbol in module.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    read: set[str] = set()
    scopes = [module]
    for scope in scopes:
        scopes += scope.get_children()
        symbols = (s for s in scope.get_symbols() if s.is_referenced() and (s.is_global() or scope is module))
        read |= {symbol.get_name() for symbol in symbols}
    return read - known - set(dir(builtins))


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

    def __init__(self, child: subprocess.Popen[bytes]):
        self.child, self.broken = child, False

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Raises Broken, and then at every later call."""
        if self.broken:
            raise Broken
        assert self.child.stdin and self.child.stdout
        try:
            self.child.stdin.write(json.dumps(question).encode() + b"\n")
            self.child.stdin.flush()
            answer = json.loads(self.child.stdout.readline(MAX_ANSWER_BYTES))
            if not isinstance(answer, dict) or not (isinstance(answer.get("raised"), list) or "value" in answer):
                raise Broken
            return answer
        except (OSError, ValueError, RecursionError, Broken) as error:
            self.broken = True
            raise Broken from error


def start(arguments: list[str], stdin: Any, stdout: Any) -> subprocess.Popen[bytes]:
    """Starts another interpreter, which inherits only its input and output."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", *arguments],
        stdin=stdin,
        stdout=stdout,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={},
    )


def end(child: subprocess.Popen[bytes]) -> None:
    """Ends the process and what it has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, 9)
    child.kill()
    child.wait()


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
    for kind in (tuple, set, frozenset, bytes, bytearray):
        if isinstance(value, kind):
            return {kind.__name__: [encode(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if hasattr(value, "__next__"):
        return {"iter": [encode(item) for item in itertools.islice(value, 2**16)]}
    raise TypeError(f"a {type(value).__name__} is not plain data")


def decode(value: Any) -> Any:
    """The inverse of `encode`. Raises KeyError, TypeError or ValueError for other data."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kinds: dict[str, Callable[[Any], Any]] = {
        **{"tuple": tuple, "set": set, "frozenset": frozenset, "bytes": bytes, "bytearray": bytearray},
        **{"dict": dict, "iter": iter, "complex": lambda parts: complex(*parts)},
    }
    ((kind, parts),) = value.items()
    return kinds[kind](decode(parts))


if __name__ == "__main__":
    child() if sys.argv[1:] == ["child"] else main()
