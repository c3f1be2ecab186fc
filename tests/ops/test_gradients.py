"""Values and gradients of the operators against the same formulas in float64."""

from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from torch.distributed._tools.mem_tracker import MemTracker

from lockstep import ops
from lockstep.ops import head_gradients, native
from tests.ops.pieces import assert_pieces_add_up

# One rounding of the result to its dtype, plus sums of up to 150 products that float32 rounds one by one.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
DTYPES = list(TOLERANCE)


def _leaf(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def _agree(ours: list[torch.Tensor], expected: list[torch.Tensor], dtype: torch.dtype) -> None:
    for mine, theirs in zip(ours, expected):
        error = (mine.double() - theirs).abs().max() / theirs.abs().max()
        assert error < TOLERANCE[dtype], error


def _doubles(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.detach().double().requires_grad_() for t in tensors]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(2, 2, 64), (4, 2, 96), (4, 1, 128), (3, 1, 40), (2, 2, 16), (6, 2, 48)]
)
def test_attention(dtype, heads, kv_heads, head_dim):
    lengths = [5, 130, 64, 1]
    total = sum(lengths)
    q = _leaf(0, total, heads, head_dim, dtype=dtype)
    k, v = _leaf(1, total, kv_heads, head_dim, dtype=dtype), _leaf(2, total, kv_heads, head_dim, dtype=dtype)
    grad = torch.randn(total, heads, head_dim, generator=torch.Generator().manual_seed(3)).to(dtype)
    out = ops.PackedAttention(lengths)(0, q, k, v)
    out.backward(grad)

    exact = _doubles(q, k, v)
    parts = [x.split(lengths) for x in exact]
    expected = torch.cat(
        [
            F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in qkv), is_causal=True, enable_gqa=True)[
                0
            ].transpose(0, 1)
            for qkv in zip(*parts)
        ]
    )
    expected.backward(grad.double())
    _agree([out, q.grad, k.grad, v.grad], [expected, *(x.grad for x in exact)], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("broken", range(3))
def test_what_a_broken_batch_leaves_in_memory_reaches_no_gradient_of_the_next(dtype, broken):
    def gradients(tokens, broken=None):
        leaves = [_leaf(i, tokens, 2, 64, dtype=dtype) for i in range(3)]
        if broken is not None:
            leaves[broken].data.fill_(torch.nan)
        ops.PackedAttention([tokens])(0, *leaves).float().sum().backward()
        return [leaf.grad for leaf in leaves]

    expected = gradients(21)
    gradients(64, broken)
    assert all(map(torch.equal, gradients(21), expected))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 32), (3, 1, 40)])
def test_pieces_of_sequences_attend_as_the_whole_and_their_gradients_add_up_to_its(dtype, heads, kv_heads, head_dim):
    assert_pieces_add_up(dtype, heads, kv_heads, head_dim, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [5, 258, 2050])
@pytest.mark.parametrize("share", [0.0, 1.0], ids=["log_probs", "both"])
def test_log_probabilities_and_entropy(dtype, vocab, share):
    hidden, head = _leaf(0, 50, 64, dtype=dtype), _leaf(1, vocab, 64, dtype=dtype)
    targets = torch.randint(vocab, (50,), generator=torch.Generator().manual_seed(2))
    grad, entropy_grad = torch.randn(2, 50, generator=torch.Generator().manual_seed(3)) * torch.tensor([[1.0], [share]])
    log_probs, entropy = ops.token_log_probs(hidden, head, targets, 1.3)
    kept = [log_probs] if share == 0 else [log_probs, entropy]
    torch.autograd.backward(kept, [grad, entropy_grad][: len(kept)])

    exact = _doubles(hidden, head)
    table = torch.log_softmax(exact[0] @ exact[1].T / 1.3, -1)
    expected = table.gather(1, targets[:, None])[:, 0]
    entropies = -(table.exp() * table).sum(-1)
    torch.autograd.backward([expected, entropies], [grad.double(), entropy_grad.double()])
    ours, theirs = [log_probs, entropy, hidden.grad, head.grad], [expected, entropies, *(x.grad for x in exact)]
    _agree([x.detach() for x in ours], [x.detach() for x in theirs], dtype)
    assert log_probs.dtype == entropy.dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 50, 256])
def test_norm_activation_and_rotation(dtype, dim):
    x, up, weight = _leaf(0, 33, dim, dtype=dtype), _leaf(1, 33, dim, dtype=dtype), _leaf(2, dim, dtype=dtype)
    heads = _leaf(3, 33, 2, dim, dtype=dtype)
    angles = torch.rand(33, dim // 2, generator=torch.Generator().manual_seed(4)) * 6
    ours = [ops.rms_norm(x, weight, 1e-5), ops.silu_mul(x, up), ops.rotary(heads, angles.cos(), angles.sin())]
    grads = [torch.randn(o.shape, generator=torch.Generator().manual_seed(5)).to(dtype) for o in ours]
    torch.autograd.backward(ours, grads)

    exact = _doubles(x, up, weight, heads)
    first, second = exact[3].chunk(2, -1)
    cos, sin = angles.double().cos()[:, None], angles.double().sin()[:, None]
    expected = [
        exact[0] * torch.rsqrt(exact[0].square().mean(-1, keepdim=True) + 1e-5) * exact[2],
        F.silu(exact[0]) * exact[1],
        torch.cat((first * cos - second * sin, second * cos + first * sin), -1),
    ]
    torch.autograd.backward(expected, [g.double() for g in grads])
    _agree([*ours, *(t.grad for t in (x, up, weight, heads))], [*expected, *(t.grad for t in exact)], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_slice_of_logits_never_exceeds_its_bytes_and_slices_cover_all_rows(dtype):
    rows = head_gradients.row_slices(8192, 65536, torch.empty(0, dtype=dtype))
    assert max(s.stop - s.start for s in rows) * 65536 * dtype.itemsize <= head_gradients.SLICE_BYTES
    assert [s.start for s in rows[1:]] == [s.stop for s in rows[:-1]] and rows[-1].stop == 8192


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0.0, 1.0], ids=["log_probs", "both"])
def test_kept_logits_give_the_gradients_of_recomputed_ones_and_are_used_once(dtype, share, monkeypatch):
    hidden, head = _leaf(0, 50, 64, dtype=dtype), _leaf(1, 258, 64, dtype=dtype)
    targets = torch.randint(258, (50,), generator=torch.Generator().manual_seed(2))
    log_probs, entropies = ops.token_log_probs(hidden, head, targets, 0.7)
    value = (log_probs.square() + share * entropies).sum()
    computed = []
    linear = head_gradients.linear
    monkeypatch.setattr(head_gradients, "linear", lambda *given: computed.append(1) or linear(*given))
    first, second = (torch.autograd.grad(value, (hidden, head), retain_graph=True) for _ in range(2))
    assert len(computed) == 1, "of two backward passes the second one computes them"
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slice_bytes", [1 << 27, 4096])
def test_the_summed_log_probability_is_that_of_the_tokens(dtype, slice_bytes, monkeypatch):
    monkeypatch.setattr("lockstep.ops.head_gradients.SLICE_BYTES", slice_bytes)
    targets = torch.randint(258, (50,), generator=torch.Generator().manual_seed(2))
    values, gradients = [], []
    for summed in (True, False):
        hidden, head = _leaf(0, 50, 64, dtype=dtype), _leaf(1, 258, 64, dtype=dtype)
        if summed:
            value = ops.log_prob_sum(hidden, head, targets, -0.02)
        else:
            value = ops.total(ops.token_log_probs(hidden, head, targets)[0]) * -0.02
        (value * 3.0).backward()
        values.append(value)
        gradients.append([hidden.grad.double(), head.grad.double()])
    assert torch.equal(*values)
    with torch.no_grad():
        assert torch.equal(ops.log_prob_sum(hidden, head, targets, -0.02), values[0])
    _agree(gradients[0], gradients[1], dtype)


@pytest.mark.parametrize(
    "score", [lambda *x: ops.token_log_probs(*x)[0].sum(), lambda *x: ops.log_prob_sum(*x, 0.5)], ids=["tokens", "sum"]
)
def test_of_the_heads_gradient_a_wide_sum_and_one_narrow_tensor_are_held_at_once(score, monkeypatch):
    monkeypatch.setattr("lockstep.ops.head_gradients.SLICE_BYTES", 8 * 4096 * 2)  # three slices of the targets
    # Products that hold nothing wide of their own, as a GPU's.
    products = import_module("lockstep.ops.linear")
    monkeypatch.setattr(products, "product", lambda x, weight, chunks=1: x @ weight.T)
    head, hidden = _leaf(0, 4096, 1024, dtype=torch.bfloat16), _leaf(1, 24, 1024, dtype=torch.bfloat16)
    with MemTracker() as tracker:
        score(hidden, head, torch.zeros(24, dtype=torch.int64)).backward()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    # With the head itself four times its size; logits and hidden states are a few hundredths of it.
    assert 3.9 < peak["Total"] / head.nbytes < 4.1


def test_a_loss_under_fake_tensors_leaves_nothing_behind_for_a_real_one():
    from torch._subclasses.fake_tensor import FakeTensorMode

    def loss():
        # A vocabulary of its own, which nothing has been computed with before.
        return ops.token_log_probs(torch.ones(3, 16), torch.ones(1021, 16), torch.arange(3))[0]

    with FakeTensorMode(), native.pretending():
        loss()
    assert torch.isfinite(loss()).all()
