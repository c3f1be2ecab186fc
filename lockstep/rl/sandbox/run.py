"""Running model-written Python, and taking what it prints, within limits."""

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
    "import json, sys; sys.path.insert(0, sys.argv[1]); from lockstep.rl.sandbox.confine import main; "
    "main(json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))"
)
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache")
"""Where an interpreter finds the libraries that it is linked to."""

BUILD_SECONDS = 60.0
"""For an interpreter to start and the sandbox to be built: a tenth of a second where the machine is not busy."""


@dataclass(frozen=True)
class SandboxLimits:
    """What one run may take."""

    seconds: float = 5.0
    """From its start to its end."""
    memory_mib: int = 512
    """Address space of each of its processes."""
    processes: int = 16
    """At the same time, threads included."""
    output_kib: int = 64
    """Of its standard output, and as much of its standard error."""
    scratch_mib: int = 64
    """Of all files that it writes, which are held in memory."""


@dataclass(frozen=True)
class Result:
    """How a run ended, and what it printed."""

    exit: int | None
    """Its exit code, or minus the number of the signal that ended it; None where it had to be ended."""
    stdout: str
    stderr: str
    cause: str
    """Why it had to be ended: `timeout` or `output`; empty where it ended by itself."""


class SandboxError(Exception):
    """The sandbox could not be built, for a reason that has nothing to do with the code."""


def run_code(
    source: str,
    stdin: str = "",
    limits: SandboxLimits | None = None,
    readable: Sequence[str] = (),
    allow_unprotected: bool = False,
) -> Result:
    """Runs Python `source` by itself, with the standard library and the folders of `readable`, which it cannot change.

    It has no network, sees no other process, has no environment variables, and writes to a scratch folder alone, which
    is gone afterwards. Raises UserError where the kernel offers too little for that, unless `allow_unprotected`, and
    SandboxError where it cannot be started at all.
    """
    return _run(source, stdin, limits or SandboxLimits(), readable, allow_unprotected=allow_unprotected)[0]


@functools.cache
def missing_protections() -> dict[str, str]:
    """What a sandbox lacks on this machine, with the reason; empty where it has everything.

    `namespaces`: no network, no other processes. `keys`: none of the caller's keys. `files`: a root of its own. `user`:
    not root. `landlock`: no mounts, no TCP, no signals, whatever the others leave open.
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
    """The result, and what was missing. `without` names protections to leave out, to test what each is there for."""
    if sys.platform != "linux":
        raise UserError("the sandbox needs Linux: its namespaces and Landlock; run model-written code there")
    # Half of a surrogate pair has no UTF-8: what comes of it is the code's error, not the caller's.
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
    package = str(Path(__file__).parents[3])
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
            "model-written code is not run here, because the kernel cannot confine it: "
            + "; ".join(f"{name} ({reason})" for name, reason in missing.items())
            + ". Run where user namespaces and Landlock are allowed (a container may forbid them), or set "
            "allow_unprotected if nothing here is worth protecting"
        )
    return Result(None if cause else said.get("exit"), stdout, stderr, cause), missing


def _exchange(
    inputs: dict[IO[bytes], bytes], bounds: dict[IO[bytes], int], told: IO[bytes], seconds: float
) -> tuple[dict[IO[bytes], bytearray], str]:
    """Writes the inputs and reads up to the bounds, until all is read or a limit is broken; then its cause.

    The code's time begins when `told` says that the sandbox is built.
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
    """What follows the last byte is the end of the file; a reader that is gone wants no more."""
    with suppress(BrokenPipeError, BlockingIOError):
        written = os.write(pipe.fileno(), data[: 2**16]) if data else 0
        if written < len(data):
            selector.modify(pipe, selectors.EVENT_WRITE, (pipe, data[written:]))
            return
    selector.unregister(pipe)
    pipe.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Where there is a process namespace its first one dies with the group, and all of it with that."""
    if process.poll() is None:
        process.terminate()  # without a namespace, the first process ends what it can find
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _interpreter(python: str) -> list[str]:
    """The folders of the interpreter and its standard library."""
    prefixes = {sys.base_prefix, sys.base_exec_prefix, str(Path(python).parents[1])}
    return sorted(prefix for prefix in prefixes if not prefix.startswith("/usr/") and prefix not in ("/", "/usr"))
