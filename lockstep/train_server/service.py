"""The state behind the routes: one base model, its sessions, their models and sampling sessions."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lockstep.config import TrainServerConfig
from lockstep.data import Tokenizer
from lockstep.errors import UserError
from lockstep.generate.engine import Engine
from lockstep.generate.server.api_error import ApiError
from lockstep.generate.server.engine_loop import EngineLoop
from lockstep.generate.server.limits import Limits
from lockstep.generate.server.metrics import Metrics
from lockstep.model import Decoder
from lockstep.model.adapters import Adapter, build_adapter, load_adapter
from lockstep.model.config import Lora as LoraShape
from lockstep.model.layers import projections
from lockstep.model.write_adapter import save_adapter
from lockstep.train_server.batches import LossOfData, MicroBatch
from lockstep.train_server.loss_graph import GraphLoss
from lockstep.train_server.promises import Promises, Turns
from lockstep.train_server.protocol import AdamParams, Lora
from lockstep.train_server.states import SavedState, States
from lockstep.train_server.trained_model import Outputs, TrainedModel

Result = TypeVar("Result")
ALPHA = 32.0
"""Of every adapter: the update is scaled by 32 / rank, as the service that the client was made for does."""
HEAD = "lm_head"
MOST_SNAPSHOTS = 16
"""Of a model, besides saved states."""
EVERY_SECONDS = 5.0
"""How often sessions and states are looked at for those whose time has passed."""

logger = logging.getLogger("lockstep.server")


@dataclass(eq=False)
class Model:
    """A model of a session, for its client."""

    model_id: str
    session_id: str
    trained: TrainedModel
    lora: Lora
    turns: Turns
    user_metadata: dict[str, Any] | None
    last_request: float = field(default_factory=time.time)
    snapshots: list[Sampler] = field(default_factory=list)
    """Sampling sessions with values of it, the one used last at the end."""

    def described(self, base_model: str, kind: str, name: str, expires: float | None, metadata: Any) -> SavedState:
        """The description of a state to save."""
        lora = self.lora
        return SavedState(
            self.model_id, kind, name, base_model, lora.rank, lora.seed, lora.train_unembed, lora.train_mlp,
            lora.train_attn, self.trained.updates, expires=expires, user_metadata=metadata,
        )  # fmt: skip


@dataclass(eq=False)
class Sampler:
    """A sampling session: the base, or an adapter under a name of the engine."""

    sampler_id: str
    session_id: str
    adapter: str = ""
    path: str | None = None
    model: Model | None = None
    """Whose snapshot it has, if any."""
    clones: int = 0
    is_freed: bool = False


@dataclass(eq=False)
class Session:
    """What a client has opened; it ends when the client is silent for too long."""

    session_id: str
    user_metadata: dict[str, Any] | None
    display_name: str | None
    created: float = field(default_factory=time.time)
    seen: float = field(default_factory=time.monotonic)
    models: dict[str, Model] = field(default_factory=dict)
    samplers: dict[str, Sampler] = field(default_factory=dict)
    losses: dict[str, GraphLoss] = field(default_factory=dict)


class Service:
    """Everything that the routes share. Used in the event loop; what computes runs in the engine's thread."""

    def __init__(self, config: TrainServerConfig, folder: Path, name: str, engine: Engine):
        assert engine.tokenizer is not None
        self.config, self.folder, self.model_name, self.engine = config, folder, name, engine
        self.tokenizer: Tokenizer = engine.tokenizer
        self.states = States(Path(config.output), config.max_state_bytes)
        self.engine_loop, self.promises = EngineLoop(engine), Promises()
        self.sessions: dict[str, Session] = {}
        self.loaded: dict[str, int] = {}
        """Adapters of the engine that are from saved states, by path: how many samplers have each."""
        self.ended: set[str] = set()
        self.limits = Limits(config.max_connections, config.max_waiting, 0.0)
        self.metrics = Metrics(engine)

    @property
    def base(self) -> Decoder:
        return self.engine.model

    def base_name(self, requested: str) -> str:
        """The model's name. Raises UserError if another one is requested."""
        if requested.partition(":")[0] != self.model_name:
            raise UserError(f"this server has the model {self.model_name!r}, not {requested[:200]!r}")
        return self.model_name

    # Sessions.

    def open_session(self, user_metadata: dict[str, Any] | None, display_name: str | None) -> Session:
        session = Session(f"s-{secrets.token_hex(8)}", user_metadata, display_name)
        self.sessions[session.session_id] = session
        return session

    def session(self, session_id: str) -> Session:
        """Raises ApiError: 410 for one that has ended, 404 for one that this server has not opened."""
        if (session := self.sessions.get(session_id)) is not None:
            session.seen = time.monotonic()
            return session
        if session_id in self.ended:
            raise ApiError(
                410,
                f"the session {session_id[:80]} has ended: its client was silent for {self.config.session_seconds:g} "
                "seconds, or finished it; continue from a saved state, with a new ServiceClient",
            )
        raise ApiError(404, self._of_before(f"the session {session_id[:80]}", session_id))

    def _of_before(self, what: str, run: str) -> str:
        """Why something is not here, and how a client continues."""
        newest = [state.path for state in self.states.all() if state.run.startswith(run) and state.kind == "weights"]
        way = f"continue from its newest saved state, {newest[-1]}" if newest else "it has no saved state; start again"
        return f"{what} is not on this server, which may have been restarted: {way}, with a new ServiceClient"

    def model(self, model_id: str) -> Model:
        """Raises ApiError (404, 410) for a model that is not here."""
        session = self.sessions.get(model_id.partition(":")[0])
        if session is None or model_id not in session.models:
            if model_id.partition(":")[0] in self.ended:
                raise ApiError(410, self._of_before(f"the model {model_id[:80]}, whose session has ended,", model_id))
            raise ApiError(404, self._of_before(f"the model {model_id[:80]}", model_id))
        session.seen = time.monotonic()
        model = session.models[model_id]
        model.last_request = time.time()
        return model

    async def end_session(self, session_id: str) -> None:
        """Frees everything that a session has."""
        if (session := self.sessions.pop(session_id, None)) is None:
            return
        self.ended.add(session_id)
        for model in session.models.values():
            model.turns.end()
        self.promises.forget(session_id)
        for sampler in session.samplers.values():
            await self.close_sampler(sampler)
        session.models.clear()

    async def look_after(self) -> None:
        """Ends silent sessions and deletes expired states, until it is cancelled."""
        while True:
            await asyncio.sleep(EVERY_SECONDS)
            now = time.monotonic()
            for session in [*self.sessions.values()]:
                if now - session.seen > self.config.session_seconds:
                    logger.info("session %s ends: its client is silent", session.session_id)
                    await self.end_session(session.session_id)
            self.states.all()

    # Models.

    def lora_shape(self, lora: Lora) -> LoraShape:
        """The layers that a client's choice means. Raises UserError if they cannot have adapters."""
        shape = self.base.config
        if lora.train_mlp and shape.experts is not None:
            raise UserError("stacked experts have no adapters here; create the client with train_mlp=False")
        layers = [
            name for name, _ in projections(self.base) if (lora.train_mlp if ".mlp." in name else lora.train_attn)
        ]
        if not layers and not lora.train_unembed:
            raise UserError("nothing is to be trained; set train_mlp, train_attn or train_unembed")
        return LoraShape(lora.rank, ALPHA, (*layers, *([HEAD] if lora.train_unembed else [])))

    def refuse_more_models(self) -> None:
        count = sum(len(session.models) for session in self.sessions.values())
        if count >= self.config.max_models:
            raise UserError(
                f"this server has {count} models, its limit; those of a ServiceClient are freed by its close(), or "
                "when its program ends. Or start the server with a larger --max-models"
            )

    async def create_model(self, session: Session, number: int, lora: Lora, metadata: Any, first: int = 1) -> Model:
        """A fresh adapter. first: the number of the model's first request. Raises UserError."""
        self.refuse_more_models()
        seed = secrets.randbits(31) if lora.seed is None else lora.seed
        shape = self.lora_shape(lora)

        def build(engine: Engine) -> TrainedModel:
            return TrainedModel(engine.model, build_adapter(engine.model, shape, seed))

        trained = await self.in_engine(build)
        lora = lora.model_copy(update={"seed": seed})
        model_id = f"{session.session_id}:train:{number}"
        turns = Turns(self.promises, first, trained.spoil)
        model = Model(model_id, session.session_id, trained, lora, turns, metadata)
        session.models[model_id] = model
        return model

    async def in_engine(self, work: Callable[[Engine], Result]) -> Result:
        """Runs `work` in the engine's thread between two steps. What it raises is raised here, and harms nobody else.

        Raises UserError for memory that there is not.
        """

        def guarded(engine: Engine) -> tuple[Result | None, Exception | None]:
            try:
                return work(engine), None
            except Exception as error:  # of one client's work
                return None, error

        result, error = await self.engine_loop.between_steps(guarded)
        if isinstance(error, MemoryError | RuntimeError) and "alloc" in str(error):
            raise UserError("there is not enough memory for this request; send fewer or shorter data") from error
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    async def compute(
        self, model: Model, batches: Sequence[MicroBatch], loss_of: LossOfData, backward: bool
    ) -> Outputs:
        """All micro-batches, one between two steps of the engine: others sample and train in between."""
        outputs = Outputs()
        try:
            for batch in batches:
                await self.in_engine(lambda _, batch=batch: model.trained.compute(batch, loss_of, backward, outputs))  # type: ignore[misc]
        except Exception as error:
            if backward:
                model.trained.spoil(str(error))
            raise
        return outputs

    async def update(self, model: Model, params: AdamParams) -> dict[str, float]:
        return await self.in_engine(lambda _: model.trained.update(params))

    # Saved states.

    async def save(
        self, model: Model, kind: str, name: str, ttl_seconds: int | None, metadata: Any = None, overwrite: bool = False
    ) -> SavedState:
        """Raises UserError as `States.save` does."""
        expires = None if ttl_seconds is None else time.time() + ttl_seconds
        state = model.described(self.model_name, kind, name, expires, metadata)

        def write(folder: Path) -> None:
            save_adapter(model.trained.adapter, folder, self.folder)
            if kind == "weights":
                model.trained.save(folder)

        return await self.in_engine(lambda _: self.states.save(state, write, overwrite))

    def stored_adapter(self, folder: Path) -> Adapter:
        return load_adapter(folder, self.base, self.folder)

    async def load(self, model: Model, path: str, optimizer: bool) -> None:
        """Raises UserError for a path without a state that fits."""
        state, folder = self.states.find(path)
        if optimizer and state.kind != "weights":
            raise UserError(f"{path} has no optimizer's state: it was saved for sampling; load it without")
        adapter = await self.in_engine(lambda _: self.stored_adapter(folder))
        await self.in_engine(lambda _: model.trained.load(adapter, folder if optimizer else None))
        model.trained.updates = state.updates if optimizer else 0

    # Sampling sessions.

    async def open_sampler(self, session: Session, number: int, path: str | None) -> Sampler:
        """A sampling session of the base, or of a saved state. Raises UserError for a path without one."""
        sampler = Sampler(f"{session.session_id}:sample:{number}", session.session_id, path=path)
        if path is not None:
            state, folder = self.states.find(path)
            name = sampler.adapter = f"{path} of {state.created}"  # one that is overwritten has another name
            self.loaded[name] = self.loaded.get(name, 0) + 1

            def load(engine: Engine) -> None:
                if name not in engine.adapters:
                    engine.load_adapter(name, self.stored_adapter(folder))

            try:
                await self.in_engine(load)
            except UserError:
                await self.close_sampler(sampler)
                raise
        session.samplers[sampler.sampler_id] = sampler
        return sampler

    async def snapshot(self, model: Model, number: int) -> Sampler:
        """A sampling session with the model's present values, which stay as they are. Of a model's, the one that was
        unused for the longest time is freed when there are `MOST_SNAPSHOTS`."""
        session = self.session(model.session_id)
        if len(model.snapshots) >= MOST_SNAPSHOTS:
            await self.close_sampler(model.snapshots.pop(0))
        name = f"{model.model_id}/{model.trained.updates}/{number}"
        await self.in_engine(lambda engine: engine.load_adapter(name, model.trained.snapshot()))
        sampler = Sampler(f"{session.session_id}:sample:{number}", session.session_id, name, model=model)
        session.samplers[sampler.sampler_id] = sampler
        model.snapshots.append(sampler)
        return sampler

    async def publish(self, model: Model, number: int) -> Sampler:
        """A sampling session of the model's newest published values, which this call replaces for all of its kind."""
        session = self.session(model.session_id)
        name = f"{model.model_id}/inflight"

        def put(engine: Engine) -> None:
            values = model.trained.snapshot()
            if name in engine.adapters:
                for own, new in zip(engine.adapters[name].parameters(), values.parameters()):
                    own.data = new.data
                engine.weights_changed(adapter=name)
            else:
                engine.load_adapter(name, values)

        await self.in_engine(put)
        sampler = Sampler(f"{session.session_id}:sample:{number}", session.session_id, name)
        session.samplers[sampler.sampler_id] = sampler
        return sampler

    async def close_sampler(self, sampler: Sampler) -> None:
        """Frees its adapter, unless others have it."""
        name, sampler.is_freed = sampler.adapter, True
        if not name:
            return
        if name in self.loaded:
            self.loaded[name] -= 1
            if self.loaded[name]:
                return
            del self.loaded[name]
        await self.in_engine(lambda engine: engine.unload_adapter(name) if name in engine.adapters else None)

    def sampler(self, sampler_id: str) -> Sampler:
        """Raises ApiError (404, 410) for one that is not here."""
        session = self.session(sampler_id.partition(":")[0])
        if sampler_id not in session.samplers:
            raise ApiError(404, f"there is no sampling session {sampler_id[:80]}; create one")
        sampler = session.samplers[sampler_id]
        if sampler.is_freed:
            raise UserError(
                f"the values of this sampling client are freed: its model has made {MOST_SNAPSHOTS} others that were "
                "used later. Keep values with save_weights_for_sampler, and sample from that path"
            )
        if sampler.model is not None:  # the one used last is freed last
            sampler.model.snapshots.sort(key=lambda each: each is sampler)
        return sampler


def summed(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """The metrics of a request's data: sums, or means over the data, as their names say."""
    names = metrics[0].keys() if metrics else ()
    sums = {name: math.fsum(each[name] for each in metrics) for name in names}
    return {name: value / len(metrics) if name.endswith(":mean") else value for name, value in sums.items()}
