"""Decodes values of Parquet rows to the objects that were written."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Decode = Callable[[Any], Any]


def decoders(path: Path) -> dict[str, Decode]:
    """A decoder for the values of each column, by the column's name.

    Text of Arrow's extension type `arrow.json` is parsed: `datasets` writes objects with different keys as such. A
    struct has the keys of the structs in all rows; those without a value are dropped.
    """
    from pyarrow import parquet

    supported = "arrow_extensions_enabled" in inspect.signature(parquet.ParquetFile).parameters
    with parquet.ParquetFile(path, **({"arrow_extensions_enabled": True} if supported else {})) as file:
        return {field.name: _decoder(field) for field in file.schema_arrow}


def _decoder(field: Any) -> Decode:
    from pyarrow import types

    kind = field.type
    name = getattr(kind, "extension_name", "") or (field.metadata or {}).get(b"ARROW:extension:name", b"").decode()
    if name == "arrow.json":
        return lambda value: None if value is None else json.loads(value)
    if types.is_struct(kind):
        inner = {kind.field(index).name: _decoder(kind.field(index)) for index in range(kind.num_fields)}
        return lambda value: None if value is None else _present({k: inner[k](v) for k, v in value.items()})
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        of_item = _decoder(kind.value_field)
        return lambda value: None if value is None else [of_item(item) for item in value]
    return lambda value: value


def _present(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
