"""Ranks that each hold a part of the logits draw what one process draws, cuts and all, and exchange no logits."""

import os
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep import ops
from lockstep.config import ParallelConfig
from lockstep.ops import native
from lockstep.parallel import close_world, open_world
from lockstep.parallel.vocabulary import ShardedSampler
from tests.parallel.launch import launch

DTYPES = torch.float32, torch.bfloat16
ROWS = 48


def hard_logits(vocab, dtype, draw):
    """Ties over all of a row and between ranks, sums that cancel, tokens cut out, and rows that are not finite."""
    logits = torch.randn(ROWS, vocab, generator=draw) * 4
    logits[:8] = logits[:8].round()
    logits[8:12] = 0.0
    logits[12:16, vocab // 2 :] = logits[12:16, : vocab - vocab // 2]
    logits[16:20] = torch.where(torch.rand(4, vocab, generator=draw) < 0.5, 0.0, -0.0)
    logits[20:24] = (torch.rand(4, vocab, generator=draw) * 30).exp2() * torch.randn(4, vocab, generator=draw).sign()
    logits[24:28] *= 1e-3
    logits[28, : vocab // 2] = logits[29, vocab // 2 :] = logits[30, 1:] = logits[31, :-1] = -torch.inf
    logits[32, 0], logits[33, -1], logits[34] = torch.nan, torch.inf, -torch.inf
    logits[35], logits[35, -1] = -torch.inf, torch.nan
    return logits.to(dtype)


def parameters(vocab, draw):
    def any_of(values):
        return torch.tensor(values)[torch.randint(len(values), (ROWS,), generator=draw)]

    temperature = any_of([0.0, 0.7, 1.0, 1.0, 1.9])
    top_k = any_of([0, 0, 1, 2, 20, -(-vocab // 4), -(-vocab // 2) + 1, vocab - 1, vocab, vocab + 7])
    top_p = any_of([1.0, 1.0, 0.9, 0.5, 0.999, 1e-6, 0.1])
    min_p = any_of([0.0, 0.0, 0.0, 0.05, 0.5, 1.0])
    uniform = torch.rand(ROWS, generator=draw, dtype=torch.float64)
    uniform[::5], uniform[1::5] = 0.0, 1 - 2**-53
    return temperature, top_k, top_p, min_p, uniform


def compare(ranks, form, rounds):
    if form == "pytorch":
        os.environ["LOCKSTEP_NATIVE"] = "0"
        native.library.cache_clear()
    world = open_world(ParallelConfig(tensor=ranks), "cpu")
    draw = torch.Generator().manual_seed(0)
    for vocab in (5, 40, 258, 259, 1031):  # 5 tokens leave the last of four ranks none
        sampler = ShardedSampler(vocab, world.mesh.get_group("tensor"))
        assert ranks < 4 or vocab > 5 or world.rank < 3 or sampler.part.first == sampler.part.stop
        for number in range(rounds):
            logits, params = hard_logits(vocab, DTYPES[number % 2], draw), parameters(vocab, draw)
            own = logits[:, sampler.part.first : sampler.part.stop]
            found, expected = sampler.sample(own, *params), ops.sample(logits, *params)
            assert same(found, expected), (vocab, number)
            counts = [[0, 1, 3, vocab // 2, vocab + 3][(row + number) % 5] for row in range(ROWS)]
            tops = sampler.top_log_probs(own, params[0], counts)
            # As text: NaN is what it is.
            assert str(tops) == str(ops.top_log_probs(logits, params[0], counts)), (vocab, number)
    close_world(world)


def same(found, expected):
    """The same bits; of rows that are not finite both say so, and have some token."""
    finite = expected[1].isfinite()
    assert finite.any() and not finite.all()
    equal = all(torch.equal(ours[finite], theirs[finite]) for ours, theirs in zip(found, expected, strict=True))
    return equal and torch.equal(found[1].isfinite(), finite)


@pytest.mark.parametrize(
    ("ranks", "form"),
    [(2, "native"), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, "pytorch"), (4, "native")))],
)
def test_ranks_draw_and_rank_tokens_as_one_process(ranks, form):
    launch(ranks, compare, ranks, form, 2 if ranks == 2 else 6, fresh=form == "pytorch")


class Exchanged(TorchDispatchMode):
    """Counts the bytes that this process gives to collectives."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            given = torch.utils._pytree.tree_leaves(args[1] if len(args) > 1 else args)
            self.bytes += sum(x.nbytes for x in given if isinstance(x, torch.Tensor))
        return func(*args, **kwargs or {})


def bytes_exchanged(vocab):
    """By a rank for each row, with every cut and the likeliest tokens; through gloo, whose calls can be counted."""
    os.environ["LOCKSTEP_SHARED_MEMORY"] = "0"
    world = open_world(ParallelConfig(tensor=2), "cpu")
    sampler = ShardedSampler(vocab, world.mesh.get_group("tensor"))
    draw, found = torch.Generator().manual_seed(1), SimpleNamespace()
    logits = torch.randn(8, vocab, generator=draw) * 1e-3  # as flat as can be: nearly every token is kept
    own, one = logits[:, sampler.part.first : sampler.part.stop], torch.ones(8)
    params = one, torch.full((8,), vocab - 1), one * 0.99, one * 0.01, torch.rand(8, generator=draw).double()
    with Exchanged() as found.sample:
        sampler.sample(own, *params)
    with Exchanged() as found.top:
        sampler.top_log_probs(own, one, [20] * 8)
    close_world(world)
    return found.sample.bytes // 8, found.top.bytes // 8


def test_what_is_exchanged_does_not_grow_with_the_vocabulary():
    small, large = (launch(2, bytes_exchanged, vocab) for vocab in (2**12, 2**15))
    assert small == large and small[0] == small[1]
    sampled, ranked = small[0]
    # Four bytes of each logit, for top-k and for top-p: the sums of 256 buckets.
    assert 8 * 256 * 8 < sampled < 8 * 256 * 8 + 400
    assert 20 * 8 < ranked < 20 * 8 + 200
