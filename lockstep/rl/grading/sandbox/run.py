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
"""Where an interpreter finds its shared libraries."""

BUILD_SECONDS = 60.0
"""Timeout to start an interpreter and build the sandbox: takes a tenth of a second if the machine is not busy."""


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
    """Standard output, and the same again for standard error."""
    scratch_mib: int = 64
    """Total size of all files that it writes, which are held in memory."""


@dataclass(frozen=True)
class Result:
    """How a run ended, and what it printed."""

    exit: int | None
    """Its exit code, or minus the signal that killed it; None if the sandbox had to end it."""
    stdout: str
    stderr: str
    cause: str
    """Why the sandbox had to end it: `timeout` or `output`; empty if it ended by itself."""


class SandboxError(Exception):
    """The sandbox could not be built, for a reason that has nothing to do with the code."""


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
    """The protections that a sandbox lacks on this machine, with the reason; empty if it has all.

    `namespaces`: no network, no other processes. `keys`: none of the caller's keys. `files`: its own root file system.
    `user`: not root. `landlock`: no mounts, no TCP, no signals, even if the other protections allow them.
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
    """The result, and what was missing. `without` names protections to leave out, to test what each is for."""
    if sys.platform != "linux":
        raise UserError("the sandbox needs Linux with namespaces and Landlock; run model-written code there")
    # A lone surrogate cannot be encoded as UTF-8: let it be the code's error, not the caller's.
    program, given = (text.encode("utf-8", "surrogatepass") for text in (source, stdin))
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
    source_end, source_pipe = os.pipe()
    status, status_end = os.pipe()
    package = str(Path(__file__).parents[4])
    process = subprocess.Popen(
        [python, "-I", "-S", "-c", CONFINE, package, json.dumps(settings), str(source_end), str(status_end)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=(source_end, status_end),
        bufsize=0,
        start_new_session=True,
        env={},
        cwd="/",
    )
    assert process.stdin and process.stdout and process.stderr
    most = limits.output_kib * 1024
    with process:  # which waits for its end
        try:
            os.close(source_end)
            os.close(status_end)
            with os.fdopen(source_pipe, "wb", 0) as code, os.fdopen(status, "rb", 0) as told:
                inputs = {code: program, process.stdin: given}
                outputs = {process.stdout: most, process.stderr: most, told: 2**16}
                printed, cause = _exchange(inputs, outputs, told, limits.seconds)
        finally:
            _end(process)
    said: dict[str, Any] = {}
    for line in printed[told].splitlines():
        said |= json.loads(line)
    stdout, stderr = (printed[pipe][:most].decode(errors="replace") for pipe in (process.stdout, process.stderr))
    if "error" in said or ("missing" not in said and not cause):
        raise SandboxError(f"the sandbox could not be built: {said.get('error', stderr[-500:])}")
    missing = said.get("missing", {})
    if missing and not allow_unprotected and not probe:
        raise UserError(
            "model-written code is not run here, because the kernel cannot confine it sufficiently: "
            + "; ".join(f"{name} ({reason})" for name, reason in missing.items())
            + ". Run where user namespaces and Landlock are allowed (a container may forbid them), or set "
            "allow_unprotected if nothing here is worth protecting"
        )
    return Result(None if cause else said.get("exit"), stdout, stderr, cause), missing


def _exchange(
    inputs: dict[IO[bytes], bytes], bounds: dict[IO[bytes], int], told: IO[bytes], seconds: float
) -> tuple[dict[IO[bytes], bytearray], str]:
    """Writes the inputs and reads up to the bounds, until all is read or a limit is exceeded; returns the cause.

    The code's time starts when `told` reports that the sandbox is built.
    """
    until = time.monotonic() + BUILD_SECONDS
    printed = {pipe: bytearray() for pipe in bounds}
    open_outputs = set(bounds)
    with selectors.DefaultSelector() as selector:
        for pipe, data in inputs.items():
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, selectors.EVENT_WRITE, (pipe, memoryview(data)))
        for pipe in bounds:
            selector.register(pipe, selectors.EVENT_READ, (pipe, None))
        while open_outputs:
            if (left := until - time.monotonic()) <= 0:
                return printed, "timeout"
            for key, _ in selector.select(left):
                pipe, data = key.data
                if data is not None:
                    _write_some(selector, pipe, data)
                    continue
                read = os.read(key.fd, 2**16)
                if pipe is told and not printed[told]:
                    until = time.monotonic() + seconds
                printed[pipe] += read
                if not read:
                    selector.unregister(pipe)
                    open_outputs.remove(pipe)
                elif len(printed[pipe]) > bounds[pipe]:
                    return printed, "output"
    return printed, ""


def _write_some(selector: selectors.BaseSelector, pipe: IO[bytes], data: memoryview) -> None:
    """Closes the pipe after the last byte, or if the reader is gone."""
    with suppress(BrokenPipeError, BlockingIOError):
        written = os.write(pipe.fileno(), data[: 2**16]) if data else 0
        if written < len(data):
            selector.modify(pipe, selectors.EVENT_WRITE, (pipe, data[written:]))
            return
    selector.unregister(pipe)
    pipe.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    """With a process namespace, its first process dies with the group, and everything in it with that."""
    if process.poll() is None:
        process.terminate()  # without a namespace, the first process kills what it can find
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _interpreter(python: str) -> list[str]:
    """The folders of the interpreter and its standard library."""
    prefixes = {sys.base_prefix, sys.base_exec_prefix, str(Path(python).parents[1])}
    return sorted(prefix for prefix in prefixes if not prefix.startswith("/usr/") and prefix not in ("/", "/usr"))
