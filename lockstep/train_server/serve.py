"""From a configuration to a running server of the training API."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from lockstep.checkpoint import open_model
from lockstep.config import TrainServerConfig
from lockstep.data import load_tokenizer, with_ends
from lockstep.data.chat import load_chat_template
from lockstep.generate.engine import Engine
from lockstep.generate.server.serve import Server, access_lines, require_address, settle_garbage
from lockstep.observe import start_line
from lockstep.train_server.app import create_app
from lockstep.train_server.service import Service

logger = logging.getLogger("lockstep.server")


def build_service(config: TrainServerConfig, folder: Path) -> Service:
    """The service for the model in `folder`. Raises UserError if the folder is incomplete."""
    model = open_model(folder, config.dtype, config.device, config.arithmetic)
    model.requires_grad_(False)
    tokenizer = load_tokenizer(folder, model.config.vocab_size)
    model.config = with_ends(model.config, tokenizer, load_chat_template(folder))
    name = config.model_name or config.model.rstrip("/")
    return Service(config, folder, name, Engine(model, config.engine, tokenizer))


def serve(config: TrainServerConfig, folder: Path) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code."""
    require_address(config.host, config.port)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    service = build_service(config, folder)
    model = service.base
    work = f"up to {config.max_models} adapters of it in training"
    logger.info("%s", start_line(str(folder), model.config, model.device, model.dtype, work, 1, ""))
    states = len(service.states.all())
    logger.info("clients name it %r; %d saved states in %s", service.model_name, states, config.output)
    server = Server(create_app(service), config, service.limits)
    settle_garbage()
    with access_lines():
        server.run()
    return 0 if server.started else 1
