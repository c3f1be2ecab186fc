"""Rows that travel by DeepEP, and where it fails an error: real ranks, and a package of its name on their path.

DeepEP itself needs GPUs. The package here has the signatures and the order of rows of its `Buffer`, over gloo, and
fails in one place.
"""

import sys
from datetime import timedelta
from functools import partial

import pytest
import torch

from lockstep.config import ParallelConfig
from lockstep.errors import UserError
from lockstep.ops.experts import feed_forward
from lockstep.parallel import close_world, deep_ep, open_world
from lockstep.parallel.experts import experts_over_ranks
from tests.parallel.launch import launch

PACKAGE = """
import torch
import torch.distributed as dist

FAULT, RANK = {fault!r}, {rank}
if FAULT == "load" and dist.get_rank() == RANK:
    raise OSError("libcuda.so.1: cannot open shared object file")


class Event:
    def current_stream_wait(self):
        pass


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes, num_ranks):
        return hidden_bytes * num_ranks


class Buffer:
    @staticmethod
    def get_dispatch_config(num_ranks):
        return Config()

    def __init__(self, group, num_nvl_bytes=0, num_rdma_bytes=0, explicitly_destroy=False):
        self.group, self.calls = group, 0
        if FAULT == "buffer" and group.rank() == RANK:
            raise RuntimeError("CUDA driver error")
        dist.all_gather_object([None] * group.size(), num_nvl_bytes, group)

    def dispatch(self, x, handle=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None, is_token_in_rank=None,
                 num_tokens_per_expert=None, topk_idx=None, topk_weights=None, async_finish=False):
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and is_token_in_rank.shape == (len(x), self.group.size())
        assert is_token_in_rank.sum(0).tolist() == num_tokens_per_rank.tolist() == num_tokens_per_expert.tolist()
        self.calls += 1
        if FAULT == f"dispatch {{self.calls}}" and self.group.rank() == RANK:
            raise RuntimeError("DeepEP error: CPU recv timeout")
        everyone = [None] * self.group.size()
        parts = [x[goes].view(torch.int16).tolist() for goes in is_token_in_rank.T]
        dist.all_gather_object(everyone, parts, self.group)
        rows = [row for parts in everyone for row in parts[self.group.rank()]]
        rows = rows[::-1] if FAULT == "order" else rows[1:] if FAULT == "lost" else rows
        arrived = torch.tensor(rows, dtype=torch.int16).view(-1, x.shape[1]).view(torch.bfloat16)
        return arrived, None, None, [len(arrived)], (), Event()
"""


def through(weights, rows, starts):
    return feed_forward(rows, starts, *weights)


def results(group, rank, rounds):
    """Outputs and gradients of a few layers; each forward and backward makes four exchanges of rows."""
    draw, found = torch.Generator().manual_seed(0), []
    for count in (0, 21, 40)[:rounds]:
        weights_of = [torch.randn(4, *s, generator=draw) for s in ((24, 16), (24, 16), (16, 24))]
        x = torch.randn(2, 40, 16, generator=draw)
        x[..., 3] = -0.0
        scores = torch.rand(2, 40, 4, generator=draw)
        rows = x[rank, : count if rank else 40].clone().requires_grad_()
        weights, chosen = scores[rank, : len(rows)].topk(2)
        own = [w.chunk(2)[rank].clone().requires_grad_() for w in weights_of]
        out = experts_over_ranks(rows, weights, chosen, 4, group, partial(through, own), lambda x: x * 2)
        out.backward(torch.randn(40, 16, generator=draw)[: len(rows)])
        found += [out.detach(), rows.grad, *(weight.grad for weight in own)]
    return found


def travelled(folder, rounds):
    """Whether the bits are those of the all-to-all; or the error that using the package ended in."""
    sys.path.insert(0, str(folder))
    deep_ep.PATIENCE = timedelta(seconds=5)
    world = open_world(ParallelConfig(tensor=2), "cpu")
    group = world.mesh.get_group("tensor")
    expected = results(group, world.rank, rounds)
    deep_ep.use_deep_ep(True)
    try:
        found = results(group, world.rank, rounds)
    except (UserError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        close_world(world)
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(found, expected))


def write_package(folder, fault="", rank=1):
    (folder / "deep_ep.py").write_text(PACKAGE.format(fault=fault, rank=rank))


def test_rows_that_travel_by_deep_ep_have_the_bits_of_those_that_travel_by_all_to_all(tmp_path):
    write_package(tmp_path)
    assert launch(2, travelled, tmp_path, 3, fresh=True) == [True] * 2


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("load", ["cannot be used (on ranks [1]: OSError: libcuda.so.1"] * 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("buffer", ["cannot be used (on ranks [1]: RuntimeError: CUDA driver error"] * 2),
                ("order", ['DeepEP\'s rows differ from those of parallel.expert_dispatcher "all_to_all"'] * 2),
                ("lost", ["DeepEP brought 38 of 39 rows", "DeepEP brought 40 of"]),
            )
        ),
    ],
)
def test_a_package_that_does_not_work_on_one_rank_ends_the_run_on_all_and_says_why(tmp_path, fault, said):
    write_package(tmp_path, fault)
    for error, expected in zip(launch(2, travelled, tmp_path, 1, fresh=True), said):
        assert expected in error
