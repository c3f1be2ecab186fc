"""Step graphs: a replay with other values has the bits of a call; functions that read values are refused."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep import ops
from lockstep.ops import native
from lockstep.ops.step_graph import Arena

X, WEIGHT = torch.zeros(6, 32), torch.randn(32, 32, generator=torch.Generator().manual_seed(0))


def _in_place(x):
    x = x.clone()
    x += 1
    x[1:3] = 2.5
    x[0].copy_(x[4])
    return x.mul_(3)


def _into(x):
    sums = torch.zeros(7, 32)
    torch.cumsum(x, 0, out=sums[1:])
    return sums


def _places(x):
    return (x[:, 0].abs() * 3).long() % 6


STEPS = [
    lambda x: ops.linear(x, WEIGHT),
    lambda x: ops.rms_norm(x, WEIGHT[0], 1e-6),
    lambda x: ops.rms_norm(x, WEIGHT[0], 1),
    lambda x: ops.rms_norm(x, WEIGHT[0], 1e-6, offset=True),
    lambda x: ops.silu_mul(x, x),
    lambda x: ops.softcap(x, 1.5),
    lambda x: ops.gelu_mul(x, x),
    lambda x: ops.sigmoid_mul(x, x),
    lambda x: ops.relu_squared(x),
    lambda x: ops.rotary(x[:, None], WEIGHT[:6, :12], WEIGHT[:6, 20:], interleaved=True)[:, 0],
    lambda x: ops.silu_mul(ops.rms_norm(x + x, WEIGHT[0], 1e-6), ops.linear(x, WEIGHT)),  # calls that are merged
    lambda x: x + x,
    lambda x: 0.5 * x,
    lambda x: x.flip(0).contiguous(),
    lambda x: x.T.contiguous().T,
    lambda x: torch.cat((x[3:], x[:3])),
    lambda x: torch.where(x > 0, x, -1.0),
    lambda x: x.double().float(),
    lambda x: x[torch.tensor([5, 4, 3, 2, 1, 0])],
    lambda x: x[torch.arange(6).flip(0)] + torch.arange(32)[None] * 0.25,
    lambda x: x.view(3, 2, 32).unbind(1)[1].repeat(2, 1),
    lambda x: x.max(0).values.expand(6, 32) + x.topk(2).values[:, :1],
    lambda x: _in_place(x),
    lambda x: _into(x)[1:],
    lambda x: x.clamp(-1, 1).bfloat16().float(),
    # What kernels compute in place of PyTorch's functions, and what they do not.
    lambda x: torch.nn.functional.embedding(_places(x), x),
    lambda x: torch.nn.functional.embedding(_places(x).view(2, 3), x).sum(0).repeat(2, 1),
    lambda x: torch.nn.functional.embedding(_places(x)[3], x) + x,
    lambda x: x.index_select(0, _places(x)),
    lambda x: x.index_select(dim=0, index=_places(x)) + x.index_select(0, index=_places(x)),
    lambda x: (x.index_select(0, _places(x)[2]) + x[:0].index_select(0, _places(x)[:0]).sum()).repeat(6, 1),
    lambda x: x.index_select(0, _places(x).int()),
    lambda x: x.T.contiguous().index_select(1, _places(x)).T.contiguous(),
    lambda x: (x.bfloat16() + x.flip(0).bfloat16()).float(),
    lambda x: (x.double() + x.flip(0).double()).float(),
    lambda x: x + x.bfloat16() + x.long(),
    lambda x: x.add(x.flip(0), alpha=3) + x[0],
    lambda x: x.T.contiguous().T + x.flip(0),
]


@settings(max_examples=16)
@given(order=st.lists(st.integers(0, len(STEPS) - 1), min_size=1, max_size=30), seed=st.integers(0, 1000))
def test_a_replay_has_the_bits_of_a_call(order, seed):
    """Results of earlier steps are used again, so that memory that is given back too soon shows."""
    static, draw = torch.zeros_like(X), torch.Generator().manual_seed(seed)
    arena = Arena()

    def compute() -> tuple[Tensor, ...]:
        pick, seen = random.Random(seed), [static]
        for place in order:
            made = STEPS[place](seen[pick.randrange(len(seen))])
            seen.append(torch.nan_to_num(made / made.abs().max().clamp(min=1e-3)))
            if len(seen) > 4:
                del seen[pick.randrange(1, 4)]
        return tuple(seen[1:])

    graphs = [ops.StepGraph(compute, arena) for _ in range(2)]
    for _ in range(3):
        for graph in graphs:
            static.copy_(torch.randn(X.shape, generator=draw))
            expected = [made.clone() for made in compute()]
            found = graph.replay()
            assert len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    "reads",
    [
        lambda x: x.tolist(),
        lambda x: x.sum().item(),
        lambda x: int(x[0, 0]),
        lambda x: bool(x[0, 0] > 0),
        lambda x: float(x[0, 0]),
        lambda x: x.numpy(),
        lambda x: 3 if x[0, 0] else 2,
        lambda x: [0, 1][x[0, 0].long()],
        lambda x: torch.equal(x, x),
        lambda x: repr(x),
        lambda x: 1 in x,
        lambda x: torch.tensor([0.0] * 32).add_(x[0]),  # a constant, which a replay would add to once more
        lambda x: torch.arange(6.0)[:3].copy_(x[0, :3]),
    ],
)
def test_what_reads_values_is_refused(reads):
    with pytest.raises(ops.Unrecordable):
        ops.StepGraph(lambda: (X + 1, reads(X))[:1], Arena())
    assert native.recorder() is None and not X.any()


def test_what_is_not_recorded_is_not_repeated():
    static, seen = torch.ones(3), []

    def compute():
        with ops.unrecorded():
            seen.append(int(static.sum()))
            ops.rms_norm(static, static, 1e-6)
        return (static + 1,)

    graph = ops.StepGraph(compute, Arena())
    static.fill_(4)
    assert torch.equal(graph.replay()[0], torch.full((3,), 5.0)) and seen == [3]


def test_an_interrupt_ends_a_recording_and_no_outer_mode(monkeypatch):
    def interrupted(*_):
        ops.linear(X, WEIGHT)
        raise KeyboardInterrupt

    with torch.device("cpu"):
        outer = torch._C._get_function_stack_at(0)
        for _ in range(2):  # within what is recorded, and then already at its end
            with pytest.raises(KeyboardInterrupt):
                ops.StepGraph(interrupted, Arena())
            assert torch._C._get_function_stack_at(0) is outer and torch._C._len_torch_function_stack() == 1
            assert native.recorder() is None
            monkeypatch.setattr(ops.StepGraph, "__exit__", interrupted)
