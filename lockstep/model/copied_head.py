"""The copy of the base's head that peft saves with an adapter of the head.

transformers and peft would use its values. Adapters here have none: it is only read to see that they are the base's.
"""

from __future__ import annotations

from pathlib import Path

from lockstep.errors import UserError
from lockstep.model.adapter_folder import HEAD_COPY, TENSORS
from lockstep.model.folder import open_tensors
from lockstep.model.stored import EMBEDDING, HEAD
from lockstep.model.stored_tensor import FileTensor
from lockstep.model.tensors import stored_tensors
from lockstep.model.tied_head import are_equal


def refuse_other_head(folder: Path, base: Path) -> None:
    """Raises UserError if an adapter's folder has a copy of the head with other values than the one in `base`."""
    path = folder / TENSORS
    opened = open_tensors(path)
    if HEAD_COPY not in opened.keys():  # noqa: SIM118
        return
    stored = stored_tensors(base)
    own = HEAD if HEAD in stored else EMBEDDING
    if own not in stored or not are_equal(FileTensor(path, opened.get_slice(HEAD_COPY)), stored[own]):
        raise UserError(
            f"{path}: {HEAD_COPY} has other values than {own} in {base}; give its own base with --base DIR, or save it "
            "with peft's save_embedding_layers=False if the difference is a rounding"
        )
