"""A generator on every training rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep.config import EngineConfig
from lockstep.data import Tokenizer
from lockstep.generate import Engine
from lockstep.generate.drafts import HistoryDraft, make_draft
from lockstep.generate.driver import DriverEngine, follow
from lockstep.model import Decoder, ScoringModel
from lockstep.parallel import World
from lockstep.rl.generators.models import PolicyReplica
from lockstep.rl.generators.work_log import engine_metrics
from lockstep.rl.rollouts.recorded import recall


class ColocatedGenerator:
    """An engine on every rank, which samples while no training takes place."""

    caching_sampler = None

    def __init__(self, replica: PolicyReplica, world: World, config: EngineConfig, tokenizer: Tokenizer):
        self._replica, self._world = replica, world
        self._follows = world.coordinate("tensor") > 0
        self._history = HistoryDraft()
        draft = make_draft(config, replica.model, self._history)
        self.sampler: Engine
        if world.tensor_group is None or self._follows:
            self.sampler = Engine(replica.model, config, tokenizer, draft)
        else:
            self.sampler = DriverEngine(replica.model, config, tokenizer, draft, drives=False)
        self._last_statistics, self._last_metrics = asdict(self.sampler.statistics), time.monotonic()

    @property
    def policy(self) -> ScoringModel:
        return self._replica.model

    @property
    def policy_while_paused(self) -> Decoder | None:
        return self._replica.model_while_paused

    @property
    def progress(self) -> int:
        return self.sampler.statistics.steps

    def metrics(self) -> dict[str, float]:
        """As `Generators`: of the engine in one process, or of each tensor group's, named after its first rank."""
        before, self._last_statistics = self._last_statistics, asdict(self.sampler.statistics)
        began, self._last_metrics = self._last_metrics, time.monotonic()
        new = {name: count - before[name] for name, count in self._last_statistics.items()}
        local = engine_metrics(new, self._last_metrics - began)
        per_rank = self._world.gather({} if self._follows else local)
        names = [f"rank_{rank}" for rank in range(len(per_rank))] if len(per_rank) > 1 else ["own"]
        return {
            f"generators/{name}/{key}": float(value)
            for name, metrics in zip(names, per_rank)
            for key, value in metrics.items()
        }

    def recall(self, run: Path) -> None:
        """Seeds drafting with what a resumed run sampled earlier.

        Not in a tensor group, whose ranks must all draft the same.
        """
        if self._world.tensor_group is None:
            recall(self._history, run)

    def trace_events(self) -> list[dict[str, Any]]:
        return []

    def load_weights(self, version: int) -> None:
        self._replica.load_weights(version)
        self.sampler.weights_changed(version)

    @contextmanager
    def conversing(self) -> Iterator[bool]:
        """As `Generators`: when requests come depends on the environment, so one rank drives and the others follow."""
        if self._follows:
            follow(self.sampler)
        with self.sampler.driving() if isinstance(self.sampler, DriverEngine) else nullcontext():
            yield not self._follows

    def pause(self) -> None:
        self._replica.pause(self.sampler.release_weights)
