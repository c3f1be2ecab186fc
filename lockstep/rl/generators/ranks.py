"""The processes of one generator on its host: one, or a tensor-parallel group."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

# The variables of the trainer's own torchrun are not theirs.
OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "ROLE_RANK")


@dataclass(frozen=True)
class Group:
    """A generator's processes, wherever they are started."""

    arguments: list[str]
    """Arguments of `lockstep generator`."""
    tensor: int
    """Number of processes."""
    threads: int
    """Threads per process; 0: an even share of the host's CPUs."""
    beside: int
    """Generator processes on the host, including these."""
    first: int = 0
    """Index of the first one among the run's processes on its host, which decides its GPU."""


def start_ranks(group: Group, key: str, outputs: Sequence[IO[bytes]]) -> list[subprocess.Popen[bytes]]:
    """Starts a process for each rank, which dies with the calling thread. Raises OSError.

    key: the run's, in hexadecimal. outputs: for each rank, where its output goes.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    command = [sys.executable, "-m", "lockstep", "generator", *group.arguments, "--key", "-", "--parent"]
    port = _free_port()
    for rank, output in enumerate(outputs):
        ranks.append(_start([*command, str(os.getpid())], key, output, _environment(group, rank, port)))
        ranks[-1].stdin.close()  # type: ignore[union-attr]
    return ranks


def start_stand_in(
    worker: str, here: str, group: Group, key: str, logs: Sequence[Path], output: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Starts the local stand-in for ranks that the Monarch worker starts on its host. Raises OSError.

    here: this host's address, reachable from the worker's host.
    logs: for each rank, the file for its output. output: where the stand-in's own output goes.
    """
    told = {"worker": worker, "here": here, "group": asdict(group), "logs": [str(log) for log in logs]}
    module = "lockstep.rl.generators.monarch_stand_in"
    return _start([sys.executable, "-m", module, json.dumps(told)], key, output, dict(os.environ))


def end_ranks(ranks: Sequence[subprocess.Popen[bytes]], seconds: float = 5.0) -> None:
    """Kills all of them; a stand-in has this many seconds to end its remote ranks first."""
    for rank in ranks:
        if rank.stdin and not rank.stdin.closed:
            rank.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.wait(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)
        rank.wait()


def _start(command: list[str], key: str, output: IO[bytes], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        command,
        # Unbuffered, so that closing it cannot fail.
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        env=environment,
        # Ctrl-C in the terminal goes to the trainer, which ends them once its step is finished.
        start_new_session=True,
    )
    # Through a pipe, so that a trainer that is killed leaves no key file behind.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(key.encode() + b"\n")  # type: ignore[union-attr]
    return process


def _environment(group: Group, rank: int, port: int) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in OWN and not k.startswith("TORCHELASTIC_")}
    kept["OMP_NUM_THREADS"] = str(group.threads or max(1, len(os.sched_getaffinity(0)) // group.beside))
    kept["LOCAL_RANK"] = str(group.first + rank)
    if group.tensor > 1:
        size = str(group.tensor)
        kept |= {"RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        kept |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return kept


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
