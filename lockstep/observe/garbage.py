"""Python's garbage collection at chosen steps only."""

from __future__ import annotations

import gc


class GarbageCollection:
    """Collects garbage only at every `every`-th step: ranks that collect at different times wait for each other.

    Objects that are alive on entry are frozen, so that collections are short. 0: Python's default behavior.
    """

    def __init__(self, every: int):
        self.every = every
        self._was_enabled = False

    def __enter__(self) -> GarbageCollection:
        if self.every:
            self._was_enabled = gc.isenabled()
            gc.collect()
            gc.freeze()
            gc.disable()
        return self

    def due(self, step: int) -> bool:
        return self.every > 0 and step % self.every == 0

    def collect(self) -> None:
        gc.collect()

    def __exit__(self, *_: object) -> None:
        if self.every:
            gc.unfreeze()
            if self._was_enabled:
                gc.enable()
