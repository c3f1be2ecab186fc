"""Generators in separate processes, to which rank 0 of the trainer talks, and which take the weights from all ranks."""

from __future__ import annotations

import dataclasses
import os
import socket
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from secrets import token_bytes
from typing import Any

from lockstep import ops
from lockstep.config import RLConfig
from lockstep.errors import RunStopped
from lockstep.generate import SamplingParams
from lockstep.model import Decoder, ScoringModel, TrainableModel, arithmetic_of, resolve_dtype
from lockstep.observe import announce
from lockstep.parallel import World
from lockstep.rl.generators.channel import Listener, make_key
from lockstep.rl.generators.http_remote import SILENCE_SECONDS
from lockstep.rl.generators.http_servers import Wanted
from lockstep.rl.generators.http_supervisor import ServerSupervisor
from lockstep.rl.generators.policy_replica import PolicyReplica
from lockstep.rl.generators.pool import CachingGeneratorPool, GeneratorPool
from lockstep.rl.generators.registry import GeneratorRegistry
from lockstep.rl.generators.supervisor import Supervisor
from lockstep.rl.rollouts.plain import plain_shape
from lockstep.rl.scoring.routes import routes_form
from lockstep.rl.weights.folders import WeightFolders
from lockstep.rl.weights.server import WeightManifest, WeightServer, versions_laid_out

KEY = "generators.key"
"""Key file in the run's `logs/`, for generators that join later. Removed at the end of the run unless it is killed."""


class SeparateGenerators:
    """As `Generators`. A context manager; leaving it ends the processes that it started."""

    def __init__(
        self,
        config: RLConfig,
        world: World,
        model: TrainableModel,
        run: Path,
        replica: PolicyReplica | None = None,
    ):
        self._replica = replica
        self._config, self._world, self._model, self._run = config, world, model, run
        pages = config.engine.cache_tokens // ops.PAGE
        self._finish = config.actors.on_update == "finish"
        # Only rank 0's has generators: the others request nothing.
        self.sampler = GeneratorPool(
            model.config.max_positions,
            pages * ops.PAGE,
            config.actors.start_seconds,
            self._finish,
            vocab_size=model.config.vocab_size,
            eos_token_ids=model.config.eos_token_ids,
        )
        self._opened = ExitStack()
        self._weight_server: WeightServer | None = None
        self._folders: WeightFolders | None = None

    def __enter__(self) -> SeparateGenerators:
        with ExitStack() as opening:
            self._open(opening)
            self._opened = opening.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        # Releases whoever still waits for rollouts of a later step.
        self.sampler.fail(RunStopped("the run ends", exit_code=1))
        self._opened.close()

    def caching_sampler(self, saved: dict[str, Any]) -> CachingGeneratorPool:
        """As `Generators`."""
        return CachingGeneratorPool(self.sampler, saved)

    def metrics(self) -> dict[str, float]:
        """As `Generators`; on rank 0, which talks to them."""
        return self.sampler.metrics()

    def trace_events(self) -> list[dict[str, Any]]:
        """As `Generators`."""
        return self.sampler.trace_events()

    @property
    def policy(self) -> ScoringModel:
        """As `Generators`."""
        assert self._replica is not None
        return self._replica.model

    @property
    def progress(self) -> int:
        return self.sampler.heard

    def load_weights(self, version: int) -> None:
        """As `Generators`: waits for the first weights, and for all if nothing is sampled ahead."""
        if self._replica:
            self._replica.load_weights(version)
        manifest: WeightManifest = self._weight_server.publish(version) if self._weight_server else {"version": version}
        if self._folders:
            manifest["folder"] = str(self._folders.write(version))
        self.sampler.weights_version = version
        if self._world.is_main:
            self.sampler.load_weights(manifest)
            if not self._config.actors.max_staleness or not self.sampler.ready:
                self.sampler.wait_for_weights()

    def conversing(self) -> AbstractContextManager[bool]:
        """As `Generators`: no rank follows another."""
        return nullcontext(True)

    def pause(self) -> None:
        """As `Generators`: nothing to do, as they have their own memory."""

    @property
    def policy_while_paused(self) -> Decoder | None:
        """As `Generators`."""
        if self._replica is None and self._world.mesh is None and isinstance(self._model, Decoder):
            return self._model
        return self._replica.model_while_paused if self._replica else None

    def _open(self, opening: ExitStack) -> None:
        config, world, actors = self._config, self._world, self._config.actors
        if actors.urls:
            silence = max(SILENCE_SECONDS, actors.silence_seconds)
            servers = ServerSupervisor(actors.urls, self._wanted(), self.sampler, silence, finish=self._finish)
            world.on_main(lambda: opening.enter_context(servers))
            dtype, own_head = resolve_dtype(config.dtype), not world.from_main(lambda: servers.exact)
            weights = self._run / "weights"
            self._folders = WeightFolders(weights, self._model, dtype, world, own_head, versions_laid_out(actors))
            opening.callback(self._folders.close)
        if actors.processes:
            self._open_processes(opening)

    def _open_processes(self, opening: ExitStack) -> None:
        config, world, actors = self._config, self._world, self._config.actors
        path = self._run / "logs" / KEY
        key = bytes.fromhex(world.from_main(lambda: self._fresh_key(path).hex()))
        opening.callback(path.unlink, missing_ok=True)
        loopback = actors.host.startswith("127.") or world.is_main
        host = actors.host if loopback else socket.gethostname()
        tensors = dict(self._model.named_parameters())
        self._weight_server = WeightServer(
            tensors, resolve_dtype(config.dtype), world, key, host, versions_laid_out(actors)
        )
        opening.callback(self._weight_server.close)
        if not world.is_main:
            return
        listener = Listener(key, actors.host, actors.port)
        address = "{}:{}".format(*listener.address)
        # Entered in this order, so that generators are told to end before they are killed.
        supervisor = Supervisor(actors, self.sampler, address, key, config.device, self._run / "logs")
        opening.enter_context(supervisor)
        opening.enter_context(GeneratorRegistry(self.sampler, listener, self._welcome(), config.engine.max_sequences))
        opening.callback(supervisor.start_no_more)
        if actors.port:
            joining = f"lockstep generator --trainer {address} --key {path}"
            announce(f"rl: generators join with {joining}")
            if not actors.generators:
                self.sampler.advice = f"start one while the run waits for it ({joining})"

    def _fresh_key(self, path: Path) -> bytes:
        path.unlink(missing_ok=True)  # of a run that was killed
        return make_key(path) if self._config.actors.port else token_bytes(32)

    def _wanted(self) -> Wanted:
        """What the run requires of a server."""
        config, sampler = self._config, self.sampler
        return Wanted(
            shape=dataclasses.replace(self._model.config, reduction_chunks=config.parallel.reduction_chunks),
            dtype=config.dtype,
            arithmetic=arithmetic_of(self._world.device),
            compile=config.compile.backend,
            context=min(sampler.max_positions, sampler.cache_tokens),
            params=SamplingParams(
                n=config.samples_per_prompt,
                temperature=config.temperature,
                top_k=config.top_k,
                top_p=config.top_p,
                min_p=config.min_p,
                routes=routes_form(config),
            ),
        )

    def _welcome(self) -> dict[str, Any]:
        """What a generator is told about the run."""
        config = self._config
        return {
            "model": config.model,
            "shape": plain_shape(self._model.config),
            "dtype": config.dtype,
            "arithmetic": arithmetic_of(self._world.device),
            "reduction_chunks": config.parallel.reduction_chunks,
            "engine": dataclasses.asdict(config.engine),
            "compile": dataclasses.asdict(config.compile),
            "on_update": config.actors.on_update,
            "silence_seconds": config.actors.silence_seconds,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "run": str(self._run.resolve()),
        }
