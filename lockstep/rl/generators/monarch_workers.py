"""Waits for the Monarch workers of a run."""

from __future__ import annotations

import importlib.util
import socket
import time

from lockstep.config import ActorsConfig
from lockstep.config.actors import worker_address
from lockstep.errors import UserError
from lockstep.observe import log

AGAIN_SECONDS = 0.5
"""Seconds between attempts to reach a worker that is not up yet."""


def require_workers(actors: ActorsConfig) -> None:
    """Waits up to `actors.start_seconds` until every worker can be reached: they may be starting too.

    Raises UserError if one cannot, or if Monarch is not installed here.
    """
    if actors.workers and importlib.util.find_spec("monarch") is None:
        raise UserError(
            "actors.hosts names Monarch workers, but torchmonarch is not installed; pip install "
            "'torchmonarch>=0.7,<0.8' here and on their hosts, or start generators there with lockstep generator "
            "(actors.port)"
        )
    until = time.monotonic() + actors.start_seconds
    for worker in actors.workers:
        _wait_for(worker, until)


def _wait_for(worker: str, until: float) -> None:
    address = worker_address(worker)
    assert address is not None
    warned = False
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
        if not warned:
            log.warning("no Monarch worker at %s yet; waiting up to %g s (actors.start_seconds)", worker, round(left))
            warned = True
        time.sleep(AGAIN_SECONDS)
