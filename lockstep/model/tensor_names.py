"""Errors for tensors whose names are not the model's: the probable cause, from the names, and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from lockstep.errors import UserError
from lockstep.model.stored import HEAD, in_language_model

# Names used by GPTQ and AWQ, compressed-tensors and fp8, bitsandbytes, and MXFP4.
_QUANTIZED = re.compile(
    r"\.(qweight|qzeros|scales|g_idx|weight_packed|weight_scale|weight_scale_inv|absmax|quant_map|SCB)$|_proj_blocks$"
)
# Prefixes of DDP, torch.compile, FSDP, checkpointing and peft.
_WRAPPER = re.compile(
    r"(?<![^.])(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|base_model\.model)\."
)


def refuse_quantized_tensors(folder: Path, names: Iterable[str]) -> None:
    """Raises UserError if one of the names is that of a part of a quantized weight."""
    if part := next(filter(_QUANTIZED.search, names), None):
        raise UserError(
            f"{folder}: tensor {part} is part of a quantized weight, but config.json does not say how it is quantized; "
            "put quantization_config back there, or give the folder that was quantized"
        )


def refuse_names(folder: Path, missing: list[str], unknown: list[str]) -> None:
    """Raises UserError for tensors of the model that are not in the folder, and for others that the model lacks."""
    refuse_quantized_tensors(folder, unknown)
    if missing:
        lack = f"{folder}: tensor {missing[0]} is missing{more(missing)}"
        if wrapped := [n for n in unknown if in_language_model(_WRAPPER.sub("", n)) == missing[0]]:
            prefix = "".join(_WRAPPER.findall(wrapped[0]))
            raise UserError(
                f'{lack}, but there is {wrapped[0]}: the names have the prefix "{prefix}" of a wrapper around the '
                "model; save the model inside it, or remove the prefix from all names (load_file and save_file of "
                "safetensors.torch)"
            )
        if missing == [HEAD]:
            raise UserError(
                f"{lack}, the output head: the model was saved without it, and config.json does not say "
                "tie_word_embeddings; save it again from AutoModelForCausalLM"
            )
        raise UserError(f"{lack}; the download may be incomplete")
    if unknown:
        raise UserError(f"{folder}: tensor {unknown[0]} is not part of this model{more(unknown)}; check config.json")


def more(names: list[str]) -> str:
    """The number of names after the first, for an error message."""
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
