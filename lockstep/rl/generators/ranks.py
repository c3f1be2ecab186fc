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

from lockstep.observe.machine import usable_cpus

# fmt: off
TORCHRUN_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "ROLE_RANK",
)
# fmt: on
"""Set by the trainer's torchrun; its generators must not see them."""


@dataclass(frozen=True)
class Group:
    """How to start a generator's processes on any host."""

    arguments: list[str]
    """Arguments of `lockstep generator`."""
    tensor: int
    """Number of processes."""
    threads: int
    """Threads per process; 0: an even share of the host's CPUs."""
    host_processes: int
    """Generator processes on the host, including these."""
    first: int = 0
    """Index of the first one among the run's processes on its host, which selects its GPU."""


def start_ranks(group: Group, key: str, outputs: Sequence[IO[bytes]]) -> list[subprocess.Popen[bytes]]:
    """Starts a process per rank, which dies with the calling thread. Raises OSError.

    key: the run's, in hexadecimal. outputs: the ranks' output files.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    command = [sys.executable, "-m", "lockstep", "generator", *group.arguments, "--key", "-", "--parent"]
    port = _free_port()
    for rank, output in enumerate(outputs):
        ranks.append(_start([*command, str(os.getpid())], key, output, _environment(group, rank, port)))
        ranks[-1].stdin.close()  # type: ignore[union-attr]
    return ranks


def start_stand_in(
    worker: str, address: str, group: Group, key: str, logs: Sequence[Path], output: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Starts the local stand-in for ranks that the Monarch worker starts on its host. Raises OSError.

    address: this host's, reachable from the worker's host. logs: the ranks' output files. output: of the stand-in.
    """
    arguments = {"worker": worker, "address": address, "group": asdict(group), "logs": [str(log) for log in logs]}
    module = "lockstep.rl.generators.monarch_stand_in"
    return _start([sys.executable, "-m", module, json.dumps(arguments)], key, output, dict(os.environ))


def end_ranks(ranks: Sequence[subprocess.Popen[bytes]], seconds: float = 5.0) -> None:
    """Kills all of them; a stand-in first has `seconds` to end its remote ranks."""
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
        # Ctrl-C in the terminal reaches only the trainer, which ends them after its step.
        start_new_session=True,
    )
    # Through a pipe, so that a killed trainer leaves no key file behind.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(key.encode() + b"\n")  # type: ignore[union-attr]
    return process


def _environment(group: Group, rank: int, port: int) -> dict[str, str]:
    environment = {
        k: v for k, v in os.environ.items() if k not in TORCHRUN_VARIABLES and not k.startswith("TORCHELASTIC_")
    }
    environment["OMP_NUM_THREADS"] = str(group.threads or max(1, usable_cpus() // group.host_processes))
    environment["LOCAL_RANK"] = str(group.first + rank)
    if group.tensor > 1:
        size = str(group.tensor)
        environment |= {"RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return environment


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
