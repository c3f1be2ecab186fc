"""What the Triton kernels become on a GPU that is not here.

Their launches are recorded on CPU tensors, at the shapes of real models, and compiled ahead of time for a compute
capability.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from lockstep import ops
from lockstep.ops import cuda
from lockstep.ops.cuda import (
    attention,
    attention_backward,
    delta,
    delta_backward,
    delta_rows,
    delta_rows_backward,
    experts,
    float8,
    grouped_linear,
    integer_linear,
    linear,
    optimizer,
    rows,
    softcap,
    vocabulary,
)  # fmt: skip
from lockstep.ops.delta_cache import DeltaSizes, paged_delta
from lockstep.ops.float8 import SCALINGS, TYPES
from lockstep.ops.vocabulary import piece_bounds

MODULES = (
    attention, attention_backward, delta, delta_backward, delta_rows, delta_rows_backward, experts, float8,
    grouped_linear, integer_linear, linear, optimizer, rows, softcap, vocabulary,
)  # fmt: skip
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""KiB of shared memory that a program can have, by compute capability (CUDA C++ Programming Guide, table of technical
specifications)."""
INSTRUCTION = {80: "mma.sync", 86: "mma.sync", 89: "mma.sync", 90: "wgmma", 100: "tcgen05", 120: "mma.sync"}
"""The tensor cores' instruction of each."""
MULTIPROCESSORS = 132


class Shape(NamedTuple):
    """Sizes of one layer on one GPU."""

    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int


SHAPES = {
    "Qwen3 0.6B": Shape(1024, 16, 8, 128, 3072, 151936),
    "Llama 1B": Shape(2048, 32, 8, 64, 8192, 128256),
    "Llama 8B": Shape(4096, 32, 8, 128, 14336, 128256),
    "Llama 70B on 8": Shape(8192, 8, 1, 128, 3584, 16032),
    "heads of 256": Shape(2304, 8, 4, 256, 9216, 256000),
}


def kernels() -> set[str]:
    """The names of all kernels that are launched, as `Launch.name` has them."""
    named = {f"{module.__name__.rpartition('.')[2]}.{name.strip('_')}" for module in MODULES for name in vars(module)}
    return {name for name in named if name.endswith("_kernel")}


class Pointer(NamedTuple):
    dtype: torch.dtype


class Described(NamedTuple):
    dtype: torch.dtype
    block: tuple[int, ...]


@dataclass(frozen=True)
class Launch:
    """One compiled variant of a kernel, as Triton tells them apart."""

    function: Any
    arguments: tuple[Any, ...]
    constants: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        return f"{self.function.__module__.rpartition('.')[2]}.{self.function.__name__.strip('_')}"

    @property
    def sizes(self) -> dict[str, Any]:
        return dict(self.constants)


class Build(NamedTuple):
    """stages: of the pipeline, after those that do not fit were dropped. stack: bytes of spilled registers a thread."""

    stages: int
    shared: int
    registers: int
    stack: int
    instructions: frozenset[str]


def launches(dtype: torch.dtype, capability: int, shapes: dict[str, Shape] = SHAPES) -> list[Launch]:
    """All that training, prefill and decode of these shapes launch there, each variant once."""
    found: dict[Launch, None] = {}

    def record(function: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        varying = function.do_not_specialize
        kinds = [_kind(value, name in varying) for name, value in zip(function.arg_names, arguments)]
        found[Launch(function, tuple(kinds), tuple(constants.items()))] = None

    with _on_a_gpu(record, capability):
        for shape in shapes.values():
            for part in (_products, _integers, _float8, _attention, _rows_and_vocabulary, _experts, _delta):
                part(shape, dtype)
    return list(found)


@contextmanager
def _on_a_gpu(record: Callable[..., None], capability: int) -> Iterator[None]:
    """CPU tensors go to the kernels, whose launches are only recorded; every tile that is compared agrees."""
    caches = (linear.fitting, grouped_linear._fitting, attention.high_tiles_agree)
    properties = type("Properties", (), {"multi_processor_count": MULTIPROCESSORS})
    patches = [patch.object(module, "launch", record) for module in MODULES]
    patches += [
        patch.object(cuda, "usable", lambda x: True),
        patch.object(linear, "has_copy_engine", lambda x: x.element_size() == 2 and capability >= 90),
        patch.object(linear, "agrees", lambda *_: True),
        patch.object(attention, "high_tiles_agree", lambda dtype, *_: dtype != torch.float32),
        patch("torch.cuda.get_device_properties", lambda device: properties),
    ]
    for each in caches:
        each.cache_clear()
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()
        for each in caches[:2]:
            each.cache_clear()


def _kind(value: Any, varies: bool) -> Any:
    """A value that Triton compiles for as it does for this one."""
    if isinstance(value, Tensor):
        return Pointer(value.dtype)
    if isinstance(value, TensorDescriptor):
        return Described(value.base.dtype, tuple(value.block_shape))
    if isinstance(value, int):
        return 2 if varies or (value % 16 and value != 1) else 1 if value == 1 else 16
    return value if value is None else 0.5


def _products(shape: Shape, dtype: torch.dtype) -> None:
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    sizes = [(shape.dim, width), (shape.heads * shape.head_dim, shape.dim), (shape.dim, shape.inner)]
    for inner, outer in [*sizes, (shape.inner, shape.dim), (shape.dim, shape.vocab)]:
        weight = torch.empty(outer, inner, dtype=dtype)
        for count in (1, 256, 8192):
            ops.linear(torch.empty(count, inner, dtype=dtype), weight)


def _integers(shape: Shape, dtype: torch.dtype) -> None:
    """Of few outputs, since the int8 product is computed: no kernel is compiled for a number of them."""
    for inner in (shape.dim, shape.inner):
        weight = torch.zeros(256, inner, dtype=dtype)
        for count in (1, 64):
            x = torch.empty(count, inner, dtype=dtype)
            ops.int8_linear(x, weight)
            for group in (32, 128):
                ops.int4_linear(x, weight, group=group)


def _float8(shape: Shape, dtype: torch.dtype) -> None:
    x = torch.empty(256, shape.dim, dtype=dtype)
    for each in (x, x.T):
        float8.row_codes(each)
        for scaling in SCALINGS:
            float8.block_codes(each, scaling)
        for kind in TYPES.values():
            float8.scaled_codes(each, torch.ones(()), kind)


def _attention(shape: Shape, dtype: torch.dtype) -> None:
    def heads(tokens: int) -> list[Tensor]:
        counts = (shape.heads, shape.kv_heads, shape.kv_heads)
        return [torch.empty(tokens, n, shape.head_dim, dtype=dtype, requires_grad=True) for n in counts]

    windowed = [ops.Terms(window=128, sinks=torch.zeros(shape.heads))] if shape == SHAPES["Qwen3 0.6B"] else []
    for terms in (ops.Terms(), *windowed):
        for lengths in ([1024] * 4, [3 * attention.CHUNK]):
            ops.PackedAttention(lengths)(0, *heads(sum(lengths)), terms).sum().backward()
        shared = ops.SharedPrefixAttention([1024] * 4, [0, 512, 512, 512])
        shared(0, *heads(shared.tokens), terms).sum().backward()
        with torch.no_grad():
            for context in (512, 3 * attention.CHUNK):
                cache = ops.KVCache(1, context // ops.PAGE, shape.kv_heads, shape.head_dim, dtype)
                table = torch.arange(context // ops.PAGE, dtype=torch.int32)[None]
                for new in (1, context // 2):
                    counts = torch.tensor([new], dtype=torch.int32)
                    paged = ops.PagedAttention(cache, table, counts, torch.tensor([context], dtype=torch.int32))
                    paged(0, *heads(new), terms)


def _rows_and_vocabulary(shape: Shape, dtype: torch.dtype) -> None:
    tokens = 256
    for width in (shape.dim, shape.head_dim):
        x = torch.empty(tokens, width, dtype=dtype, requires_grad=True)
        for offset in (False, True):
            ops.rms_norm(x, torch.empty(width, dtype=dtype, requires_grad=True), 1e-6, offset).sum().backward()
    q = torch.empty(tokens, shape.heads, shape.head_dim, dtype=dtype, requires_grad=True)
    angles = torch.empty(tokens, shape.head_dim // 2)
    for part, interleaved in ((angles, False), (angles[:, : shape.head_dim // 4], True)):
        ops.rotary(q, part, part, interleaved).sum().backward()
    gate, up = (torch.empty(tokens, shape.inner, dtype=dtype, requires_grad=True) for _ in range(2))
    for activation in (ops.silu_mul, ops.gelu_mul, ops.sigmoid_mul, ops.clamped_swiglu):
        activation(gate, up).sum().backward()
    ops.relu_squared(gate).sum().backward()
    logits, ones = torch.empty(8, shape.vocab, dtype=dtype), torch.ones(8)
    bounds, chosen = piece_bounds(shape.vocab), torch.zeros(8, dtype=torch.int64)
    pieces = vocabulary.masses(logits, ones, bounds)
    vocabulary.join_masses(pieces, ones)
    vocabulary.logits_gradient(logits, chosen, ones, ones, ones)
    softcap.softcap_gradient(logits, softcap.softcap(logits, 15.0), 15.0)
    vocabulary.draw(logits, ones, ones, pieces, bounds)
    master = torch.empty(shape.dim)
    for moments in (torch.float32, torch.bfloat16):
        states = [master.to(dtype), *(torch.empty_like(master, dtype=moments) for _ in range(2))]
        optimizer.adamw_step(master, *states, (0.5,) * 8, 1.0, None if dtype == torch.float32 else states[0])


def _experts(shape: Shape, dtype: torch.dtype) -> None:
    """A mixture as wide as the model: 64 experts, 8 of them active."""
    inner, count = shape.inner // 4, 64
    for tokens in (1, 4096):
        starts = torch.linspace(0, 8 * tokens, count + 1).long()
        for deep, wide in ((shape.dim, inner), (inner, shape.dim)):
            x, weight = torch.empty(8 * tokens, deep, dtype=dtype), torch.empty(count, wide, deep, dtype=dtype)
            grouped_linear.product(x, weight, starts)
            grouped_linear.product(torch.empty(8 * tokens, wide, dtype=dtype), weight.transpose(1, 2), starts)
        places = torch.zeros(8 * tokens, dtype=torch.int64)
        many, weights = torch.empty(8 * tokens, shape.dim, dtype=dtype), torch.empty(8 * tokens)
        out = torch.empty(tokens, shape.dim, dtype=dtype)
        for each in (weights, None):
            experts.combine(many, each, places, out)
        experts.combine_backward(out, many, weights, places, many, weights)


def _delta(shape: Shape, dtype: torch.dtype) -> None:
    """Heads of the delta rule as many and as wide as those of attention."""
    sizes = DeltaSizes(1, shape.kv_heads, shape.heads, shape.head_dim, shape.head_dim, width=4)
    inputs = [torch.empty(n, dtype=dtype) for n in ((sizes.channels, 4), (sizes.value_heads,), (sizes.value_heads,))]
    terms = ops.DeltaTerms(*(x.requires_grad_() for x in inputs), sizes.key_heads, sizes.key_dim)
    cache, column = ops.DeltaCache(sizes, 1, 1, dtype), torch.zeros(1, dtype=torch.int32)
    for tokens in (1, 300):
        widths = (sizes.channels, sizes.value_heads, sizes.value_heads)
        rows = [torch.empty(tokens, width, dtype=dtype) for width in widths]
        contexts = column + tokens
        ops.PackedAttention([tokens]).delta(0, *rows, terms).sum().backward()
        paged_delta(*rows, terms, 0, ops.DeltaStep(cache, *[column] * 3), torch.cat((column, contexts)), contexts)


def build(launch: Launch, capability: int) -> Build:
    """Compiles a variant with as many stages as fit, as `kernel.launch` does on a device that has too little memory."""
    sizes, limit = launch.sizes, SHARED[capability] * 1024
    stages = sizes.pop("num_stages", 3)
    while True:
        compiled = _compiled(launch, capability, {**sizes, "num_stages": stages})
        if compiled.metadata.shared <= limit or stages == 1:
            break
        stages -= 1
    used = _resources(compiled.asm["cubin"])
    code = compiled.asm["ptx"]
    names = {"mma.sync": "mma.sync", "wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma", "tf32": "tf32"}
    instructions = frozenset(name for name, text in names.items() if text in code)
    return Build(stages, compiled.metadata.shared, used["REG"], used["STACK"], instructions)


def _compiled(launch: Launch, capability: int, constants: dict[str, Any]) -> Any:
    target = _Target(GPUTarget("cuda", capability, 32))
    launch.function.device_caches.clear()
    with patch.object(driver, "_active", target):
        return launch.function.warmup(*map(_argument, launch.arguments), grid=(1,), **constants)


@dataclass
class _Target:
    """As much of Triton's driver as compiling needs."""

    target: GPUTarget

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _argument(kind: Any) -> Any:
    if isinstance(kind, Pointer):
        return torch.empty(0, dtype=kind.dtype, device="meta")
    if isinstance(kind, Described):
        sizes = [1024] * len(kind.block)
        return TensorDescriptor(torch.empty(sizes, dtype=kind.dtype, device="meta"), sizes, [1024, 1], [*kind.block])
    return kind


def _resources(cubin: bytes) -> dict[str, int]:
    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        text = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", text)}
