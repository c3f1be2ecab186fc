"""Runs a function on several processes that are joined as torchrun joins them."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import queue
import socket
import traceback
from collections.abc import Callable
from typing import Any

from tests.faults import FAULTS, VARIABLE

# Children are forked from a server that has imported what runs import but never computed: 0.1 s instead of 4.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "lockstep.train.pretrain",
        "lockstep.rl.reinforce",
        "lockstep.parallel.torch_stage",
        # What PyTorch, and the report at a run's end, import at first use.
        "torch._dynamo",
        "torch._inductor.compile_fx",
        "torch.profiler._cupti_monitor",
        "jinja2",
        "matplotlib.pyplot",
        "tokenizers",
        # What the modules of tests import, one of which each child is told to import.
        "pytest",
        "tests.parallel.frozen",
    ]
)


_numbers = itertools.count(os.getpid())


def free_port() -> int:
    """Of those that the system gives to nobody by itself: whoever asks it for any could else take the ranks' first."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for number in _numbers:
        port = 20_000 + 1_000 * (worker % 12) + number % 1_000
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("numbers end")


def launch(ranks: int, function: Callable[..., Any], *arguments: Any, seconds: float = 120.0) -> list[Any]:
    """`function(*arguments)` on each of `ranks` processes, one thread each; returns every rank's result.

    Function, arguments and results are pickled. The fault that the environment names (`tests.faults`) is planted in all
    of the processes. Raises AssertionError with the traceback of the first rank that failed,
    and TimeoutError after `seconds`.
    """
    # A rank that ends closes its connections, on which another may still wait for the last bytes.
    taken = CONTEXT.Event()
    processes, results = start(ranks, function, *arguments, taken=taken)
    try:
        returned: dict[int, Any] = {}
        while len(returned) < ranks:
            try:
                rank, value, error = results.get(timeout=seconds)
            except queue.Empty:
                missing = sorted(set(range(ranks)) - set(returned))
                raise TimeoutError(f"ranks {missing} did not end within {seconds} s") from None
            if error:
                raise AssertionError(f"rank {rank} failed:\n{error}")
            returned[rank] = pickle.loads(value)
        return [returned[rank] for rank in range(ranks)]
    finally:
        taken.set()
        for process in processes:
            process.join(timeout=0 if len(returned) < ranks else 10)
            process.kill()


def start(ranks: int, function: Callable[..., Any], *arguments: Any, taken: Any = None) -> tuple[list[Any], Any]:
    """The processes that `launch` waits for, begun, and the queue that takes their results.

    With `taken`, an event, a rank that has put its result waits for it.
    """
    port = free_port()
    results: Any = CONTEXT.Queue()
    fault = os.environ.get(VARIABLE, "")  # not the processes' own, which is that of the server they are forked from
    processes = [
        CONTEXT.Process(
            target=_child, args=(rank, ranks, port, results, taken, fault, function, arguments), daemon=True
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    return processes, results


def _child(
    rank: int,
    ranks: int,
    port: int,
    results: Any,
    taken: Any,
    fault: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    import torch

    from lockstep.observe import report

    torch.set_num_threads(1)
    report.curves_svg = lambda *arguments: []  # as in tests/conftest.py
    os.environ |= ranks_environment(rank, ranks, port)
    try:
        if fault:
            FAULTS[fault]()
        value, error = function(*arguments), ""
    except BaseException:
        value, error = None, traceback.format_exc()
    # As bytes: a queue would share a tensor's memory, which ends with this process.
    results.put((rank, pickle.dumps(value), error))
    if taken is not None and not error:
        taken.wait(60)


def ranks_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun tells a process on one host."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
