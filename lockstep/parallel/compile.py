"""One compilation for trainer and generator: each block's two halves, shared by all layers.

The same compiled functions are called with and without gradients, for any number of tokens. What they compute is
compared at start-up, so a compiler that lets a row's neighbours, or the gradient, change its bits is refused. Compiled
bits differ from eager ones: a model is compiled for both sides or for neither, which is why the compiled functions
belong to the model.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._inductor
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from lockstep.config import CompileConfig
from lockstep.errors import UserError
from lockstep.model import Decoder
from lockstep.model.decoder import Block
from lockstep.ops.cache import cache_folder, fingerprint, require_private
from lockstep.parallel.tensor import tensor_group_of

PROBE_ROWS = 96
PROBE_COUNTS = (1, 2, 3, 7, 8, 16, 17, 33, 64)
# Rounds where eager PyTorch rounds. Without it a fused kernel keeps float32 where another, cut elsewhere, has rounded
# to bfloat16, and a forward pass for the gradient is cut elsewhere.
OPTIONS: dict[str, Any] = {"emulate_precision_casts": True}


def apply_compile(model: Decoder, config: CompileConfig) -> None:
    """Compiles `model`'s blocks as `config` says; both `Engine` and `Trainer` then run what was compiled.

    Compiles at once, with and without gradients, and compares the results' bits. Raises UserError where they depend
    on the number of rows or on the gradient.
    """
    if config.backend == "none":
        return
    _refuse_unsafe(model)
    keep_artifacts()
    # Of one function for all models of a process: dtypes, devices, and each with and without gradients.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    halves = CompiledHalves(config)
    block = next(iter(model.layers))  # not number 0, which a later stage of a pipeline does not have
    assert isinstance(block, Block)
    # Of a sharded layer the forward sees whole weights in the compute dtype.
    if isinstance(block, FSDPModule):
        block.unshard()
    _compare(model, block, halves)
    if isinstance(block, FSDPModule):
        block.reshard()
    halves.frozen = True
    model.halves = halves


class CompiledHalves:
    """What a decoder calls instead of `Block.before_attention` and `Block.after_attention`.

    Once `frozen`, a call that would compile again raises torch._dynamo.exc.RecompileError, which names the guard.
    """

    def __init__(self, config: CompileConfig):
        self.frozen = False
        self._before = torch.compile(Block.before_attention, backend=config.backend, fullgraph=True, options=OPTIONS)
        self._after = torch.compile(Block.after_attention, backend=config.backend, fullgraph=True, options=OPTIONS)

    def before_attention(self, block: Block, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = hidden.shape[0]
        q, k, v = self._call(self._before, block, hidden, cos, sin)
        return (q, k, v) if rows > 1 else (q[:1], k[:1], v[:1])

    def after_attention(self, block: Block, hidden: Tensor, attended: Tensor) -> Tensor:
        out: Tensor = self._call(self._after, block, hidden, attended)
        return out if hidden.shape[0] > 1 else out[:1]

    def _call(self, function: Any, block: Block, *rows: Tensor) -> Any:
        # A single row would be compiled for itself, so it gets company; what it computes does not depend on that.
        rows = rows if rows[0].shape[0] > 1 else tuple(_doubled(x) for x in rows)
        for x in rows:
            torch._dynamo.mark_dynamic(x, 0)
        before = torch._dynamo.config.error_on_recompile
        torch._dynamo.config.error_on_recompile = self.frozen
        try:
            return function(block, *rows)
        finally:
            torch._dynamo.config.error_on_recompile = before


def keep_artifacts() -> Path:
    """Keeps what is compiled in the user's cache folder, apart for every version and machine; returns the folder.

    TORCHINDUCTOR_CACHE_DIR takes its place. Raises UnsafeCache where others may write to that.
    """
    own = cache_folder() / f"compiled-{fingerprint()}"
    folder = Path(os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(own)))
    if folder != own and folder.exists():
        require_private(folder, "set TORCHINDUCTOR_CACHE_DIR to a folder of your own")
    return folder


def _doubled(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0) * (x.ndim - 1) + (0, 1))


def _refuse_unsafe(model: Decoder) -> None:
    """On the CPU a compiled loop ends in single elements where its length is no multiple of the vector's."""
    if tensor_group_of(model) is not None:
        raise UserError(
            'compile.backend = "inductor" does not go with parallel.tensor, whose exchanges are not traced; set '
            'compile.backend = "none"'
        )
    lanes = 32
    shape = model.config
    widths = {"dim": shape.dim, "intermediate_size": shape.intermediate_size, "head_dim": shape.head_dim}
    for name, width in widths.items():
        if model.device.type == "cpu" and width % lanes:
            raise UserError(
                f'compile.backend = "inductor" does not go with {name} {width} on a CPU: compiled loops treat the last '
                f"elements of a tensor in another way unless it is a multiple of {lanes}, so a row's bits would depend "
                'on its place; set compile.backend = "none"'
            )


def _compare(model: Decoder, block: Block, halves: CompiledHalves) -> None:
    generator = torch.Generator().manual_seed(0)
    config = model.config
    dtype = block.input_layernorm.weight.dtype
    hidden = torch.randn(PROBE_ROWS, config.dim, generator=generator).to(model.device, dtype)
    attended = torch.randn(PROBE_ROWS, config.num_heads, config.head_dim, generator=generator)
    attended = attended.to(model.device, dtype)
    tables = model.rotary(torch.arange(PROBE_ROWS, device=model.device))

    def outputs(rows: slice) -> list[Tensor]:
        cos, sin = (t[rows] for t in tables)
        # Fresh tensors: what is marked dynamic stays marked.
        first = halves.before_attention(block, hidden[rows].clone(), cos.clone(), sin.clone())
        return [*first, halves.after_attention(block, hidden[rows].clone(), attended[rows].clone())]

    with torch.enable_grad():
        hidden.requires_grad_()
        attended.requires_grad_()
        expected = [t.detach() for t in outputs(slice(0, PROBE_ROWS))]
        total = torch.stack([t.float().sum() for t in outputs(slice(0, 2))]).sum()
        torch.autograd.grad(total, [hidden, attended, *block.parameters()])  # compiles the gradient too
        hidden.requires_grad_(False)
        attended.requires_grad_(False)
    with torch.no_grad():
        for count in (PROBE_ROWS, *PROBE_COUNTS):
            for rows in (slice(0, count), slice(PROBE_ROWS - count, PROBE_ROWS)):
                names = ("queries", "keys", "values", "the block's output")
                for name, got, want in zip(names, outputs(rows), expected):
                    if not torch.equal(got, want[rows]):
                        raise UserError(
                            f'compile.backend = "inductor" would break the equality of trainer and generator here: '
                            f"{name} of {count} rows without a gradient differ from those of {PROBE_ROWS} rows with "
                            f'one; set compile.backend = "none"'
                        )
