"""The state that the routes share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from lockstep import ops
from lockstep.config import ServeConfig
from lockstep.data import Tokenizer
from lockstep.data.chat import ChatTemplate
from lockstep.data.messages import between_parts
from lockstep.data.replies import ReplyForm, reply_form
from lockstep.generate.engine import Engine
from lockstep.generate.server.engine_loop import EngineLoop
from lockstep.generate.server.limits import Limits, Turns
from lockstep.generate.server.metrics import Metrics


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
    turns: Turns = field(default_factory=Turns)
    started: int = field(default_factory=lambda: int(time.time()))
    reply_form: ReplyForm = field(init=False)
    """How chat replies are split into reasoning and content."""
    between: str = field(init=False)
    """The separator that the chat template writes between two parts of a message's content."""
    engine_loop: EngineLoop = field(init=False)
    limits: Limits = field(init=False)
    metrics: Metrics = field(init=False)

    def __post_init__(self) -> None:
        self.reply_form = reply_form(self.tokenizer, self.template.source if self.template else None)
        self.between = between_parts(self.template) if self.template else ""
        self.engine_loop = EngineLoop(self.engine)
        places = self.config.engine.max_sequences + self.config.max_waiting
        self.limits = Limits(self.config.max_requests, places)
        self.metrics = Metrics(self.engine)

    @property
    def context(self) -> int:
        """The most tokens of prompt and response together."""
        return min(self.engine.model.config.max_positions, self.engine.allocator.num_pages * ops.PAGE)
