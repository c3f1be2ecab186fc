"""Attention whose query rows are shared out: each share has the bits of the whole, gradients add up to the whole's."""

import torch

from lockstep import ops

LENGTHS = [5, 130, 64, 1, 207]
# Two shares of the rows of each sequence: odd cuts, a sequence that one share has none of, neighbouring pieces.
SHARES = [
    [(0, 0, 2), (1, 0, 33), (1, 97, 130), (2, 3, 64), (4, 0, 64), (4, 100, 101), (4, 101, 207)],
    [(0, 2, 5), (1, 33, 97), (2, 0, 3), (3, 0, 1), (4, 64, 100)],
]


def assert_pieces_add_up(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    tolerance: float,
    device: str = "cpu",
    terms: ops.Terms | None = None,
) -> None:
    terms = terms or ops.Terms()
    draw, tokens = torch.Generator().manual_seed(0), sum(LENGTHS)
    q, grad = (torch.randn(tokens, heads, head_dim, generator=draw).to(device, dtype) for _ in range(2))
    k, v = (
        torch.randn(tokens, kv_heads, head_dim, generator=draw).to(device, dtype).requires_grad_() for _ in range(2)
    )
    q.requires_grad_()
    out = ops.PackedAttention(LENGTHS, device)(0, q, k, v, terms)
    expected = torch.autograd.grad(out, (q, k, v), grad)
    starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    sums = [torch.zeros(x.shape, device=device) for x in (q, k, v)]
    for pieces in SHARES:
        rows = torch.tensor([starts[s] + t for s, first, stop in pieces for t in range(first, stop)]).to(device)
        padded = torch.cat((rows, rows.new_zeros(3)))
        attention = ops.PieceAttention(LENGTHS, pieces, device)
        with torch.no_grad():
            own, log_sums = attention.forward(q[padded], k, v, terms)
            assert torch.equal(own[:-3], out[rows]) and not own[-3:].any()
            grads = attention.backward(grad[padded], q[padded], k, v, own, log_sums, terms)
        assert grads[1].dtype == grads[2].dtype == torch.float32 and not grads[0][-3:].any()
        sums[0][rows] = grads[0][:-3].float()
        sums[1] += grads[1]
        sums[2] += grads[2]
    for ours, theirs in zip(sums, expected):
        assert (ours - theirs.float()).abs().max() <= tolerance * max(1.0, float(theirs.abs().max()))
