"""Gated delta networks in plain PyTorch: defines the compiled forms, and replaces them where there is no compiler."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lockstep.ops import plain

CHUNK = 64
"""Tokens between two states; part of the arithmetic, so it is fixed."""
EPS = 1e-6
"""Added to the squared length of queries and keys."""


class DeltaTerms(NamedTuple):
    """A layer's parameters that the delta rule reads."""

    conv: Float[Tensor, "channels width"]
    """Weights of the convolution over `width` tokens, the oldest first. The channels are those of all queries, then of
    all keys, then of all values."""
    log_rates: Float[Tensor, "value_heads"]
    step_bias: Float[Tensor, "value_heads"]
    key_heads: int
    """Heads of queries and keys; each is shared by as many consecutive heads of values as there are per key head."""
    key_dim: int

    @property
    def value_heads(self) -> int:
        return self.log_rates.shape[0]

    @property
    def value_dim(self) -> int:
        return (self.conv.shape[0] - 2 * self.key_heads * self.key_dim) // self.value_heads

    def of_heads(self, heads: slice) -> DeltaTerms:
        """Of some key heads, with their value heads. heads: `start` and `stop` within their number."""
        count, per_key = heads.stop - heads.start, self.value_heads // self.key_heads
        parts = self.conv.split(self.parts)
        widths = self.key_dim, self.key_dim, per_key * self.value_dim
        conv = torch.cat([part[heads.start * width : heads.stop * width] for part, width in zip(parts, widths)])
        values = slice(heads.start * per_key, heads.stop * per_key)
        return DeltaTerms(conv, self.log_rates[values], self.step_bias[values], count, self.key_dim)

    def rows_of_heads(self, mixed: Tensor, b: Tensor, a: Tensor, heads: slice) -> tuple[Tensor, Tensor, Tensor]:
        """What `of_heads` reads of these rows."""
        per_key = self.value_heads // self.key_heads
        widths = self.key_dim, self.key_dim, per_key * self.value_dim
        parts = zip(mixed.split(self.parts, 1), widths)
        values = slice(heads.start * per_key, heads.stop * per_key)
        own = torch.cat([part[:, heads.start * width : heads.stop * width] for part, width in parts], 1)
        return own, b[:, values].contiguous(), a[:, values].contiguous()

    @property
    def parts(self) -> tuple[int, int, int]:
        """Channels of all queries, keys and values."""
        of_keys = self.key_heads * self.key_dim
        return of_keys, of_keys, self.conv.shape[0] - 2 * of_keys


class Rows(NamedTuple):
    """What the recurrence reads, float32, head by head."""

    q: Float[Tensor, "key_heads rows key_dim"]
    """Of length 1 / √key_dim."""
    k: Float[Tensor, "key_heads rows key_dim"]
    """Of length 1."""
    v: Float[Tensor, "value_heads rows value_dim"]
    strength: Float[Tensor, "value_heads rows"]
    """How much of a key's old value is replaced, between 0 and 1."""
    log_decay: Float[Tensor, "value_heads rows"]


class OpenChunk(NamedTuple):
    """What is kept of the rows of a sequence's last chunk, each with room for `CHUNK` rows."""

    keys: Float[Tensor, "key_heads key_dim chunk"]
    updates: Float[Tensor, "value_heads chunk value_dim"]
    """What each row writes at its key."""
    decays: Float[Tensor, "value_heads chunk"]
    """The sum of the log-decays of the chunk's rows up to each."""

    @classmethod
    def empty(cls, terms: DeltaTerms) -> OpenChunk:
        heads, device = terms.value_heads, terms.conv.device
        return cls(
            torch.zeros(terms.key_heads, terms.key_dim, CHUNK, device=device),
            torch.zeros(heads, CHUNK, terms.value_dim, device=device),
            torch.zeros(heads, CHUNK, device=device),
        )


def empty_state(terms: DeltaTerms) -> Float[Tensor, "value_heads key_dim value_dim"]:
    return torch.zeros(terms.value_heads, terms.key_dim, terms.value_dim, device=terms.conv.device)


def rows_of(
    mixed: Float[Tensor, "rows channels"],
    before: Float[Tensor, "earlier channels"],
    b: Float[Tensor, "rows value_heads"],
    a: Float[Tensor, "rows value_heads"],
    terms: DeltaTerms,
) -> Rows:
    """The recurrence's inputs. before: the `width - 1` rows before `mixed`, zeros before position 0."""
    width, count = terms.conv.shape[1], len(mixed)
    inputs, weights = torch.cat((before, mixed)).float(), terms.conv.float()
    x = torch.zeros_like(mixed, dtype=torch.float32)
    for tap in range(width):
        x = plain.multiply_add(inputs[tap : tap + count], weights[:, tap], x)
    x = x / (1 + plain.exp(-x))
    of_keys = terms.key_heads * terms.key_dim
    q, k, v = (part.unflatten(1, (heads, -1)).transpose(0, 1) for part, heads in zip(
        x.split((of_keys, of_keys, x.shape[1] - 2 * of_keys), 1), (terms.key_heads, terms.key_heads, terms.value_heads)
    ))  # fmt: skip
    step = a.float() + terms.step_bias.float()
    softplus = step.clamp(min=0) + plain.log(1 + plain.exp(-step.abs()))
    return Rows(
        _normed(q) * terms.key_dim**-0.5,
        _normed(k),
        v,
        (1 / (1 + plain.exp(-b.float()))).T,
        (-plain.exp(terms.log_rates.float()) * softplus).T,
    )


def _normed(x: Tensor) -> Tensor:
    return x * (1 / torch.sqrt(plain.row_sum(x.square()) + EPS))[..., None]


def extend(
    rows: Rows, chunk: OpenChunk, first: int, state: Float[Tensor, "value_heads key_dim value_dim"]
) -> Float[Tensor, "value_heads rows value_dim"]:
    """Appends rows at `first` to a chunk that begins with `state`; returns their outputs.

    With G the sums of log-decays, row i writes u_i = β_i (v_i - e^{G_i} Sᵀ k_i - Σ_{j<i} e^{G_i - G_j} (k_i · k_j) u_j)
    and reads o_i = e^{G_i} Sᵀ q_i + Σ_{j≤i} e^{G_i - G_j} (q_i · k_j) u_j (arXiv 2412.06464, section 3.3). Each sum is
    one chain over ascending j, so a row's bits do not depend on the rows that are appended with it.
    """
    count, stop = rows.k.shape[1], first + rows.k.shape[1]
    group = len(rows.v) // len(rows.k)
    chunk.keys[:, :, first:stop] = rows.k.mT
    total = chunk.decays[:, first - 1] if first else torch.zeros_like(chunk.decays[:, 0])
    for row in range(count):
        total = total + rows.log_decay[:, row]
        chunk.decays[:, first + row] = total
    of_rows = chunk.decays[:, first:stop]
    is_later = torch.arange(stop, device=state.device) > torch.arange(first, stop, device=state.device)[:, None]
    decay = plain.exp((of_rows[:, :, None] - chunk.decays[:, None, :stop]).masked_fill(is_later, 0.0))
    from_start = plain.exp(of_rows)[..., None]

    def read(x: Tensor) -> tuple[Tensor, Tensor]:
        inner = plain.product(x, chunk.keys[:, :, :stop]).repeat_interleave(group, 0) * decay
        return inner, plain.product(x.repeat_interleave(group, 0), state) * from_start

    (at_keys, old), (at_queries, out) = read(rows.k), read(rows.q)
    for row in range(stop):
        begin = max(0, row - first)
        if row >= first:
            values = rows.v[:, begin] - old[:, begin]
            chunk.updates[:, row] = rows.strength[:, begin, None] * values
        update = chunk.updates[:, None, row]
        out[:, begin:] = plain.multiply_add(at_queries[:, begin:, row, None], update, out[:, begin:])
        old[:, begin:] = plain.multiply_add(at_keys[:, begin:, row, None], update, old[:, begin:])
    return out


def next_state(
    chunk: OpenChunk, state: Float[Tensor, "value_heads key_dim value_dim"]
) -> Float[Tensor, "value_heads key_dim value_dim"]:
    """The state after a full chunk: e^{G_e} S + Σ_j e^{G_e - G_j} k_j u_jᵀ, with e the chunk's last row."""
    group, last = len(chunk.updates) // len(chunk.keys), chunk.decays[:, -1:]
    decay = plain.exp(last - chunk.decays)
    state = state * plain.exp(last)[..., None]
    for row in range(CHUNK):
        keys = chunk.keys[:, :, row].repeat_interleave(group, 0) * decay[:, row, None]
        state = plain.multiply_add(keys[..., None], chunk.updates[:, None, row], state)
    return state


def sequence_reference(mixed: Tensor, b: Tensor, a: Tensor, terms: DeltaTerms) -> Float[Tensor, "rows heads value_dim"]:
    """The outputs of a whole sequence, in the dtype of `mixed`."""
    state, chunk, outs = empty_state(terms), OpenChunk.empty(terms), []
    rows = rows_of(mixed, mixed.new_zeros(terms.conv.shape[1] - 1, mixed.shape[1]), b, a, terms)
    for start in range(0, len(mixed), CHUNK):
        part = Rows(*(each[:, start : start + CHUNK] for each in rows))
        outs.append(extend(part, chunk, 0, state))
        if start + CHUNK <= len(mixed):
            state = next_state(chunk, state)
    return torch.cat(outs, 1).transpose(0, 1).to(mixed.dtype)


def differentiable(mixed: Tensor, b: Tensor, a: Tensor, terms: DeltaTerms) -> Float[Tensor, "rows heads value_dim"]:
    """As `sequence_reference`, in operations of PyTorch, whose gradients are its own."""
    width, count, of_keys = terms.conv.shape[1], len(mixed), terms.key_heads * terms.key_dim
    group = terms.value_heads // terms.key_heads
    inputs = F.pad(mixed.float().T, (width - 1, 0))
    x = F.silu(F.conv1d(inputs[None], terms.conv.float()[:, None], groups=inputs.shape[0])[0].T)
    q, k, v = x.split((of_keys, of_keys, x.shape[1] - 2 * of_keys), 1)
    q, k = (each.unflatten(1, (terms.key_heads, -1)).transpose(0, 1) for each in (q, k))
    q, k = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + EPS) for each in (q, k))
    q, k = (each.repeat_interleave(group, 0) for each in (q * terms.key_dim**-0.5, k))
    v, strength = v.unflatten(1, (terms.value_heads, -1)).transpose(0, 1), torch.sigmoid(b.float()).T[..., None]
    log_decay = (-torch.exp(terms.log_rates.float()) * F.softplus(a.float() + terms.step_bias.float())).T
    state, outs = empty_state(terms), []
    for start in range(0, count, CHUNK):
        part = slice(start, min(start + CHUNK, count))
        total = log_decay[:, part].cumsum(1)
        grown, size = total.exp()[..., None], total.shape[1]
        later = torch.ones(size, size, dtype=torch.bool, device=total.device).triu(1)
        decay = (total[:, :, None] - total[:, None]).masked_fill(later, -torch.inf).exp()
        system = (strength[:, part] * (k[:, part] @ k[:, part].mT) * decay).tril(-1)
        values = strength[:, part] * (v[:, part] - grown * (k[:, part] @ state))
        unit = torch.eye(size, device=total.device)
        updates = torch.linalg.solve_triangular(unit + system, values, upper=False, unitriangular=True)
        outs.append(grown * (q[:, part] @ state) + (q[:, part] @ k[:, part].mT * decay) @ updates)
        left = (total[:, -1:] - total).exp()[..., None]
        state = state * grown[:, -1:] + (left * k[:, part]).mT @ updates
    return torch.cat(outs, 1).transpose(0, 1).to(mixed.dtype)
