"""What holds of attention in every form: in pages and pieces, and next to what is broken."""

from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep import ops
from lockstep.ops.attention_gradient import Attended
from lockstep.ops.attention_reference import PLAIN


def cancelling(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    """Each second half takes the first one back: what a sum rounds is what is left of it."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=draw) * torch.exp2(torch.randint(-3, 4, shape, generator=draw).float())
    half = shape[-1] // 2
    x[..., half : 2 * half] = -x[..., :half] + 1e-3 * x[..., half : 2 * half]
    return x.to(dtype)


def assert_pieces_agree(
    expected: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    lengths: list[int],
    random: Random,
    pieces: list[int],
    terms: ops.Terms = PLAIN,
    format: str = "none",
) -> None:
    """Through a paged cache of this format, in `pieces` of the packed sequences, in any order and company, their pages
    anywhere, moved between steps: each row has the bits of `expected`, and padding is zero. Pieces of one row may come
    as a decode step."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    pages_of = [-(-n // ops.PAGE) for n in lengths]
    num_pages = 2 * sum(pages_of)
    placement = random.sample(range(num_pages), sum(pages_of))
    table = torch.zeros(len(lengths), max(pages_of), dtype=torch.int32)
    for i, count in enumerate(pages_of):
        table[i, :count] = torch.tensor([placement.pop() for _ in range(count)])
    cache = ops.KVCache(1, num_pages, k.shape[1], k.shape[2], k.dtype, values=v is not None, format=format)
    # Pages hold what earlier sequences left there; whatever of it were used would show.
    for pages in cache.tensors():
        pages.fill_(torch.nan if format == "none" else -1)  # the scales of such codes are infinite

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
            attention = ops.PagedAttention(cache, table[chosen + [0] * padding], None, F.pad(contexts, (0, padding)))
        out = attention(0, q[padded], k[padded], None if v is None else v[padded], terms)
        assert torch.equal(out[: len(rows)], expected[rows])
        assert not out[len(rows) :].any()
        for i, n in zip(chosen, counts):
            done[i] += n
        if random.random() < 0.2:
            unused = next(page for page in range(num_pages) if page not in table)
            moved, column = random.choice(unfinished), 0
            cache.copy_pages([(int(table[moved, column]), unused)])
            table[moved, column] = unused


def assert_only_those_who_see_it_break(dtype: torch.dtype, part: str, broken: float, window: int = 0) -> None:
    """One element of a token's key or value is no finite number: rows before it and other sequences keep their bits.

    With a window rows that it lies before do, too.
    """
    lengths, at = [20, 90, 5], 20 + 37
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(lengths), heads, 32, generator=draw).to(dtype) for heads in (4, 2, 2))
    expected = ops.PackedAttention(lengths)(0, q, k, v, ops.Terms(window=window))
    (k if part == "key" else v)[at, 1, 5] = broken
    out = ops.PackedAttention(lengths)(0, q, k, v, ops.Terms(window=window))
    sees = torch.zeros(sum(lengths), 4, dtype=torch.bool)
    sees[at : at + window if window else 110, 2:] = True  # the second key-value head's queries
    assert torch.equal(out[~sees], expected[~sees])
    assert (part == "key" and broken == torch.inf) or not out[sees].isfinite().all(-1).any()


Piece = tuple[int, int, int]
# Lengths, and two shares of the rows: odd cuts, a sequence that one share has none of, neighbouring pieces.
SHARES: tuple[list[int], list[list[Piece]]] = (
    [5, 130, 64, 1, 207],
    [
        [(0, 0, 2), (1, 0, 33), (1, 97, 130), (2, 3, 64), (4, 0, 64), (4, 100, 101), (4, 101, 207)],
        [(0, 2, 5), (1, 33, 97), (2, 0, 3), (3, 0, 1), (4, 64, 100)],
    ],
)
FEW_SHARES: tuple[list[int], list[list[Piece]]] = (
    [5, 70, 1],
    [[(0, 0, 2), (1, 0, 33), (1, 60, 61), (1, 61, 70)], [(0, 2, 5), (1, 33, 60), (2, 0, 1)]],
)


def assert_pieces_add_up(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    tolerance: float,
    device: str = "cpu",
    terms: ops.Terms | None = None,
    shares: tuple[list[int], list[list[Piece]]] = SHARES,
) -> None:
    """Query rows are shared out: each share has the bits of the whole, gradients add up to the whole's."""
    terms, (lengths, all_pieces) = terms or ops.Terms(), shares
    draw, tokens = torch.Generator().manual_seed(0), sum(lengths)
    q, grad = (torch.randn(tokens, heads, head_dim, generator=draw).to(device, dtype) for _ in range(2))
    k, v = (
        torch.randn(tokens, kv_heads, head_dim, generator=draw).to(device, dtype).requires_grad_() for _ in range(2)
    )
    q.requires_grad_()
    out = ops.PackedAttention(lengths, device)(0, q, k, v, terms)
    expected = torch.autograd.grad(out, (q, k, v), grad)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    sums = [torch.zeros(x.shape, device=device) for x in (q, k, v)]
    for pieces in all_pieces:
        rows = torch.tensor([starts[s] + t for s, first, stop in pieces for t in range(first, stop)]).to(device)
        padded = torch.cat((rows, rows.new_zeros(3)))
        attention = ops.PieceAttention(lengths, pieces, device)
        with torch.no_grad():
            own, log_sums = attention.forward(q[padded], k, v, terms)
            assert torch.equal(own[:-3], out[rows]) and not own[-3:].any()
            grads = attention.backward(grad[padded], Attended(q[padded], k, v, own, log_sums), terms)
        assert grads[1].dtype == grads[2].dtype == torch.float32 and not grads[0][-3:].any()
        sums[0][rows] = grads[0][:-3].float()
        sums[1] += grads[1]
        sums[2] += grads[2]
    for ours, theirs in zip(sums, expected):
        assert (ours - theirs.float()).abs().max() <= tolerance * max(1.0, float(theirs.abs().max()))
