"""The generator's form of gated delta networks: states of sequences, and the rows of their open chunks.

A sequence of n tokens has a state at its last boundary, the largest multiple of `CHUNK` up to n, and the rows after it.
A state is an entry that is written once, so sequences can share it; the rows are in the sequence's slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lockstep.ops import cuda, native
from lockstep.ops.delta import has_kernels, kernel_inputs, kernel_sizes
from lockstep.ops.delta_reference import CHUNK, DeltaTerms, OpenChunk, Rows, empty_state, extend, next_state, rows_of
from lockstep.ops.zeros_on_demand import zeros_on_demand

NO_STATE = -1
"""The entry of a sequence before its first boundary: a state of zeros."""


class DeltaSizes(NamedTuple):
    """Of the layers in a cache."""

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    """Tokens that the convolution reads."""

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def entry_nbytes(self, dtype: torch.dtype) -> int:
        """Of one state with its inputs, which have this dtype, in all layers."""
        state = self.value_heads * self.key_dim * self.value_dim * torch.float32.itemsize
        return self.layers * (state + (self.width - 1) * self.channels * dtype.itemsize)


class DeltaCache:
    """All layers' states and open chunks.

    entries: of states. slots: of sequences. drafts: tokens that a step may compute beyond those that it accepts; with
    drafts, a slot keeps two chunks, since a step may have crossed a boundary in vain. dtype: of the convolution's
    inputs; everything else is float32.
    """

    def __init__(
        self,
        sizes: DeltaSizes,
        entries: int,
        slots: int,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
        drafts: int = 0,
    ):
        if drafts > CHUNK:
            raise ValueError(f"{drafts} drafts, but a sequence's slot has room for {CHUNK}")
        self.sizes, self.entries, self.slots = sizes, entries, slots
        self.chunks = 2 if drafts else 1
        """Chunks per slot: chunk c of a sequence is at c modulo this."""
        earlier = sizes.width - 1
        self.kept = 1 << (earlier + drafts).bit_length()
        """Inputs of the convolution per slot: that of position p is at p modulo this, a power of two."""
        layers, heads, wide = sizes.layers, sizes.value_heads, torch.float32
        states = (layers, entries, heads, sizes.key_dim, sizes.value_dim)
        self.states = zeros_on_demand(states, wide, device)
        self.state_inputs = zeros_on_demand((layers, entries, earlier, sizes.channels), dtype, device)
        """The convolution's inputs of the last positions before an entry's boundary."""
        slot = (layers, slots, self.chunks)
        self.keys = zeros_on_demand((*slot, sizes.key_heads, sizes.key_dim, CHUNK), wide, device)
        self.updates = zeros_on_demand((*slot, heads, CHUNK, sizes.value_dim), wide, device)
        self.decays = zeros_on_demand((*slot, heads, CHUNK), wide, device)
        self.inputs = zeros_on_demand((layers, slots, self.kept, sizes.channels), dtype, device)

    def layer(self, index: int) -> tuple[Tensor, ...]:
        """One layer's states, their inputs, and the slots' keys, updates, decays and inputs."""
        return tuple(each[index] for each in self.tensors())

    def tensors(self) -> list[Tensor]:
        """All layers' states, their inputs, and the slots' keys, updates, decays and inputs."""
        return [self.states, self.state_inputs, self.keys, self.updates, self.decays, self.inputs]

    def copy_slots(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies the open chunks of slots in all layers. copies: (source, target)."""
        sources, targets = torch.tensor(copies, device=self.keys.device).T
        for rows in (self.keys, self.updates, self.decays, self.inputs):
            rows.index_copy_(1, targets, rows.index_select(1, sources))

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.tensors())


class DeltaStep(NamedTuple):
    """Where the sequences of one step have their states and rows, int32 each."""

    cache: DeltaCache
    slots: Int[Tensor, "sequences"]
    reads: Int[Tensor, "sequences"]
    """The entries at the last boundary before or at each sequence's first row in this step, or `NO_STATE`."""
    writes: Int[Tensor, "sequences"]
    """The entries for the last boundary up to the end of the sequence's rows, if this is another; else ignored. Never
    one that a sequence of this step reads."""


def paged_delta(
    mixed: Float[Tensor, "rows channels"],
    b: Float[Tensor, "rows value_heads"],
    a: Float[Tensor, "rows value_heads"],
    terms: DeltaTerms,
    layer: int,
    step: DeltaStep,
    starts: Int[Tensor, "sequences+1"],
    contexts: Int[Tensor, "sequences"],
) -> Float[Tensor, "rows value_heads value_dim"]:
    """The outputs of this step's rows, as `delta` computes them, whose states and rows the cache then has.

    starts: the first row of each sequence, int32, and the end of the last one's. contexts: tokens of each sequence
    after this step, int32. Rows after those of all sequences are padding.
    """
    if cuda.usable(mixed):
        from lockstep.ops.cuda import delta as kernels

        places = kernels.Places(starts, contexts, step.slots, step.reads, step.writes)
        return kernels.paged(mixed, b, a, terms, places, kernels.Kept(*step.cache.layer(layer)))
    if has_kernels(mixed, b, a, terms) and step.cache.inputs.dtype == mixed.dtype:
        return _native_paged(mixed, b, a, terms, layer, step, starts, contexts)
    out = mixed.new_zeros(len(mixed), terms.value_heads, terms.value_dim)
    columns = (starts[:-1], starts[1:], contexts, step.slots, step.reads, step.writes)
    for start, stop, context, slot, read, write in zip(*(column.tolist() for column in columns)):
        span, first = slice(start, stop), context - (stop - start)
        if stop > start:
            views = _SlotViews(step.cache, layer, slot, read)
            out[span] = _extend_sequence(mixed[span], b[span], a[span], terms, views, first, write)
    return out


def _native_paged(
    mixed: Tensor,
    b: Tensor,
    a: Tensor,
    terms: DeltaTerms,
    layer: int,
    step: DeltaStep,
    starts: Tensor,
    contexts: Tensor,
) -> Tensor:
    cache = step.cache
    out = mixed.new_empty(len(mixed), terms.value_heads, terms.value_dim)
    places = (x.to(torch.int32).contiguous() for x in (starts, contexts, step.slots, step.reads, step.writes))
    native.call(
        "paged_delta", mixed.dtype, *kernel_inputs(mixed, b, a, terms), out, *cache.layer(layer), *places,
        len(contexts), len(mixed), *kernel_sizes(terms), cache.chunks, cache.kept,
    )  # fmt: skip
    return out


class _SlotViews:
    """One layer's tensors of a sequence."""

    def __init__(self, cache: DeltaCache, layer: int, slot: int, read: int):
        self.states, self.state_inputs, keys, updates, decays, inputs = cache.layer(layer)
        self.chunks = [OpenChunk(*parts) for parts in zip(keys[slot], updates[slot], decays[slot])]
        self.inputs, self.read = inputs[slot], read

    def chunk(self, position: int) -> OpenChunk:
        return self.chunks[position // CHUNK % len(self.chunks)]

    def input(self, position: int, first: int) -> Tensor:
        """The convolution's input of a position before the step's `first`."""
        boundary = first // CHUNK * CHUNK
        if position >= boundary:
            return self.inputs[position % len(self.inputs)]
        if self.read == NO_STATE:
            return torch.zeros_like(self.inputs[0])
        return self.state_inputs[self.read, position - boundary]


def _extend_sequence(
    mixed: Tensor, b: Tensor, a: Tensor, terms: DeltaTerms, slot: _SlotViews, first: int, write: int
) -> Float[Tensor, "rows value_heads value_dim"]:
    earlier, count = terms.conv.shape[1] - 1, len(mixed)
    before = torch.stack([slot.input(position, first) for position in range(first - earlier, first)])
    rows, inputs = rows_of(mixed, before, b, a, terms), torch.cat((before, mixed))
    state = empty_state(terms) if slot.read == NO_STATE else slot.states[slot.read]
    outs, begin = [], 0
    while begin < count:
        position = first + begin
        stop = min(count, begin + CHUNK - position % CHUNK)
        chunk = slot.chunk(position)
        outs.append(extend(Rows(*(each[:, begin:stop] for each in rows)), chunk, position % CHUNK, state))
        if (first + stop) % CHUNK == 0:
            state, boundary = next_state(chunk, state), stop
            slot.state_inputs[write] = inputs[boundary : boundary + earlier]
            slot.states[write] = state
        begin = stop
    for row in range(max(0, count - len(slot.inputs)), count):
        slot.inputs[(first + row) % len(slot.inputs)] = mixed[row]
    return torch.cat(outs, 1).transpose(0, 1).to(mixed.dtype)
