"""Matrices, heads and the vocabulary cut over ranks, against one process."""

import dataclasses
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from lockstep import ops
from lockstep.config import ParallelConfig
from lockstep.model import Decoder, initialize, preset, resolve_dtype
from lockstep.ops import head_gradients, one_order
from lockstep.parallel import close_world, open_world
from lockstep.parallel.exchange import sum_rows
from lockstep.parallel.one_order import shared_norm
from lockstep.parallel.row_product import row_product
from lockstep.parallel.tensor import distribute_parameters
from lockstep.parallel.vocabulary import sharded_token_log_probs
from lockstep.train import pack
from tests.parallel.launch import launch
from tests.parallel.memory import PeakMemory

TENSOR = ParallelConfig(tensor=2)
SEQUENCES = [list(range(40)), list(range(50, 73)), [7] * 17]


@pytest.mark.parametrize(("model", "dtype"), [("qwen3:micro", "float32"), ("llama3:micro", "bfloat16")])
def test_every_operator_has_the_bits_of_one_process(model, dtype):
    launch(2, compare_pieces, model, dtype)


def compare_pieces(model, dtype):
    world = open_world(TENSOR, "cpu")
    shape = dataclasses.replace(preset(model, 259), reduction_chunks=2)
    whole = Decoder(shape, resolve_dtype(dtype))
    initialize(whole, seed=3)
    cut = Decoder(shape, resolve_dtype(dtype), "meta")
    distribute_parameters(cut, world.mesh["tensor"], lambda place: [place])
    cut.to_empty(device="cpu")
    initialize(cut, seed=3)
    row = pack(SEQUENCES)
    tables = whole.rotary(row.positions)[0]
    attention = ops.PackedAttention(row.lengths)

    def pieces(decoder):
        block = decoder.layers[0]
        hidden = ops.embedding(row.tokens, decoder.embed_tokens.weight)
        q, k, v, _ = block.before_attention(hidden, *tables)
        attended = attention(0, q, k, v)
        after = block.after_attention(hidden, attended, None)
        normed = decoder.final_norm(after)
        gate = ops.linear(normed, block.mlp.gate_proj.weight)
        rows, columns = [hidden, after], [q, k, v, attended, gate, ops.silu_mul(gate, gate), decoder.logits(normed)]
        return rows, columns, normed

    with torch.no_grad():
        own_rows, own_columns, normed = pieces(cut)
        rows, columns, expected = pieces(whole)
        assert torch.equal(normed, expected)
        # A rank has its share of the tokens between a block's halves, of the heads, features and vocabulary within.
        for index, (part, expected) in enumerate(zip(own_rows, rows, strict=True)):
            assert torch.equal(part, expected.chunk(2)[world.rank]), index
        for index, (part, expected) in enumerate(zip(own_columns, columns, strict=True)):
            assert torch.equal(part, expected.chunk(2, 1)[world.rank]), index
    close_world(world)


def test_a_norm_with_an_offset_and_its_gradients_have_the_bits_of_one_process():
    launch(2, compare_norms)


def compare_norms():
    world = open_world(TENSOR, "cpu")
    axis, draw = world.mesh["tensor"], torch.Generator().manual_seed(0)
    x = torch.randn(70, 48, generator=draw) * torch.exp2(torch.randint(-4, 5, (70, 48), generator=draw))
    weight, grad = torch.randn(48, generator=draw), torch.randn(70, 48, generator=draw)
    rows = slice(35 * world.rank, 35 * world.rank + 35)

    def run(norm, x, weight, grad):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        out = norm(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    def norm(x, weight):
        return ops.rms_norm(x, weight, 1e-6, offset=True)

    def share(x, weight):
        return shared_norm(x, weight, 1e-6, True, axis.get_group())

    out, of_x, of_weight = run(norm, x, weight, grad)
    with one_order.one_order(2):
        gathered, own, of_shared = run(norm, x[rows], DTensor.from_local(weight, axis, [Replicate()]), grad)
        assert torch.equal(gathered, out) and torch.equal(own, of_x[rows])
        assert torch.equal(of_shared.full_tensor(), of_weight)
        for function in (share, torch.compile(share, backend="aot_eager", fullgraph=True)):
            part, own, of_first = run(function, x[rows], weight, grad[rows])
            assert torch.equal(part, out[rows]) and torch.equal(own, of_x[rows])
            assert torch.equal(of_first, of_weight if world.rank == 0 else torch.zeros_like(weight))
    close_world(world)


def test_the_loss_of_a_sharded_vocabulary_has_the_bits_of_a_whole_one():
    launch(4, compare_losses)


def compare_losses():
    world = open_world(ParallelConfig(tensor=4), "cpu")
    for vocab, *terms in ((64,), (259,), (1031,), (259, "none", 7.0), (259, "int8"), (259, "int4", 7.0)):
        compare_losses_of(world, vocab, ops.HeadTerms(*terms))
    with pytest.raises(ValueError, match="1 chunks of a product are not a multiple of its 4 ranks"):
        row_product(torch.ones(4, 8), torch.ones(3, 8), "none", 1, world.mesh.get_group("tensor"))
    compare_sums_of_rows(world)
    close_world(world)


def compare_losses_of(world, vocab, terms):
    # Of this process: a few slices of rows on both sides, as a long step has.
    head_gradients.SLICE_BYTES = 10 * vocab * 4
    draw = torch.Generator().manual_seed(5)
    hidden, head = torch.randn(37, 32, generator=draw), torch.randn(vocab, 32, generator=draw)
    targets = torch.randint(vocab, (37,), generator=draw)
    weights = torch.randn(37, generator=draw)
    length = -(-vocab // world.size)
    part = slice(world.rank * length, min(vocab, (world.rank + 1) * length))
    found, expected = [], []
    sharded = partial(sharded_token_log_probs, vocab=vocab, group=world.mesh.get_group("tensor"))
    for scored, rows, into in [(sharded, part, found), (ops.token_log_probs, slice(None), expected)]:
        function = partial(scored, terms=terms)
        x, w = hidden.clone().requires_grad_(), head[rows].clone().requires_grad_()
        log_probs, entropies = function(x, w, targets, 0.7)
        ((log_probs * weights).sum() + 0.3 * (entropies * weights).sum()).backward()
        if rows is part:
            dist.all_reduce(x.grad)  # each rank's is of its part of the vocabulary
        into += [log_probs.detach(), entropies.detach(), x.grad, w.grad if rows is part else w.grad[part]]
        assert function(x.detach()[:0], w, targets[:0], 0.7)[0].shape == (0,)
    # Gradients are float32 sums in another order; what the loss is made of has the same bits.
    for ours, theirs in zip(found[2:], expected[2:]):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)
    for ours, theirs in zip(found[:2], expected[:2]):
        assert torch.equal(ours, theirs)


def compare_sums_of_rows(world):
    """They are summed in float32 where they were received, and rounded once."""
    draw = torch.Generator().manual_seed(0)
    parts = [torch.randn(16, 8, generator=draw).bfloat16() for _ in range(4)]
    parts[3] = -parts[0] * 1.0625  # what is left of the first is in the bits that rounding takes
    own = sum_rows(parts[world.rank], world.mesh.get_group("tensor"))
    (a, b, c, d) = (part.float() for part in parts)
    assert torch.equal(own, ((a + b) + (c + d)).bfloat16().chunk(4)[world.rank])
    wide = torch.ones(4096, 8)
    with PeakMemory() as peak:
        total = sum_rows(wide, world.mesh.get_group("tensor"))
    assert total.untyped_storage().nbytes() == total.nbytes == wide.nbytes / 4
    assert peak.nbytes == wide.nbytes + total.nbytes  # what was received, and the last sum
