"""An engine on several ranks, called on one: the first rank sends each call to the others, which make it too."""

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
from lockstep.parallel.messages import HEARTBEAT_SECONDS, from_rank_0


class LeadingEngine(Engine):
    """The engine of the first rank of a tensor group.

    While it leads, until `end`, the other ranks run `follow`, and nothing else may be sent in the group; a thread
    regularly tells them to keep waiting, since the wait for a message has a timeout. While it does not lead, each rank
    calls its own engine, as ranks that share a model do.
    """

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig | None = None,
        tokenizer: Tokenizer | None = None,
        draft: Draft | None = None,
        leads: bool = True,
    ):
        super().__init__(model, config, tokenizer, draft)
        self.guard: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        """Entered around each call that `Sampler` names, which must not end on this rank alone."""
        self._calling = threading.RLock()
        self._leads, self._ended = False, threading.Event()
        if leads:
            self.lead()

    def add(self, prompt: list[int], params: SamplingParams, begun: Sequence[Completion] = ()) -> int:
        self._check(prompt, params)  # what is rejected here is not sent
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

    def weights_changed(self, version: int | None = None) -> None:
        with self.on_all_ranks("weights_changed", version):
            super().weights_changed(version)

    def return_freed_memory(self) -> None:
        with self.on_all_ranks("return_freed_memory"):
            super().return_freed_memory()

    def lead(self) -> None:
        """From now on, the other ranks follow."""
        self._leads = True
        self._ended.clear()
        self._heartbeats = threading.Thread(target=self._send_heartbeats, name="heartbeats", daemon=True)
        self._heartbeats.start()

    def end(self) -> None:
        """Releases the other ranks."""
        with self._calling:
            self._ended.set()
            with contextlib.suppress(RuntimeError), self.on_all_ranks("end"):  # a rank died; torchrun ends all
                pass
            self._leads = False
        self._heartbeats.join()

    @contextlib.contextmanager
    def leading(self) -> Iterator[None]:
        """The other ranks follow within this context."""
        self.lead()
        try:
            yield
        finally:
            self.end()

    @contextlib.contextmanager
    def on_all_ranks(self, name: str, *arguments: Any) -> Iterator[None]:
        """Sends a call to the other ranks, to be made within this context: no heartbeat may interrupt its messages.

        name: a method of the engine, or one of the calls that `follow` was given.
        """
        with self._calling:
            if self._leads:
                from_rank_0([name, *arguments], self.tensor_group)
            yield

    def _send_heartbeats(self) -> None:
        with contextlib.suppress(RuntimeError):  # the next call of the engine raises it
            while not self._ended.wait(HEARTBEAT_SECONDS):
                with self._calling:
                    if not self._ended.is_set():  # else they have gone
                        from_rank_0(["wait"], self.tensor_group)


def follow(engine: Engine, calls: Mapping[str, Callable[..., object]] = {}) -> None:
    """On the other ranks of a group: makes the calls that the first rank's engine gets, and those in `calls`.

    Returns once the first rank has ended.
    """
    while True:
        name, *arguments = from_rank_0(None, engine.tensor_group)
        if name == "end":
            return
        if name == "add":
            prompt, params, begun = arguments
            engine.add(prompt, sampling_params_of(params), [Completion(**completion) for completion in begun])
        elif name == "load_weights":
            # The first rank answers whoever asked; the old weights are untouched on every rank.
            with contextlib.suppress(UserError):
                engine.load_weights(Path(arguments[0]))
        elif name in ("abort", "step", "weights_changed", "return_freed_memory"):
            getattr(engine, name)(*arguments)
        elif name in calls:
            calls[name](*arguments)
