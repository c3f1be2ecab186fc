"""One compilation for trainer and generator: each block's two halves, shared by all layers.

The same compiled functions are called with and without gradients, for any number of tokens. Their results are compared
at start-up, to refuse a compiler with which a row's bits depend on other rows or on the gradient. A model that only
samples is compared without gradients alone, which takes half as long, and a third over tensor ranks. Compiled bits
differ from eager ones, so a model is compiled for both sides or for neither: the compiled functions belong to the
model.

torch._dynamo and torch._inductor are imported only to compile: they take most of a second.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._functorch import config as functorch

from lockstep.cache import cache_folder, fingerprint, require_private
from lockstep.config import CompileConfig
from lockstep.errors import UserError
from lockstep.model import Decoder
from lockstep.model.decoder import Block, Halves, Projected
from lockstep.model.formatted import formatted_weights
from lockstep.model.shard import is_dtensor, is_fsdp
from lockstep.ops.opaque import library
from lockstep.parallel.exchange import exchanged, gather_rows, local_rows, rows_are_whole, whole_rows
from lockstep.parallel.messages import from_all
from lockstep.parallel.tensor_group import sharded_over_data, tensor_group_of

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
PROBE_ROWS = 96
PROJECTED = ("queries", "keys", "values", "gates")
PROBE_COUNTS = (1, 2, 3, 7, 8, 16, 17, 33, 64)
# Rounds where eager PyTorch rounds. Without it, one fused kernel keeps float32 where another, split differently, rounds
# to bfloat16, and the forward pass for the gradient is split differently.
OPTIONS: dict[str, Any] = {"emulate_precision_casts": True}


def apply_compile(model: Decoder, config: CompileConfig, trains: bool = True) -> None:
    """Compiles `model`'s blocks as configured; both `Engine` and `Trainer` then run the compiled functions.

    Compiles immediately, with and without gradients, and compares the results bit for bit. With `trains` False, it
    compiles for an `Engine` alone. Raises UserError if the bits depend on the number of rows or on the
    gradient.
    """
    if config.backend == "none":
        return
    _refuse_unsafe(model)
    from torch import _dynamo

    keep_artifacts()
    # One function serves all models of a process: several dtypes and devices, with and without gradients.
    _dynamo.config.recompile_limit = max(_dynamo.config.recompile_limit, 64)
    halves = CompiledHalves(model.halves, config)
    for block in _one_of_each_kind(model):
        # The forward of a sharded layer sees unsharded weights in the compute dtype.
        if is_fsdp(block):
            block.unshard()
        sharded = any(is_dtensor(parameter) for parameter in block.parameters())
        with _caching_of_sharded_layers() if sharded else nullcontext():
            _compare(model, block, halves, trains)
        if is_fsdp(block):
            block.reshard()
    halves.frozen = True
    model.halves = halves


@contextmanager
def _caching_of_sharded_layers() -> Iterator[None]:
    """Lets later processes reuse code that was compiled for DTensors.

    The key of an entry contains the DTensors' meshes, with a hash that Python randomizes in each process. PyTorch's
    cache of traced graphs is off: its keys do not distinguish DTensor's process groups.
    """
    from torch.distributed.device_mesh import DeviceMesh

    state = DeviceMesh.__getstate__

    def without_hash(mesh: DeviceMesh) -> dict[str, Any]:
        return state(mesh) | {"_hash": None}

    DeviceMesh.__getstate__ = without_hash  # type: ignore[assignment, method-assign]
    try:
        with functorch.patch(enable_autograd_cache=False):
            yield
    finally:
        DeviceMesh.__getstate__ = state  # type: ignore[method-assign]


def _one_of_each_kind(model: Decoder) -> list[Block]:
    """The first layer of each kind: some have a dense feed-forward, others a mixture of experts; some compute in the
    model's dtype, others in a number format; some rotate queries and keys."""
    kinds: dict[tuple[Any, ...], Block] = {}
    for block in model.layers:
        assert isinstance(block, Block)
        shapes = tuple((name, weight.shape) for name, weight in block.named_parameters())
        formats = tuple((name, each.format) for name, each in formatted_weights(block))
        kinds.setdefault((shapes, formats, getattr(block.mixer, "is_rotated", True)), block)
    return list(kinds.values())


class CompiledHalves:
    """Compiled replacements of `Block.before_attention` and `Block.after_attention`.

    Once `frozen`, a call that would compile again raises torch._dynamo.exc.RecompileError, which names the guard.
    """

    def __init__(self, halves: Halves, config: CompileConfig):
        self.frozen = False
        self._before = torch.compile(halves.before_attention, backend=config.backend, fullgraph=True, options=OPTIONS)
        self._after = torch.compile(halves.after_attention, backend=config.backend, fullgraph=True, options=OPTIONS)

    def before_attention(self, block: Block, hidden: Tensor, cos: Tensor, sin: Tensor) -> Projected:
        parts: Projected = self._call(self._before, block, hidden, cos, sin)
        return parts if hidden.shape[0] > 1 else tuple(part if part is None else _every_other(part) for part in parts)

    def after_attention(self, block: Block, hidden: Tensor, attended: Tensor, gate: Tensor | None) -> Tensor:
        out: Tensor = self._call(self._after, block, hidden, attended, gate)
        return out if hidden.shape[0] > 1 else _every_other(out)

    def _call(self, function: Any, block: Block, hidden: Tensor, *others: Tensor | None) -> Any:
        from torch import _dynamo

        rows: tuple[Tensor | None, ...] = (hidden, *others)
        # A single row would be compiled separately, so it is doubled, which does not change its bits.
        if hidden.shape[0] == 1:
            rows = tuple(x if x is None else x.repeat_interleave(2, 0) for x in rows)
        for x in rows:
            if x is not None:
                _dynamo.mark_dynamic(x, 0)
        before = _dynamo.config.error_on_recompile
        _dynamo.config.error_on_recompile = self.frozen
        try:
            return function(block, *rows)
        finally:
            _dynamo.config.error_on_recompile = before


def _every_other(x: Tensor) -> Tensor:
    return x[::2].clone()  # not a view, which FSDP would not free


def keep_artifacts() -> Path:
    """Caches compiled code in the user's cache folder, by machine, torch version and set of operators.

    Returns the folder; TORCHINDUCTOR_CACHE_DIR overrides it. Raises UnsafeCache if other users can write to it.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    default = cache_folder() / f"compiled-{fingerprint(*library.schemas)}"
    # Importing torch._dynamo also sets the variable if the user has not.
    if os.environ.get(CACHE_VARIABLE, default_cache_dir()) == default_cache_dir():
        os.environ[CACHE_VARIABLE] = str(default)
    folder = Path(os.environ[CACHE_VARIABLE])
    if folder == default:
        default.mkdir(mode=0o700, exist_ok=True)
    if folder.exists():
        require_private(folder, "set TORCHINDUCTOR_CACHE_DIR to a folder that only you can write to")
    return folder


def _refuse_unsafe(model: Decoder) -> None:
    """Raises UserError if a CPU loop would have a scalar remainder, whose arithmetic differs from the vector part's."""
    lanes = 32
    shape, group = model.config, tensor_group_of(model)
    ranks = group.size() if group else 1
    rotated = "rotated_features" if shape.rotated_features else "head_dim"
    widths = {"dim": shape.dim, rotated: shape.rotary_dim}
    widths |= {f"a rank's part of {name}": size // ranks for name, size in shape.dense_sizes.items()}
    if shape.delta is not None:
        widths["a rank's part of the values of linear attention"] = shape.delta.values // ranks
    if shape.experts is not None:
        widths["the experts' intermediate size"] = shape.experts.intermediate_size
    for name, width in widths.items():
        if model.device.type == "cpu" and width % lanes:
            raise UserError(
                f'compile.backend = "inductor" does not work with {name} {width} on a CPU: compiled loops treat the '
                f"last elements of a tensor differently unless it is a multiple of {lanes}, so a row's bits would "
                'depend on its position; set compile.backend = "none"'
            )


def _compare(model: Decoder, block: Block, halves: CompiledHalves, trains: bool) -> None:
    """Compiles all that trainer and generator will call, and compares subsets of the rows bitwise with all rows."""
    group = tensor_group_of(model)
    ranks = group.size() if group else 1
    probe = _Probe(model, block, halves, group, trains)
    problems: list[str] = []
    if trains:
        with torch.enable_grad():
            probe.require_gradients(True)
            expected = [t.detach() for t in probe.outputs(slice(0, PROBE_ROWS))]
            total = torch.stack([t.float().sum() for t in probe.outputs(slice(0, 2 * ranks))]).sum()
            # Compiles the gradient too. Sinks belong to attention, which is called between the halves.
            weights = [weight for weight in block.parameters() if weight.requires_grad]
            torch.autograd.grad(total, [probe.hidden, probe.attended, *weights], allow_unused=True)
            if model.config.lora is not None:
                # Before the first adapted layer, nothing has a gradient: compile that too.
                for attended in (True, False):
                    probe.require_gradients(False, attended)
                    problems += probe.differences(slice(0, PROBE_ROWS), expected)
            probe.require_gradients(False)
    else:
        with torch.no_grad(), whole_rows():
            expected = probe.outputs(slice(0, PROBE_ROWS))
    with torch.no_grad():
        for count in (PROBE_ROWS, *PROBE_COUNTS):
            for rows in (slice(0, count), slice(PROBE_ROWS - count, PROBE_ROWS)):
                if trains and count % ranks == 0:
                    problems += probe.differences(rows, expected)
                # A model that is sharded over data ranks has no engine.
                if not trains or (group is not None and not sharded_over_data(model)):
                    with whole_rows():
                        problems += probe.differences(rows, expected)
    # All ranks must raise if one does, or the others would wait for it.
    if group is not None:
        problems = [problem for those in from_all(problems, group) for problem in those]
    if problems:
        raise UserError(
            'compile.backend = "inductor" would break the equality of trainer and generator here: '
            f'{problems[0]}; set compile.backend = "none"'
        )


class _Probe:
    """Inputs for a block's halves, sharded as on the ranks of a tensor axis."""

    def __init__(
        self, model: Decoder, block: Block, halves: CompiledHalves, group: dist.ProcessGroup | None, trains: bool
    ):
        self.block, self.halves, self.group, self.trains = block, halves, group, trains
        generator = torch.Generator().manual_seed(0)
        config, dtype = model.config, block.output.weight.dtype
        heads, width = config.num_heads, config.head_dim
        if block.is_delta and config.delta is not None:
            heads, width = config.delta.value_heads, config.delta.value_dim
        heads //= group.size() if group else 1
        self.hidden = torch.randn(PROBE_ROWS, config.dim, generator=generator).to(model.device, dtype)
        self.attended = torch.randn(PROBE_ROWS, heads, width, generator=generator).to(model.device, dtype)
        self.tables = model.rotary(torch.arange(PROBE_ROWS, device=model.device))[block.rope]

    def require_gradients(self, hidden: bool, attended: bool | None = None) -> None:
        """Sets requires_grad of the inputs; `attended`: None: as `hidden`."""
        self.hidden.requires_grad_(hidden)
        self.attended.requires_grad_(hidden if attended is None else attended)

    def outputs(self, rows: slice) -> list[Tensor]:
        """What the first half projects, and the block's output for these rows."""
        # Copies, since tensors that are marked dynamic stay marked.
        cos, sin = (table[rows].clone() for table in self.tables)
        hidden, attended = self.hidden[rows].clone(), self.attended[rows].clone()
        shared = self.group if self.group and not rows_are_whole() else None
        if shared:
            hidden = exchanged(hidden, shared, local_rows, gather_rows)
        first = self.halves.before_attention(self.block, hidden, cos, sin)
        out = self.halves.after_attention(self.block, hidden, attended, first[-1])
        local = exchanged(out, shared, gather_rows, local_rows) if shared else out
        return [*(part for part in first if part is not None), local]

    def differences(self, rows: slice, expected: list[Tensor]) -> Iterator[str]:
        kinds = ("inputs", "strengths", "decays", "gates") if self.block.is_delta else PROJECTED
        names = kinds[: len(expected) - 1]
        for name, output, reference in zip((*names, "the block's output"), self.outputs(rows), expected):
            if not torch.equal(output, reference[rows]):
                count = rows.stop - rows.start
                gradient = "with one" if self.trains else "without one"
                yield f"{name} of {count} rows without a gradient differ from those of {PROBE_ROWS} rows {gradient}"
