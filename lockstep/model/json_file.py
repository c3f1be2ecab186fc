"""JSON files of model folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lockstep.errors import UserError

JSON_BYTES = 2**26
"""Size limit of a JSON file in a model folder: far above any real file, and still parsed in seconds."""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises UserError if there is none."""
    try:
        if path.stat().st_size > JSON_BYTES:
            raise ValueError(f"larger than {JSON_BYTES} bytes")
        values = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error}); download or write the file again") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: not a JSON object")
    return values
