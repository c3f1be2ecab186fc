"""Runs a function on several processes that are joined as torchrun joins them."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import multiprocessing
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from types import BuiltinFunctionType, FunctionType
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


class Ranks:
    """Processes of one thread each that run one function after another."""

    def __init__(self, size: int):
        self.connections: list[Connection] = []
        self.processes = []
        for rank in range(size):
            connection, child = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_serve, args=(rank, size, child), daemon=True)
            process.start()
            child.close()
            self.connections.append(connection)
            self.processes.append(process)

    def begin(self, function: Callable[..., Any], *arguments: Any) -> None:
        port, fault = free_port(), os.environ.get(VARIABLE, "")
        for connection in self.connections:
            connection.send((port, fault, function, arguments))

    def results(self, seconds: float) -> list[Any]:
        """Raises as `launch`."""
        returned: dict[int, Any] = {}
        until = time.monotonic() + seconds
        while len(returned) < len(self.connections):
            waiting = {c: rank for rank, c in enumerate(self.connections) if rank not in returned}
            ready = wait(list(waiting), timeout=max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError(f"ranks {sorted(waiting.values())} did not end within {seconds} s")
            for connection in ready:
                rank = waiting[connection]
                try:
                    value, error = connection.recv()
                except EOFError:
                    raise AssertionError(f"rank {rank} died") from None
                if error:
                    raise AssertionError(f"rank {rank} failed:\n{error}")
                returned[rank] = pickle.loads(value)
        return [returned[rank] for rank in range(len(self.connections))]

    def close(self) -> None:
        for process in self.processes:
            process.kill()


_standing: dict[int, Ranks] = {}


@atexit.register
def _end_standing() -> None:
    while _standing:
        _standing.popitem()[1].close()


def launch(
    ranks: int, function: Callable[..., Any], *arguments: Any, seconds: float = 120.0, fresh: bool = False
) -> list[Any]:
    """`function(*arguments)` on each of `ranks` processes, one thread each; returns every rank's result.

    Function, arguments and results are pickled. The processes then stand ready for the next function, unless `fresh`:
    for one that changes more than `_Replaced` puts back, or whose process ends. The fault that the environment names
    (`tests.faults`) is planted in all of the processes. Raises AssertionError with the traceback of the first rank that
    failed, and TimeoutError after `seconds`.
    """
    fresh = fresh or VARIABLE in os.environ
    group = None if fresh else _standing.pop(ranks, None)
    group = group or Ranks(ranks)
    try:
        group.begin(function, *arguments)
        values = group.results(seconds)
    except BaseException:
        group.close()
        raise
    if fresh:
        group.close()
    else:
        _standing[ranks] = group
    return values


def start(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Fresh processes that have begun as those of `launch`, to be killed."""
    group = Ranks(ranks)
    group.begin(function, *arguments)
    return group.processes


def _serve(rank: int, ranks: int, connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    from lockstep.observe import report
    from lockstep.ops import native

    torch.set_num_threads(1)
    report.curves_svg = lambda *arguments: []  # as in tests/conftest.py
    environment, folder = dict(os.environ), os.getcwd()
    replaced, used = _Replaced(), False
    while True:
        try:
            port, fault, function, arguments = connection.recv()
        except EOFError:
            return
        # What the function before has left. All ranks have returned its result, so none waits for another's last bytes.
        if dist.is_initialized():
            dist.destroy_process_group()
        replaced.put_back()
        if used:  # in a fresh process, the function may first say what the processor has
            native.set_arithmetic("auto")
        used = True
        os.environ.clear()
        os.environ.update(environment | ranks_environment(rank, ranks, port))
        os.chdir(folder)
        torch.manual_seed(0)
        try:
            if fault:
                FAULTS[fault]()
            value, error = function(*arguments), ""
        except BaseException:
            value, error = None, traceback.format_exc()
        # As bytes: a connection would share a tensor's memory, which ends with this process.
        connection.send((pickle.dumps(value), error))


class _Replaced:
    """Puts back functions, classes and numbers of the product's modules and classes that a test has replaced."""

    def __init__(self) -> None:
        self.values = list(self._product())

    def put_back(self) -> None:
        for owner, name, value in self.values:
            if vars(owner).get(name) is not value:
                setattr(owner, name, value)
        self.values = list(self._product())

    def _product(self) -> Iterator[tuple[Any, str, Any]]:
        modules = [module for name, module in list(sys.modules.items()) if name.startswith("lockstep.")]
        classes = {each for module in modules for each in vars(module).values() if _is_class_of_product(each)}
        kinds = type, FunctionType, BuiltinFunctionType, property, int, float
        for owner in [*modules, *classes]:
            yield from ((owner, name, value) for name, value in list(vars(owner).items()) if isinstance(value, kinds))


def _is_class_of_product(value: Any) -> bool:
    return isinstance(value, type) and value.__module__.startswith("lockstep.")


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
