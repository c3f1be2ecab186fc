"""The tensor-parallel driver: rank 0 of a tensor group sends each call of its engine to the other ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from lockstep.config import EngineConfig
from lockstep.data import Tokenizer
from lockstep.errors import UserError
from lockstep.generate.drafts import Draft
from lockstep.generate.engine import Engine
from lockstep.generate.sampling_params import Completion, SamplingParams, sampling_params_of
from lockstep.model import Decoder
from lockstep.parallel.messages import from_rank_0


class DriverEngine(Engine):
    """The engine of a tensor group's first rank.

    While it drives, until `end`, the other ranks run `follow`, and nothing else may be sent in the group. While it does
    not drive, every rank calls its engine itself.
    """

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig | None = None,
        tokenizer: Tokenizer | None = None,
        draft: Draft | None = None,
        drives: bool = True,
    ):
        super().__init__(model, config, tokenizer, draft)
        self.guard: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        """Entered around `add`, `abort` and `step`, which must not be interrupted on this rank alone."""
        self._calling = threading.RLock()
        self._drives = False
        if drives:
            self.drive()

    def add(self, prompt: list[int], params: SamplingParams, begun: Sequence[Completion] = ()) -> int:
        self._check(prompt, params)  # before sending: a rejected prompt must not reach the others
        with (
            self.guard(),
            self.on_all_ranks("add", prompt, dataclasses.asdict(params), [dataclasses.asdict(c) for c in begun]),
        ):
            return super().add(prompt, params, begun)

    def abort(self, request_id: int) -> None:
        with self.guard(), self.on_all_ranks("abort", request_id):
            super().abort(request_id)

    def _step(self) -> None:
        with self.guard(), self.on_all_ranks("step"):
            super()._step()

    def load_weights(self, folder: Path) -> None:
        with self.on_all_ranks("load_weights", str(folder)):
            super().load_weights(folder)

    def weights_changed(self, version: int | None = None, adapter: str = "") -> None:
        with self.on_all_ranks("weights_changed", version, adapter):
            super().weights_changed(version, adapter)

    def drive(self) -> None:
        """Starts driving: from now on, the other ranks follow."""
        self._drives = True

    def end(self) -> None:
        """Releases the other ranks."""
        with self._calling:
            with contextlib.suppress(RuntimeError), self.on_all_ranks("end"):  # a rank died; torchrun ends all
                pass
            self._drives = False

    @contextlib.contextmanager
    def driving(self) -> Iterator[None]:
        """The other ranks follow within this context."""
        self.drive()
        try:
            yield
        finally:
            self.end()

    @contextlib.contextmanager
    def on_all_ranks(self, name: str, *arguments: Any) -> Iterator[None]:
        """Sends a call to the other ranks; this rank makes it within the context.

        name: a method of the engine, or a key of `follow`'s `calls`.
        """
        with self._calling:
            if self._drives:
                from_rank_0([name, *arguments], self.tensor_group)
            yield


def follow(engine: Engine, calls: Mapping[str, Callable[..., object]] = {}) -> None:
    """On the other ranks of a group: makes the driver's calls, of the engine's methods and of `calls`.

    Returns once the driver has ended.
    """
    while True:
        name, *arguments = from_rank_0(None, engine.tensor_group)
        if name == "end":
            return
        if name == "add":
            prompt, params, begun = arguments
            engine.add(prompt, sampling_params_of(params), [Completion(**completion) for completion in begun])
        elif name == "load_weights":
            # The driver reports the error; the old weights are untouched on every rank.
            with contextlib.suppress(UserError):
                engine.load_weights(Path(arguments[0]))
        elif name in ("abort", "step", "weights_changed"):
            getattr(engine, name)(*arguments)
        elif name in calls:
            calls[name](*arguments)
