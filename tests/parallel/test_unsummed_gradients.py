"""Training has the same bits where gathered weights have float32 gradients from the start, as in torch 2.15."""

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from lockstep.config import ParallelConfig
from lockstep.errors import UserError
from lockstep.model import Decoder, preset
from lockstep.parallel.unsummed_gradients import round_tied_gradient
from tests.parallel.launch import launch
from tests.parallel.test_deterministic_layout import train


def as_torch_2_15() -> None:
    """In this process, autograd widens a gathered weight's gradient itself, and FSDP has no copy of it to set."""
    prepared = FSDPParam.init_unsharded_param

    def prepare(self):
        prepared(self)
        if self.reduce_dtype is not None:
            self._unsharded_param.grad_dtype = self.reduce_dtype

    def never_set(self, value):
        if hasattr(self, "_unsharded_param"):
            raise AttributeError("property 'unsharded_accumulated_grad' of 'FSDPParam' object has no setter")

    FSDPParam.init_unsharded_param = prepare
    FSDPParam.unsharded_accumulated_grad = property(lambda self: None, never_set)
    FSDPParam.to_accumulated_grad_if_needed = lambda self: None
    FSDPParam.accumulate_unsharded_grad_if_needed = lambda self: None


def train_as_torch_2_15(*arguments):
    as_torch_2_15()
    return train(*arguments)


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [(2, dict(tensor=2)), pytest.param(4, {}, marks=pytest.mark.slow), (2, dict(pipeline=2))],
    ids=["tensor", "data", "pipeline"],
)
def test_a_tied_embeddings_gradient_has_the_bits_of_one_process_where_autograd_widens_it(ranks, parallel):
    settings = "bfloat16", 4, 2
    (alone,) = launch(1, train, ParallelConfig(reduction_chunks=2), *settings)
    results = launch(ranks, train_as_torch_2_15, ParallelConfig(**parallel, reduction_chunks=2), *settings, fresh=True)
    for found, masters in results:
        assert found == alone[0]
        assert all(torch.equal(master, alone[1][name]) for name, master in masters.items())


def test_a_weight_that_is_not_gathered_as_known_is_an_error_that_names_the_version():
    model = Decoder(preset("qwen3:micro", 131), torch.float32, "meta")
    round_tied_gradient(model, torch.bfloat16)
    with pytest.raises(UserError, match=rf"torch {torch.__version__.split('+')[0]}.*torch.float32, not torch.bfloat16"):
        model(torch.zeros(3, dtype=torch.int64), torch.arange(3), None)
