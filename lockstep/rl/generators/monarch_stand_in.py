"""A stand-in process on the trainer's host for a generator that a Monarch worker starts on another host.

The trainer starts it in place of the generator, with the run's key as its first line of input. It asks the worker for
an actor that starts the generator there, writes the generator's output to files here, and exits with its exit code;
when its own input ends, it ends the generator. So the trainer supervises a process like any other, and Monarch's
threads and messages, which are pickles, stay out of the trainer.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from contextlib import ExitStack, suppress
from typing import Any

NEWS_SECONDS = 0.1
"""Seconds between requests for the generator's news."""
REACH_SECONDS = 30.0
"""Timeout for a worker to start an actor."""


def main() -> int:
    told = json.loads(sys.argv[1])
    key = sys.stdin.readline().strip()
    ended = threading.Event()
    threading.Thread(target=_wait_for_end, args=(ended,), name="input", daemon=True).start()
    try:
        return stand_in(told["worker"], told["here"], told["group"], key, told["logs"], ended)
    except Exception as error:
        said = str(error).splitlines()
        print(f"the Monarch worker at {told['worker']}: {type(error).__name__}: {said[-1] if said else 'no answer'}")
        return 1


def stand_in(worker: str, here: str, group: dict[str, Any], key: str, logs: list[str], ended: threading.Event) -> int:
    """The exit code of the generator that `worker` started, 0 if it was `ended`.

    here: this host's address, reachable from the worker's host.
    group: a `Group`, from JSON. logs: the files for the ranks' output. Raises whatever Monarch raises.
    """
    import monarch.actor

    from lockstep.rl.generators.monarch_actor import LEASE_SECONDS, GeneratorHost

    # The default kills this process before it can report anything.
    monarch.actor.unhandled_fault_hook = lambda failure: None
    with ExitStack() as opened:
        outputs = [opened.enter_context(open(log, "ab", buffering=0)) for log in logs]
        # The actor's process calls back.
        monarch.actor.enable_transport(f"{worker.partition(':')[0]}://{f'[{here}]' if ':' in here else here}:0")
        hosts = monarch.actor.attach_to_workers(ca="trust_all_connections", workers=[worker])
        processes = hosts.spawn_procs(per_host={"generators": 1})
        opened.callback(lambda: _finish(processes.stop(), LEASE_SECONDS))
        actor = processes.spawn("generator", GeneratorHost)
        where = actor.start.call_one(group, key).get(timeout=REACH_SECONDS)
        opened.callback(lambda: _finish(actor.end.call_one(), LEASE_SECONDS))
        while not ended.wait(NEWS_SECONDS):
            said, codes, problem = actor.news.call_one().get(timeout=LEASE_SECONDS)
            for output, part in zip(outputs, said):
                output.write(part)
            if problem:
                print(f"cannot be started on {where}: {problem}")
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
    # Monarch's shutdown is not waited for: all that it started has ended.
    os._exit(code)
