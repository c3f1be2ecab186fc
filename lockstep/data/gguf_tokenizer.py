"""The tokenizer and chat template in a GGUF file, as the files of a Hugging Face folder."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path

from lockstep.errors import UserError
from lockstep.model.gguf import opened

NONE = (None, "none", "no_vocab")
"""Values of `tokenizer.ggml.model` without a tokenizer."""


def tokenizer_in(file: Path) -> Path:
    """The folder of a file's tokenizer: a temporary one for the tokenizer in the file; without any, the file's own.

    Raises UserError without transformers, and for a tokenizer that it cannot build.
    """
    if opened(file).metadata.get("tokenizer.ggml.model") in NONE:
        return file.parent
    return _extracted(file, file.stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _extracted(file: Path, written: int) -> Path:
    """A temporary folder with `tokenizer.json` and its settings, which transformers builds from the file's metadata;
    deleted when the process ends. written: the file's modification time, so that a change is noticed."""
    missing = f"{file}: there is no tokenizer.json next to it; put the model's there"
    try:
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise UserError(f"{missing}, or install transformers, which builds it from the file's metadata") from error
    folder = Path(tempfile.mkdtemp(prefix="lockstep-tokenizer-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        # Unlike AutoTokenizer, it needs neither the package gguf nor the model's settings.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(file.parent), gguf_file=file.name)
        tokenizer.save_pretrained(str(folder))
    except Exception as error:  # of many kinds: the metadata is another program's
        raise UserError(
            f"{missing}: transformers could not build it from the file's metadata ({type(error).__name__}: "
            f"{error!s:.300})"
        ) from error
    return folder
