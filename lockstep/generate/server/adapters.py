"""Adapters of the served model: loaded and unloaded while requests run, and named by a request's `model`."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

from lockstep.checkpoint import model_folder
from lockstep.generate.server.api_error import ApiError
from lockstep.generate.server.protocol import LoadAdapterRequest, UnloadAdapterRequest
from lockstep.generate.server.service import ServedAdapter, Service
from lockstep.model.adapter_folder import LOCKSTEP_SETTINGS, SETTINGS, TENSORS
from lockstep.model.adapters import Adapter
from lockstep.model.adapters import load_adapter as read_adapter

logger = logging.getLogger("lockstep.server")


def load_first_adapters(service: Service) -> None:
    """Loads those of `config.lora_modules`, before the server starts. Raises UserError."""
    for module in service.config.lora_modules:
        name, _, path = module.partition("=")
        adapter = _read(service, name, model_folder(path))
        service.engine.load_adapter(name, adapter)
        service.adapters[name] = ServedAdapter(adapter, path, int(time.time()))


async def load_adapter(service: Service, request: LoadAdapterRequest) -> str:
    """Requests can name the adapter afterwards. Raises ApiError and UserError, with nothing changed, for a name that is
    taken, one adapter too many, and a folder that does not fit."""
    name = request.lora_name
    async with service.updating:
        if name == service.model_name or name in service.adapters:
            raise ApiError(400, f"the adapter {name!r} has already been loaded", "lora_name", "already_loaded")
        if len(service.adapters) >= service.config.max_loras:
            message = f"{len(service.adapters)} adapters are loaded, the server's limit (--max-loras); unload one"
            raise ApiError(400, message, "lora_name", "too_many_adapters")
        # In another thread, since it reads and checks whole files: other requests continue.
        folder = await asyncio.to_thread(_folder, service, request.lora_path)
        adapter = await asyncio.to_thread(_read, service, name, folder)
        await service.engine_loop.between_steps(lambda engine: engine.load_adapter(name, adapter))
        service.adapters[name] = ServedAdapter(adapter, request.lora_path, int(time.time()))
    return f"Success: LoRA adapter '{name}' added successfully."


async def unload_adapter(service: Service, request: UnloadAdapterRequest) -> str:
    """Running requests finish with the adapter, new ones get a 404. Raises ApiError for an unknown name."""
    name = request.lora_name
    async with service.updating:
        if name not in service.adapters:
            raise ApiError(404, f"the adapter {name!r} is not loaded", "lora_name", "adapter_not_found")
        del service.adapters[name]
        await service.engine_loop.between_steps(lambda engine: engine.unload_adapter(name))
    return f"Success: LoRA adapter '{name}' removed successfully."


def describe_adapters(service: Service) -> dict[str, Any]:
    """The loaded adapters, with their sizes, and their limit."""
    loaded = {name: {"rank": each.rank, "bytes": each.adapter.nbytes} for name, each in service.adapters.items()}
    return {"loaded": loaded, "bytes": sum(each["bytes"] for each in loaded.values()), "max": service.config.max_loras}


def _read(service: Service, name: str, folder: Path) -> Adapter:
    model = service.engine.model
    adapter = read_adapter(folder, model, service.weights_folder)
    if others := set(adapter.config.eos_token_ids) - set(model.config.eos_token_ids):
        logger.warning(
            "adapter %r: its run also ended texts at the tokens %s, but the server ends them where its model does",
            name,
            ", ".join(map(str, sorted(others))),
        )
    return adapter


def _folder(service: Service, path: str) -> Path:
    """The folder of an adapter, within that of `config.lora_folder`. Raises ApiError for any other path."""
    if not service.config.lora_folder:
        message = "the server was started without --lora-folder, the folder whose adapters can be loaded while it runs"
        raise ApiError(400, message, "lora_path", "no_lora_folder")
    home = Path(service.config.lora_folder).resolve()
    try:
        folder = (home / path).resolve()
        files = [(folder / name).resolve() for name in (SETTINGS, TENSORS, LOCKSTEP_SETTINGS)]
        found = folder.is_dir()
    except (OSError, ValueError, RuntimeError) as error:
        raise ApiError(400, f"lora_path cannot be read ({error})", "lora_path") from error
    if any(not place.is_relative_to(home) for place in (folder, *files)):
        raise ApiError(400, f"{path!r} is not in the folder that --lora-folder names", "lora_path", "outside")
    if not found:
        raise ApiError(404, f"no adapter found for {path!r}", "lora_path", "adapter_not_found")
    return folder
