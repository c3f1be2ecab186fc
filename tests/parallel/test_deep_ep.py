"""Rows that travel by DeepEP, and where it fails an error: real ranks, and a package of its name on their path.

DeepEP itself needs GPUs. The package here has the signatures and the order of rows of its `Buffer`, over gloo, and
fails in one place.
"""

import re
import sys
from datetime import timedelta

import pytest

from lockstep.errors import UserError
from lockstep.parallel import deep_ep
from tests.parallel.launch import launch
from tests.parallel.test_experts import compare_random

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


def travelled(folder, rounds):
    """The rounds whose bits are not those of one process; or the error that using the package ended in."""
    sys.path.insert(0, str(folder))
    deep_ep.PATIENCE = timedelta(seconds=5)
    deep_ep.use_deep_ep(True)
    try:
        return compare_random(rounds, "none")
    except (UserError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


SLOW = pytest.mark.slow


def write_package(folder, fault="", rank=1):
    (folder / "deep_ep.py").write_text(PACKAGE.format(fault=fault, rank=rank))


def test_rows_that_travel_by_deep_ep_have_the_bits_of_rows_that_stayed(tmp_path):
    write_package(tmp_path)
    assert launch(2, travelled, tmp_path, 8, fresh=True) == [[], []]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("load", r"cannot be used \(on ranks \[1\]: OSError: libcuda.so.1"),
        pytest.param("buffer", r"(?s)cannot be used .*on ranks \[1\]: RuntimeError: CUDA driver error", marks=SLOW),
        pytest.param("order", "DeepEP's rows differ from those of parallel.expert_dispatcher", marks=SLOW),
        pytest.param("lost", r"DeepEP brought \d+ of \d+ rows", marks=SLOW),
    ],
)
def test_a_package_that_does_not_work_on_one_rank_ends_the_run_on_all_and_says_why(tmp_path, fault, said):
    write_package(tmp_path, fault)
    for error in launch(2, travelled, tmp_path, 1, fresh=True):
        assert re.search(said, error)
