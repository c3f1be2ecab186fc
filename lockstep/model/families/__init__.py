"""The families: a file of constants and names for each, their sizes by name, and reading and writing `config.json`."""

from lockstep.model.families.registry import FAMILIES, family_module, is_copy, is_ignored, quantized_methods
from lockstep.model.families.settings import from_hugging_face, to_hugging_face
from lockstep.model.families.sizes import PRESETS, preset

__all__ = [
    "FAMILIES", "PRESETS", "family_module", "from_hugging_face", "is_copy", "is_ignored", "preset",
    "quantized_methods", "to_hugging_face",
]  # fmt: skip
