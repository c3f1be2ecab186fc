"""Runs model-written Python within limits, and collects its output."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from lockstep.errors import UserError

CONFINE = (
    "import json, sys; sys.path.insert(0, sys.argv[1]); from lockstep.rl.grading.sandbox.confine import main; "
    "main(json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))"
)
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache")
"""Locations of the interpreter's shared libraries."""

BUILD_SECONDS = 60.0
"""Timeout to start an interpreter and build the sandbox, which takes 0.1 s on an idle machine."""


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one run."""

    seconds: float = 5.0
    """Wall-clock time from start to end."""
    memory_mib: int = 512
    """Address space of each of its processes."""
    processes: int = 16
    """Concurrent processes, including threads."""
    output_kib: int = 64
    """Of standard output and of standard error, each."""
    scratch_mib: int = 64
    """Total size of the files that it writes, which are in memory."""


@dataclass(frozen=True)
class Result:
    """How a run ended, and its output."""

    exit: int | None
    """Exit code, or minus the signal that killed it; None if the sandbox ended it."""
    stdout: str
    stderr: str
    cause: str
    """Why the sandbox ended it: `timeout` or `output`; empty if it ended by itself."""


class SandboxError(Exception):
    """The sandbox could not be built, for a reason unrelated to the code."""


def run_code(
    source: str,
    stdin: str = "",
    limits: SandboxLimits | None = None,
    readable: Sequence[str] = (),
    allow_unprotected: bool = False,
) -> Result:
    """Runs Python `source` with the standard library and read-only access to the folders in `readable`.

    It has no network, sees no other process, has no environment variables, and can only write to a scratch folder,
    which is deleted afterwards. Raises UserError if the kernel does not support that, unless `allow_unprotected`, and
    SandboxError if it cannot be started at all.
    """
    return _run(source, stdin, limits or SandboxLimits(), readable, allow_unprotected=allow_unprotected)[0]


@functools.cache
def missing_protections() -> dict[str, str]:
    """The protections that this machine does not support, with reasons; empty if it supports all.

    `namespaces`: no network, no other processes. `keys`: none of the caller's keys. `files`: a separate root file
    system. `user`: not root. `landlock`: no mounts, no TCP, no signals, even if the other protections allow them.
    """
    return _run("", "", SandboxLimits(), (), probe=True)[1]


def _run(
    source: str,
    stdin: str,
    limits: SandboxLimits,
    readable: Sequence[str],
    allow_unprotected: bool = False,
    probe: bool = False,
    without: Sequence[str] = (),
) -> tuple[Result, dict[str, str]]:
    """The result, and the missing protections. `without` names protections to leave out, for tests of each."""
    if sys.platform != "linux":
        raise UserError("the sandbox needs Linux with namespaces and Landlock; run model-written code there")
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    settings: dict[str, Any] = {
        **dataclasses.asdict(limits),
        "python": python,
        "root": os.getuid() == 0,
        "readable": [*SYSTEM, *_interpreter(python), *map(os.path.abspath, readable)],
        "allow_unprotected": allow_unprotected,
        "probe": probe,
        "without": list(without),
    }
    result, report = _run_process(settings, source, stdin, limits)
    if "error" in report or ("missing" not in report and not result.cause):
        raise SandboxError(f"the sandbox could not be built: {report.get('error', result.stderr[-500:])}")
    missing = report.get("missing", {})
    if missing and not allow_unprotected and not probe:
        raise UserError(
            "model-written code is not run here, because the kernel cannot confine it sufficiently: "
            + "; ".join(f"{name} ({reason})" for name, reason in missing.items())
            + ". Run where user namespaces and Landlock are allowed (a container may forbid them), or set "
            "allow_unprotected if nothing here is worth protecting"
        )
    return result, missing


def _run_process(
    settings: dict[str, Any], source: str, stdin: str, limits: SandboxLimits
) -> tuple[Result, dict[str, Any]]:
    """Starts the sandbox, exchanges its inputs and outputs, and ends it.

    Returns the result, and the report of `confine.py`: `missing` protections and the code's `exit`, or an `error`.
    """
    # Lone surrogates cannot be encoded as UTF-8: the error should be the code's, not the caller's.
    program, given = (text.encode("utf-8", "surrogatepass") for text in (source, stdin))
    code_end, code_pipe = os.pipe()
    report_pipe, report_end = os.pipe()
    package = str(Path(__file__).parents[4])
    arguments = [CONFINE, package, json.dumps(settings), str(code_end), str(report_end)]
    process = subprocess.Popen(
        [settings["python"], "-I", "-S", "-c", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=(code_end, report_end),
        bufsize=0,
        start_new_session=True,
        env={},
        cwd="/",
    )
    assert process.stdin and process.stdout and process.stderr
    max_bytes = limits.output_kib * 1024
    with process:  # waits for its end
        try:
            os.close(code_end)
            os.close(report_end)
            with os.fdopen(code_pipe, "wb", 0) as code, os.fdopen(report_pipe, "rb", 0) as report:
                inputs = {code: program, process.stdin: given}
                bounds = {process.stdout: max_bytes, process.stderr: max_bytes, report: 2**16}
                outputs, cause = _exchange(inputs, bounds, report, limits.seconds)
        finally:
            _end(process)
    stdout, stderr = (outputs[pipe][:max_bytes].decode(errors="replace") for pipe in (process.stdout, process.stderr))
    reported: dict[str, Any] = {}
    for line in outputs[report].splitlines():
        reported |= json.loads(line)
    return Result(None if cause else reported.get("exit"), stdout, stderr, cause), reported


def _exchange(
    inputs: dict[IO[bytes], bytes], bounds: dict[IO[bytes], int], report: IO[bytes], seconds: float
) -> tuple[dict[IO[bytes], bytearray], str]:
    """Writes the inputs and reads outputs up to their bounds, until all end or a limit is exceeded.

    Returns the outputs and the cause, as `Result.cause`. The code's time starts at the first `report`: the sandbox is
    built.
    """
    deadline = time.monotonic() + BUILD_SECONDS
    outputs = {pipe: bytearray() for pipe in bounds}
    open_outputs = set(bounds)
    with selectors.DefaultSelector() as selector:
        for pipe, data in inputs.items():
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, selectors.EVENT_WRITE, (pipe, memoryview(data)))
        for pipe in bounds:
            selector.register(pipe, selectors.EVENT_READ, (pipe, None))
        while open_outputs:
            if (left := deadline - time.monotonic()) <= 0:
                return outputs, "timeout"
            for key, _ in selector.select(left):
                pipe, data = key.data
                if data is not None:
                    _write_some(selector, pipe, data)
                    continue
                read = os.read(key.fd, 2**16)
                if pipe is report and not outputs[report]:
                    deadline = time.monotonic() + seconds
                outputs[pipe] += read
                if not read:
                    selector.unregister(pipe)
                    open_outputs.remove(pipe)
                elif len(outputs[pipe]) > bounds[pipe]:
                    return outputs, "output"
    return outputs, ""


def _write_some(selector: selectors.BaseSelector, pipe: IO[bytes], data: memoryview) -> None:
    """Writes without blocking; closes the pipe after the last byte, or if the reader is gone."""
    with suppress(BrokenPipeError, BlockingIOError):
        written = os.write(pipe.fileno(), data[: 2**16]) if data else 0
        if written < len(data):
            selector.modify(pipe, selectors.EVENT_WRITE, (pipe, data[written:]))
            return
    selector.unregister(pipe)
    pipe.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills the sandbox's process group; with a process namespace, that ends everything in it."""
    if process.poll() is None:
        process.terminate()  # without a namespace, the first process kills the descendants it can find
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _interpreter(python: str) -> list[str]:
    """The folders of the interpreter and its standard library."""
    prefixes = {sys.base_prefix, sys.base_exec_prefix, str(Path(python).parents[1])}
    return sorted(prefix for prefix in prefixes if not prefix.startswith("/usr/") and prefix not in ("/", "/usr"))
