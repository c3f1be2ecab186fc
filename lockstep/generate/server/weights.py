"""Loads new weights into a running engine between two steps, without dropping a request."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import time
from pathlib import Path
from typing import Any

from lockstep.checkpoint import step_name, weights_folder
from lockstep.checkpoint.manifest import MANIFEST, damage_of_model
from lockstep.errors import UserError
from lockstep.generate.engine import Engine
from lockstep.generate.server.adapters import describe_adapters
from lockstep.generate.server.protocol import WeightsRequest
from lockstep.generate.server.service import Service
from lockstep.hub import is_local
from lockstep.model import arithmetic_of, name_of


async def update_weights(service: Service, request: WeightsRequest) -> dict[str, Any]:
    """Loads new weights in place. Raises UserError, leaving the old weights untouched, for a folder that does not
    fit."""

    def load(engine: Engine) -> dict[str, Any]:
        started = time.perf_counter()
        engine.load_weights(folder)
        version = request.version
        if version is None:
            version = step_of(folder)
        engine.weights_changed(version)
        seconds = time.perf_counter() - started
        return {"weights_version": engine.weights_version, "path": str(folder), "seconds": round(seconds, 4)}

    async with service.updating:
        if service.adapters:
            raise UserError(
                f"adapters of the present weights are loaded ({', '.join(service.adapters)}); unload them first"
            )
        # In another thread, since checksums read whole files: other requests continue.
        folder = await asyncio.to_thread(_folder, service, request)
        loaded = await service.engine_loop.between_steps(load)
        service.weights_folder = folder
        return loaded


def describe(service: Service) -> dict[str, Any]:
    """The model's shape, everything else but the weights that its bits depend on, and the server's limits."""
    engine, config = service.engine, service.config
    return {
        "shape": dataclasses.asdict(engine.model.config),
        "dtype": name_of(engine.model.dtype),
        "arithmetic": arithmetic_of(engine.model.device),
        "compile": config.compile.backend,
        "weights_version": engine.weights_version,
        "context": service.context,
        "max_sequences": config.engine.max_sequences,
        "max_waiting": config.max_waiting,
        "max_requests": config.max_requests,
        "max_n": config.max_n,
        "max_prompt_tokens": config.max_prompt_tokens,
        "adapters": describe_adapters(service),
    }


def step_of(folder: Path) -> int | None:
    """The step that a checkpoint's folder is named after."""
    match = re.fullmatch(r"step_(\d{1,18})", folder.name)
    return int(match[1]) if match else None


def _folder(service: Service, request: WeightsRequest) -> Path:
    if request.path is not None:
        folder = Path(request.path)
        try:
            folder = weights_folder(folder)
            folder.is_dir()
        except (OSError, ValueError) as error:
            raise UserError(f"{request.path!r}: cannot be read ({error})") from error
    elif request.version is None:
        raise UserError("give path (a model's folder) or version (a step of the served run)")
    elif step_of(service.folder) is None:
        raise UserError("the server was not started from a run's folder, so it cannot find versions; give path")
    else:
        folder = service.folder.with_name(step_name(request.version))
    if not is_local(folder):
        raise UserError(f"{folder}: no such folder; give a Hugging Face model folder, a run's folder, or its step")
    if (folder / MANIFEST).is_file() and (problem := damage_of_model(folder)):
        raise UserError(f"{folder}: {problem}; give another checkpoint")
    return folder
