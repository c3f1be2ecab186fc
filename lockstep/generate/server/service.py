"""The state that the routes share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lockstep import ops
from lockstep.config import ServeConfig
from lockstep.data import Tokenizer
from lockstep.data.chat import ChatTemplate
from lockstep.data.messages import CallLayout, between_parts, call_layout, shows_developer
from lockstep.data.replies import ReplyForm, reply_form
from lockstep.generate.engine import Engine
from lockstep.generate.server.engine_loop import EngineLoop
from lockstep.generate.server.generation_config import sampling_defaults
from lockstep.generate.server.limits import Limits
from lockstep.generate.server.metrics import Metrics
from lockstep.generate.server.responses_store import StoredResponses
from lockstep.model.adapters import Adapter

Result = TypeVar("Result")


@dataclass
class ServedAdapter:
    """An adapter that requests can name."""

    adapter: Adapter
    path: str
    """As it was given."""
    created: int

    @property
    def rank(self) -> int:
        assert self.adapter.config.lora is not None
        return self.adapter.config.lora.rank


@dataclass
class Service:
    """One model behind one engine."""

    config: ServeConfig
    folder: Path
    """The folder of the weights the server started with."""
    model_name: str
    engine: Engine
    tokenizer: Tokenizer
    template: ChatTemplate | None
    adapters: dict[str, ServedAdapter] = field(default_factory=dict)
    """By name; changed in the event loop alone."""
    updating: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while weights or adapters are loaded: concurrent updates are applied in order."""
    turns: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "large-requests"))
    """Works on large requests."""
    started: int = field(default_factory=lambda: int(time.time()))
    responses: StoredResponses = field(default_factory=StoredResponses)
    """Those of `/v1/responses`."""
    reply_form: ReplyForm = field(init=False)
    """How chat replies are split into reasoning and content."""
    between: str = field(init=False)
    """The separator that the chat template writes between two parts of a message's content."""
    call_layout: CallLayout | None = field(init=False)
    """What the chat template expects of tool calls in the history."""
    shows_developer: bool = field(init=False)
    """Whether the chat template shows messages of the role developer."""
    sampling_defaults: dict[str, Any] = field(init=False)
    """Of `SamplingParams`: for requests without a value."""
    engine_loop: EngineLoop = field(init=False)
    limits: Limits = field(init=False)
    metrics: Metrics = field(init=False)

    def __post_init__(self) -> None:
        self.weights_folder = self.folder
        """The folder of the weights in use."""
        self.reply_form = reply_form(self.tokenizer, self.template.source if self.template else None)
        self.between = between_parts(self.template) if self.template else ""
        self.call_layout = call_layout(self.template) if self.template else None
        self.shows_developer = self.template is not None and shows_developer(self.template)
        self.sampling_defaults = sampling_defaults(self.folder) if self.config.generation_config == "auto" else {}
        self.engine_loop = EngineLoop(self.engine)
        places = self.config.engine.max_sequences + self.config.max_waiting
        self.limits = Limits(self.config.max_requests, places, self.config.request_seconds)
        self.metrics = Metrics(self.engine)

    def adapter_of(self, name: str | None) -> str:
        """The engine's name of the adapter that a request's `model` names; empty: none."""
        return name if name in self.adapters else ""

    def named(self, name: str | None) -> str:
        """The name of what answers a request with this `model`."""
        return self.adapter_of(name) or self.model_name

    async def in_turn(self, work: Callable[[], Result]) -> Result:
        """Calls `work` for a large request in a thread, one call at a time: every thread that competes for the GIL or a
        core delays the event loop. Small requests do not wait for it."""
        return await asyncio.get_running_loop().run_in_executor(self.turns, work)

    @property
    def context(self) -> int:
        """The most tokens of prompt and response together."""
        return min(self.engine.model.config.max_positions, self.engine.allocator.num_pages * ops.PAGE)
