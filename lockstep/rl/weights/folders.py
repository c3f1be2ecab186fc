"""A run's newest weights as model folders, for servers that read them from a shared disk."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from lockstep.checkpoint.manifest import Piece
from lockstep.checkpoint.part import Part, in_place
from lockstep.checkpoint.storage import save_parts
from lockstep.errors import RunStopped
from lockstep.model import TrainableModel, write_description
from lockstep.parallel import World

EMBEDDING = "model/model.embed_tokens.weight"


class WeightFolders:
    """Writes `FOLDER/version_N`, whatever the model's layout, and deletes older ones. All ranks call its methods.

    A folder with its final name is complete. untie_head: also writes the output head of a model with tied embeddings.
    keep: how many versions stay on disk.
    """

    def __init__(
        self,
        folder: Path,
        model: TrainableModel,
        dtype: torch.dtype,
        world: World,
        untie_head: bool = False,
        keep: int = 2,
    ):
        self.folder, self._model, self._dtype, self._world = folder.resolve(), model, dtype, world
        self._untie_head, self._keep = untie_head and model.config.tie_embeddings, keep
        self._group = dist.new_group(backend="gloo") if world.mesh is not None else None
        self._written: list[Path] = []
        self.close()

    def write(self, version: int) -> Path:
        """Writes the current weights; returns the folder. Raises RunStopped, on all ranks, if the disk refuses them."""
        folder = self.folder / f"version_{version:08}"
        incomplete = folder.with_name(folder.name + ".partial")

        def complete(files: dict[str, str], pieces: list[Piece]) -> None:
            shape = self._model.config
            weights = {name.removeprefix("model/"): file for name, file in files.items()}
            write_description(incomplete, shape, self._dtype, weights, shape.num_parameters * self._dtype.itemsize)
            shutil.rmtree(folder, ignore_errors=True)
            incomplete.rename(folder)

        tensors = {
            f"model/{stored}": (part, self._dtype)
            for name, parameter in self._model.named_parameters()
            for stored, part in Part.stored(name, parameter, self._model.config).items()
        }
        if self._untie_head and EMBEDDING in tensors:
            tensors["model/lm_head.weight"] = tensors[EMBEDDING]
        try:
            save_parts(in_place(tensors), incomplete, {"model": "model"}, complete, self._group)
        except OSError as error:
            raise RunStopped(
                f"{folder}: new weights for the generators behind HTTP cannot be written ({error}), and the run ends "
                "here. Free some space, then --resume continues from the newest checkpoint",
                exit_code=1,
            ) from error
        self._written = [*(old for old in self._written if old != folder), folder]
        for old in self._written[: -self._keep] if self._world.is_main else ():
            shutil.rmtree(old, ignore_errors=True)
        self._written = self._written[-self._keep :]
        return folder

    def close(self) -> None:
        """Deletes all versions, including those left behind by an earlier process of the run."""
        if self._world.is_main:
            shutil.rmtree(self.folder, ignore_errors=True)
