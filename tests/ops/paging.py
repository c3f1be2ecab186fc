"""Attention of sequences that come to a paged cache in pieces."""

from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep import ops
from lockstep.ops.attention_reference import PLAIN


def assert_pieces_agree(
    expected: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    lengths: list[int],
    random: Random,
    pieces: list[int],
    terms: ops.Terms = PLAIN,
) -> None:
    """Cuts the packed sequences of `lengths` into `pieces`, in any order and company, their pages anywhere.

    Where all are of one row, they may come as a decode step. Each row has to have the bits of `expected`, and padding
    comes out as zeros. `terms` are those of the attention's call.
    """
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    pages_of = [-(-n // ops.PAGE) for n in lengths]
    num_pages = 2 * sum(pages_of)
    placement = random.sample(range(num_pages), sum(pages_of))
    table = torch.zeros(len(lengths), max(pages_of), dtype=torch.int32)
    for i, count in enumerate(pages_of):
        table[i, :count] = torch.tensor([placement.pop() for _ in range(count)])
    cache = ops.KVCache(1, num_pages, k.shape[1], k.shape[2], k.dtype, values=v is not None)
    # Pages hold what earlier sequences left there; whatever of it were used would show.
    for pages in cache.tensors():
        pages.fill_(torch.nan)

    done = [0] * len(lengths)
    while unfinished := [i for i in range(len(lengths)) if done[i] < lengths[i]]:
        chosen = random.sample(unfinished, random.randint(1, len(unfinished)))
        counts = [min(random.choice(pieces), lengths[i] - done[i]) for i in chosen]
        rows = [starts[i] + done[i] + t for i, n in zip(chosen, counts) for t in range(n)]
        padded = rows + [0] * random.choice([0, 3])
        contexts = torch.tensor([done[i] + n for i, n in zip(chosen, counts)], dtype=torch.int32)
        attention: ops.Attention = ops.PagedAttention(
            cache, table[chosen], torch.tensor(counts, dtype=torch.int32), contexts
        )
        if max(counts) == 1 and random.random() < 0.5:
            padding = len(padded) - len(rows)
            attention = ops.DecodeAttention(cache, table[chosen + [0] * padding], F.pad(contexts, (0, padding)))
        out = attention(0, q[padded], k[padded], None if v is None else v[padded], terms)
        assert torch.equal(out[: len(rows)], expected[rows])
        assert not out[len(rows) :].any()
        for i, n in zip(chosen, counts):
            done[i] += n


def assert_only_those_who_see_it_break(dtype: torch.dtype, part: str, broken: float, window: int = 0) -> None:
    """One element of a token's key or value is no finite number: rows before it and other sequences keep their bits.

    With a window rows that it lies before do, too.
    """
    lengths, at = [70, 90, 20], 70 + 37
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(lengths), heads, 32, generator=draw).to(dtype) for heads in (4, 2, 2))
    expected = ops.PackedAttention(lengths)(0, q, k, v, ops.Terms(window=window))
    (k if part == "key" else v)[at, 1, 5] = broken
    out = ops.PackedAttention(lengths)(0, q, k, v, ops.Terms(window=window))
    sees = torch.zeros(sum(lengths), 4, dtype=torch.bool)
    sees[at : at + window if window else 160, 2:] = True  # the second key-value head's queries
    assert torch.equal(out[~sees], expected[~sees])
    assert (part == "key" and broken == torch.inf) or not out[sees].isfinite().all(-1).any()
