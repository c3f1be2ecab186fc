"""Generators in separate processes: rank 0 of the trainer sends them requests, all ranks send them weights."""

from __future__ import annotations

import socket
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from secrets import token_bytes
from typing import Any

from lockstep.config import ActorsConfig
from lockstep.errors import RunStopped
from lockstep.model import Decoder, ScoringModel, TrainableModel, resolve_dtype
from lockstep.observe import announce
from lockstep.parallel import World
from lockstep.rl.generators.channel import Listener, make_key
from lockstep.rl.generators.http_remote import SILENCE_SECONDS, ServerSupervisor
from lockstep.rl.generators.models import PolicyReplica
from lockstep.rl.generators.pool import GeneratorPool
from lockstep.rl.generators.pool_sampler import PoolSampler
from lockstep.rl.generators.registry import GeneratorRegistry
from lockstep.rl.generators.spec import GeneratorSpec
from lockstep.rl.generators.supervisor import GeneratorSupervisor
from lockstep.rl.weights.folders import WeightFolders
from lockstep.rl.weights.server import WeightManifest, WeightServer, versions_to_keep

KEY = "generators.key"
"""Key file in the run's `logs/`, for generators that join later. Removed at the end of the run unless it is killed."""


class SeparateGenerators:
    """The `Generators` in other processes and servers. A context manager; leaving it ends what it started."""

    def __init__(
        self,
        spec: GeneratorSpec,
        actors: ActorsConfig,
        model: TrainableModel,
        world: World,
        run: Path,
        replica: PolicyReplica | None = None,
    ):
        """model: the policy. run: the run's folder. replica: for scoring with the policy on the training ranks."""
        self._spec, self._actors, self._replica = spec, actors, replica
        self._model, self._world, self._run = model, world, run
        self._finish = actors.on_update == "finish"
        # Only rank 0's has generators: the other ranks request nothing.
        self._pool = GeneratorPool(
            spec.shape.max_positions,
            spec.cache_tokens,
            actors.start_seconds,
            self._finish,
            vocab_size=spec.shape.vocab_size,
            eos_token_ids=spec.shape.eos_token_ids,
        )
        self.sampler = PoolSampler(self._pool)
        self._opened = ExitStack()
        self._weight_server: WeightServer | None = None
        self._folders: WeightFolders | None = None

    def __enter__(self) -> SeparateGenerators:
        with ExitStack() as opening:
            if self._actors.urls:
                self._open_servers(opening)
            if self._actors.processes:
                self._open_processes(opening)
            self._opened = opening.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        # Wakes threads that still wait for rollouts of a later step.
        self._pool.fail(RunStopped("the run ends", exit_code=1))
        self._opened.close()

    def caching_sampler(self, saved: dict[str, Any]) -> PoolSampler:
        return PoolSampler(self._pool, saved)

    @property
    def policy(self) -> ScoringModel:
        assert self._replica is not None
        return self._replica.model

    @property
    def policy_while_paused(self) -> Decoder | None:
        if self._replica is not None:
            return self._replica.model_while_paused
        return self._model if self._world.mesh is None and isinstance(self._model, Decoder) else None

    @property
    def progress(self) -> int:
        return self._pool.num_reports

    def load_weights(self, version: int) -> None:
        """As `Generators`: waits for the first weights, and for all if nothing is sampled ahead."""
        if self._replica:
            self._replica.load_weights(version)
        manifest: WeightManifest = self._weight_server.publish(version) if self._weight_server else {"version": version}
        if self._folders:
            manifest["folder"] = str(self._folders.write(version))
        self._pool.weights_version = version
        if self._world.is_main:
            self._pool.load_weights(manifest)
            if not self._actors.max_staleness or not self._pool.ready:
                self._pool.wait_for_weights()

    def pause(self) -> None:
        """Nothing to do: they use other memory."""

    def conversing(self) -> AbstractContextManager[bool]:
        return nullcontext(True)  # no rank follows another

    def metrics(self) -> dict[str, float]:
        return self._pool.metrics()

    def trace_events(self) -> list[dict[str, Any]]:
        return self._pool.trace_events()

    def _open_servers(self, opening: ExitStack) -> None:
        actors, world = self._actors, self._world
        servers = ServerSupervisor(
            actors.urls,
            self._spec,
            self._pool,
            max(SILENCE_SECONDS, actors.silence_seconds),
            finish=self._finish,
        )
        world.on_main(lambda: opening.enter_context(servers))
        untie_head = not world.from_main(lambda: servers.exact)
        dtype, versions = resolve_dtype(self._spec.dtype), versions_to_keep(actors)
        self._folders = WeightFolders(self._run / "weights", self._model, dtype, world, untie_head, versions)
        opening.callback(self._folders.close)

    def _open_processes(self, opening: ExitStack) -> None:
        actors, world = self._actors, self._world
        key_file = self._run / "logs" / KEY
        key = bytes.fromhex(world.from_main(lambda: self._fresh_key(key_file).hex()))
        opening.callback(key_file.unlink, missing_ok=True)
        loopback = actors.host.startswith("127.") or world.is_main
        host = actors.host if loopback else socket.gethostname()
        tensors, dtype = dict(self._model.named_parameters()), resolve_dtype(self._spec.dtype)
        self._weight_server = WeightServer(tensors, dtype, world, key, host, versions_to_keep(actors))
        opening.callback(self._weight_server.close)
        if not world.is_main:
            return
        listener = Listener(key, actors.host, actors.port)
        address = "{}:{}".format(*listener.address)
        # Entered in this order, so that generators are told to end before they are killed.
        supervisor = GeneratorSupervisor(actors, self._pool, address, key, self._spec.device, self._run / "logs")
        opening.enter_context(supervisor)
        welcome = self._spec.welcome(actors, self._run)
        opening.enter_context(GeneratorRegistry(self._pool, listener, welcome, self._spec.engine.max_sequences))
        opening.callback(supervisor.stop_restarting)
        if actors.port:
            command = f"lockstep generator --trainer {address} --key {key_file}"
            announce(f"rl: generators join with {command}")
            if not actors.generators:
                self._pool.advice = f"start one while the run waits for it ({command})"

    def _fresh_key(self, file: Path) -> bytes:
        file.unlink(missing_ok=True)  # of a run that was killed
        return make_key(file) if self._actors.port else token_bytes(32)
