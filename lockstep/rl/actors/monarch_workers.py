"""Whether the Monarch workers that a run is to use can be used."""

from __future__ import annotations

import importlib.util
import socket
import time

from lockstep.config import ActorsConfig
from lockstep.config.actors import worker_address
from lockstep.errors import UserError
from lockstep.observe import log

AGAIN_SECONDS = 0.5
"""Between two calls at a worker that is not there yet."""


def require_workers(actors: ActorsConfig) -> None:
    """Waits, for `actors.start_seconds` at most, until each worker can be called: they may start with the trainer.

    Raises UserError where one cannot, and where Monarch is missing here.
    """
    if actors.workers and importlib.util.find_spec("monarch") is None:
        raise UserError(
            "actors.hosts names Monarch workers, but torchmonarch is not installed; pip install 'lockstep-lm[monarch]' "
            "here and on their hosts, or start generators there with lockstep generator (actors.port)"
        )
    until = time.monotonic() + actors.start_seconds
    for worker in actors.workers:
        _wait_for(worker, until)


def _wait_for(worker: str, until: float) -> None:
    address = worker_address(worker)
    assert address is not None
    waits = False
    while True:
        left = until - time.monotonic()
        try:
            socket.create_connection(address, min(max(left, 0.1), 5.0)).close()
            return
        except OSError as error:
            if left < AGAIN_SECONDS:
                raise UserError(
                    f"no Monarch worker can be reached at {worker}: {error}; start one there, or correct actors.hosts"
                ) from error
        if not waits:
            log.warning("no Monarch worker at %s yet; it may take %g s (actors.start_seconds)", worker, round(left))
            waits = True
        time.sleep(AGAIN_SECONDS)
