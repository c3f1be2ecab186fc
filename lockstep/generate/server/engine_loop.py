"""The engine's thread, and the bridge to asyncio.

Only this thread calls the engine. Commands arrive through a queue and run between steps; a step's events are passed to
the event loop in one call. Without work, the thread blocks on the queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import queue
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from lockstep.errors import UserError
from lockstep.generate.engine import Engine
from lockstep.generate.sampling_params import Completion, SamplingParams, TokenEvent
from lockstep.generate.server.api_error import ApiError, engine_failed, grammar_failed, not_finite
from lockstep.host_memory import return_freed_memory

Result = TypeVar("Result")
GRAMMAR_SECONDS, GRAMMAR_SECONDS_OF_TOKEN = 0.25, 0.002
"""Processor time that a sample's grammar may take: every other client waits for it. Those of schemas take 0.01 to 0.15
ms per token; that of an ambiguous grammar grows with the text."""
IDLE_SECONDS = 5.0
"""Idle time after which the engine returns freed memory to the system."""
PromptEvent = tuple[int, TokenEvent]
"""A prompt's position, and a token sampled for it."""

logger = logging.getLogger("lockstep.server")


class Generation:
    """One client's prompts in the engine."""

    def __init__(self, prompts: list[list[int]], params: SamplingParams, begun: Sequence[Completion] = ()):
        self.prompts = prompts
        self.params = params
        self.begun = begun
        """Samples so far, to be continued; only with a single prompt."""
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.unfinished = len(prompts) * params.n
        self.received: asyncio.Queue[list[PromptEvent] | ApiError] = asyncio.Queue()
        self.request_ids: list[int] = []
        """The engine's ids; only the engine's thread reads and writes them."""

    async def events(self) -> AsyncGenerator[list[PromptEvent], None]:
        """Yields each step's events until all samples have ended. Raises ApiError if the engine fails or stops."""
        while self.unfinished:
            batch = await self.received.get()
            if isinstance(batch, ApiError):
                raise batch
            self.unfinished -= sum(event.finish_reason is not None for _, event in batch)
            yield batch

    def fail(self, error: ApiError) -> None:
        if not self.accepted.done():
            self.accepted.set_exception(error)
        self.received.put_nowait(error)


class EngineLoop:
    """Runs the engine's thread. Public methods are called from the event loop that called `start`."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.failure: BaseException | None = None
        """The exception of a failed step; every request is refused after it."""
        self.generations: set[Generation] = set()
        self._owners: dict[int, tuple[Generation, int]] = {}
        """By the engine's id of a request: its generation, and the position of its prompt."""
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="lockstep-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Ends the thread after its current step."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    @asynccontextmanager
    async def generation(
        self, prompts: list[list[int]], params: SamplingParams, begun: Sequence[Completion] = ()
    ) -> AsyncIterator[Generation]:
        """Queues all of the prompts or none. Leaving the context frees their resources before the next step.

        Raises UserError for a prompt that does not fit the context or the cache, ApiError if the engine has failed.
        """
        generation = Generation(prompts, params, begun)
        self.generations.add(generation)
        self._commands.put(functools.partial(self._add, generation))
        try:
            await generation.accepted
            yield generation
        finally:
            self.generations.discard(generation)
            self._commands.put(functools.partial(self._abort, generation))

    async def between_steps(self, function: Callable[[Engine], Result]) -> Result:
        """Runs `function` in the engine's thread. If it raises anything but UserError, the engine counts as failed."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._commands.put(functools.partial(self._call, function, future))
        return await future

    # From here on, everything runs in the engine's thread.

    def _run(self) -> None:
        running = True
        while running:
            try:
                running = self._take_commands()
                if self._has_work():
                    self._dispatch(self.engine.step())
                    self._end_slow_grammars()
            except BaseException as error:  # including a library's panic: waiting clients must get an error
                self._fail(error)

    def _has_work(self) -> bool:
        return self.engine.has_work and self.failure is None

    def _take_commands(self) -> bool:
        """Runs queued commands, and blocks if there is nothing else to do; False if the thread should end."""
        try:
            command = self._commands.get(block=False) if self._has_work() else self._next_command()
            while command is not None:
                command()
                command = self._commands.get(block=False)
        except queue.Empty:
            return True
        return False

    def _next_command(self) -> Callable[[], None] | None:
        """Waits for a command; after IDLE_SECONDS, returns freed memory to the system."""
        try:
            return self._commands.get(timeout=IDLE_SECONDS)
        except queue.Empty:
            if self.failure is None:
                return_freed_memory()
            return self._commands.get()

    def _add(self, generation: Generation) -> None:
        if self.failure is not None:
            self._post(generation.fail, engine_failed())
            return
        try:
            for position, prompt in enumerate(generation.prompts):
                request_id = self.engine.add(prompt, generation.params, generation.begun)
                generation.request_ids.append(request_id)
                ended = sum(sample.finish_reason is not None for sample in self.engine.samples(request_id))
                if ended == generation.params.n:
                    raise ApiError(400, "begun: all of these samples are finished; send unfinished ones", "begun")
                generation.unfinished -= ended
                self._owners[request_id] = generation, position
        except BaseException as error:
            self._abort(generation)
            expected = isinstance(error, UserError | ApiError)
            self._post(_resolve, generation.accepted, None, error if expected else engine_failed())
            if not expected:
                raise
        else:
            self._post(_resolve, generation.accepted, None, None)

    def _abort(self, generation: Generation) -> None:
        for request_id in generation.request_ids:
            if self.failure is None:
                self.engine.abort(request_id)
            self._owners.pop(request_id, None)
        generation.request_ids = []

    def _call(self, function: Callable[[Engine], Any], future: asyncio.Future[Any]) -> None:
        result: Any = None
        failure: Exception | None = None
        try:
            result = function(self.engine)
        except UserError as error:
            failure = error
        except BaseException as error:  # the engine may be in an inconsistent state
            self._fail(error)
            failure = engine_failed()
        self._post(_resolve, future, result, failure)

    def _dispatch(self, events: list[TokenEvent]) -> None:
        batches: dict[Generation, list[PromptEvent]] = {}
        for event in events:
            if event.request_id not in self._owners:  # its generation has failed
                continue
            generation, position = self._owners[event.request_id]
            if event.finish_reason == "error":
                self._abort(generation)
                self._post(generation.fail, grammar_failed(event.problem) if event.problem else not_finite())
            else:
                batches.setdefault(generation, []).append((position, event))
        if batches:
            self._post(_deliver, batches)

    def _end_slow_grammars(self) -> None:
        # Only here, not in the engine: ranks that share a model would measure different times.
        for request_id in self.engine.slow_grammars(GRAMMAR_SECONDS, GRAMMAR_SECONDS_OF_TOKEN):
            if request_id in self._owners:
                generation, _ = self._owners[request_id]
                self._abort(generation)
                self._post(generation.fail, grammar_failed("its steps take too long; make it less ambiguous"))

    def _fail(self, error: BaseException) -> None:
        logger.error("the engine has failed; requests are refused until the server is restarted", exc_info=error)
        self.failure = error
        request_ids = list(self._owners)
        generations = {generation for generation, _ in self._owners.values()}
        self._owners.clear()
        for generation in generations:
            generation.request_ids = []
            self._post(generation.fail, ApiError(500, "the engine has failed on this request", code="engine_failed"))
        with contextlib.suppress(Exception):  # the engine may be in any state, and other ranks may have died
            for request_id in request_ids:
                self.engine.abort(request_id)

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None, "start() was not called"
        self._loop.call_soon_threadsafe(function, *arguments)


def _deliver(batches: dict[Generation, list[PromptEvent]]) -> None:
    for generation, batch in batches.items():
        generation.received.put_nowait(batch)


def _resolve(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():  # the waiting task is gone
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
