"""From a configuration to a running server, and its graceful shutdown."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from lockstep.checkpoint import open_model
from lockstep.config import ServeConfig
from lockstep.data import load_tokenizer, name_ends, with_ends
from lockstep.data.chat import load_chat_template
from lockstep.errors import UserError
from lockstep.generate.driver import DriverEngine, follow
from lockstep.generate.engine import Engine
from lockstep.generate.server.adapters import load_first_adapters
from lockstep.generate.server.app import create_app
from lockstep.generate.server.connection import bounded_connections
from lockstep.generate.server.limits import Limits
from lockstep.generate.server.service import Service
from lockstep.generate.server.weights import step_of
from lockstep.hub import named_path
from lockstep.observe import start_line
from lockstep.parallel import World, apply_compile

SECONDS_TO_READ = 5
"""Time for clients to read the rest of their responses once the last one has been sampled or aborted."""
COLLECTIONS = (2**16, 16, 1024)
"""Python's default of 700 new objects would traverse all those of large requests dozens of times while one is parsed,
for up to 0.3 s each. A request leaves some ten objects that counting references does not free."""

logger = logging.getLogger("lockstep.server")


def build_engine(config: ServeConfig, folder: Path, world: World | None = None) -> Engine:
    """Loads the model (with several ranks, this rank's part) and tokenizer of `folder`.

    Raises UserError for missing files.
    """
    chunks = config.parallel.reduction_chunks
    place = config.dtype, config.device, config.arithmetic
    model = open_model(folder, *place, world, chunks, config.precision, replaceable=bool(config.admin_key))
    tokenizer = load_tokenizer(folder, model.config.vocab_size)
    model.config = with_ends(model.config, tokenizer, load_chat_template(folder))
    apply_compile(model, config.compile, trains=False)
    drives = world is not None and world.size > 1 and world.is_main
    return (DriverEngine if drives else Engine)(model, config.engine, tokenizer)


def build_service(config: ServeConfig, folder: Path, engine: Engine | None = None) -> Service:
    """The service for the model in `folder`. Raises UserError if the folder is incomplete."""
    engine = engine or build_engine(config, folder)
    assert engine.tokenizer is not None
    engine.weights_changed(step_of(folder) or 0)
    name = config.model_name or named_path(config.model).resolve().name
    service = Service(config, folder, name, engine, engine.tokenizer, load_chat_template(folder))
    load_first_adapters(service)
    return service


def serve(config: ServeConfig, folder: Path, world: World) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code. The other ranks follow rank 0 until it ends."""
    world.on_main(lambda: require_address(config.host, config.port))
    engine = build_engine(config, folder, world)
    if not world.is_main:
        # torchrun sends signals to all ranks: the others end when rank 0 has answered its last request.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        follow(engine)
        return 0
    try:
        return _serve(config, folder, engine, world.size)
    finally:
        if isinstance(engine, DriverEngine):
            engine.end()


def _serve(config: ServeConfig, folder: Path, engine: Engine, ranks: int) -> int:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    service = build_service(config, folder, engine)
    model = service.engine.model
    work = f"up to {config.engine.max_sequences} sequences at a time"
    ends = name_ends(model.config.eos_token_ids, service.tokenizer)
    logger.info("%s", start_line(str(folder), model.config, model.device, model.dtype, work, ranks, ends))
    answers = "completions and chats" if service.template else "completions; chats need a chat_template.jinja in it"
    logger.info("%s is model %r, context %d tokens: %s", folder, service.model_name, service.context, answers)
    if service.sampling_defaults:
        values = ", ".join(f"{name} {value}" for name, value in service.sampling_defaults.items())
        logger.info("requests without them have the model's defaults: %s (--generation-config vllm: none)", values)
    server = Server(create_app(service), config, service.limits)
    settle_garbage()
    with access_lines():
        server.run()
    return 0 if server.started else 1


def settle_garbage() -> None:
    """Lets a server's collections of garbage be few and short."""
    # What is loaded by now is never garbage; traversing it would block every client for a tenth of a second.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTIONS)


@contextmanager
def access_lines() -> Iterator[None]:
    """Within this context, every request is logged as a line of JSON on stdout."""
    lines, access = logging.StreamHandler(sys.stdout), logging.getLogger("lockstep.access")
    lines.setFormatter(logging.Formatter("%(message)s"))
    access.addHandler(lines)
    access.setLevel(logging.INFO)
    access.propagate = False
    try:
        yield
    finally:
        access.removeHandler(lines)


def require_address(host: str, port: int) -> None:
    """Raises UserError, before a model is loaded, if the server cannot listen there."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        problem = (error.strerror or str(error)).partition(" (while")[0]  # the rest repeats the address
        raise UserError(f"{host}, port {port}: {problem}; give another --port or --host") from error


class Listens(Protocol):
    """The settings of a server's connections."""

    host: str
    port: int
    client_seconds: float
    max_connections: int
    shutdown_seconds: float


class Server(uvicorn.Server):
    """uvicorn with a shutdown in three steps: refuse new requests, finish running ones, abort the rest.

    The socket stays open meanwhile, so that a health check sees 503 and not a broken connection.
    """

    def __init__(self, app: ASGIApp, config: Listens, limits: Limits):
        super().__init__(
            uvicorn.Config(
                app,
                host=config.host,
                port=config.port,
                http=bounded_connections(config.client_seconds, config.max_connections),
                ws="none",
                loop="asyncio",
                h11_max_incomplete_event_size=2**16,  # for a request's head, which arrives in parts
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_graceful_shutdown=SECONDS_TO_READ,
            )
        )
        self._limits, self._seconds = limits, config.shutdown_seconds
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Task[None] | None = None

    async def startup(self, *arguments: object, **keywords: object) -> None:
        self._event_loop = asyncio.get_running_loop()
        await super().startup(*arguments, **keywords)  # type: ignore[arg-type]

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal begins the shutdown, a second one aborts running requests. Called by the signal handler."""
        if self._event_loop is None:
            self.should_exit = True
        else:
            self._event_loop.call_soon_threadsafe(self.begin_end)

    def begin_end(self) -> None:
        if self._end is not None:
            self._limits.aborting.set()
        else:
            self._end = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        limits, seconds = self._limits, self._seconds
        limits.draining = True
        logger.info("shutting down: running requests (%d) have %g seconds to finish", limits.requests, seconds)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while limits.requests and not limits.aborting.is_set():
                    await asyncio.sleep(0.02)
        if limits.requests:
            logger.info("aborting %d requests", limits.requests)
            limits.aborting.set()
        self.should_exit = True
