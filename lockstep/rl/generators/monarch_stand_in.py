"""A stand-in process on the trainer's host for a generator that a Monarch worker starts on another host.

The trainer starts it in place of the generator, with the run's key as its first line of input. Through an actor on the
worker it starts the generator there, writes the generator's output to local files, and exits with its exit code; when
its input ends, it ends the generator. So the trainer supervises a process like any other, and Monarch's threads and
messages, which are pickles, stay out of the trainer.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from contextlib import ExitStack, suppress
from typing import Any

POLL_SECONDS = 0.1
"""Seconds between polls of the generator."""
REACH_SECONDS = 30.0
"""Timeout for a worker to start an actor."""


def main() -> int:
    """The stand-in process; returns its exit code."""
    arguments = json.loads(sys.argv[1])
    key = sys.stdin.readline().strip()
    ended = threading.Event()
    threading.Thread(target=_wait_for_end, args=(ended,), name="input", daemon=True).start()
    try:
        return stand_in(**arguments, key=key, ended=ended)
    except Exception as error:
        problem = (str(error).splitlines() or ["no response"])[-1]
        print(f"the Monarch worker at {arguments['worker']}: {type(error).__name__}: {problem}")
        return 1


def stand_in(
    worker: str, address: str, group: dict[str, Any], logs: list[str], key: str, ended: threading.Event
) -> int:
    """Runs a generator on `worker`; returns its exit code, or 0 once `ended` is set.

    address: this host's, reachable from the worker's host. group: a `Group`, from JSON. logs: the ranks' output files.
    Raises any error of Monarch's.
    """
    import monarch.actor

    from lockstep.rl.generators.monarch_actor import LEASE_SECONDS, GeneratorHost

    # The default hook kills this process before it can report anything.
    monarch.actor.unhandled_fault_hook = lambda failure: None
    with ExitStack() as opened:
        outputs = [opened.enter_context(open(log, "ab", buffering=0)) for log in logs]
        # The actor's process calls back.
        scheme, host = worker.partition(":")[0], f"[{address}]" if ":" in address else address
        monarch.actor.enable_transport(f"{scheme}://{host}:0")
        hosts = monarch.actor.attach_to_workers(ca="trust_all_connections", workers=[worker])
        processes = hosts.spawn_procs(per_host={"generators": 1})
        opened.callback(lambda: _finish(processes.stop(), LEASE_SECONDS))
        actor = processes.spawn("generator", GeneratorHost)
        hostname = actor.start.call_one(group, key).get(timeout=REACH_SECONDS)
        opened.callback(lambda: _finish(actor.end.call_one(), LEASE_SECONDS))
        while not ended.wait(POLL_SECONDS):
            parts, codes, problem = actor.poll.call_one().get(timeout=LEASE_SECONDS)
            for output, part in zip(outputs, parts):
                output.write(part)
            if problem:
                print(f"cannot be started on {hostname}: {problem}")
                return 1
            if any(codes) or (codes and None not in codes):
                return next((code if code > 0 else 128 - code for code in codes if code), 0)
    return 0


def _finish(work: Any, seconds: float) -> None:
    # If the worker does not answer, the actor's lease still runs out.
    with suppress(Exception):
        work.get(timeout=seconds)


def _wait_for_end(ended: threading.Event) -> None:
    sys.stdin.read()
    ended.set()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Without waiting for Monarch's shutdown: all processes that it started have ended.
    os._exit(code)
