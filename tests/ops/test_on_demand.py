"""Memory of a cache is taken as it is used."""

import pytest
import torch

from lockstep.ops.on_demand import zeros_on_demand


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_it_is_zero_where_nothing_was_written_and_keeps_what_was(dtype):
    tensor = zeros_on_demand((3, 5, 7), dtype, "cpu")
    assert tensor.dtype == dtype and tensor.shape == (3, 5, 7) and tensor.is_contiguous()
    tensor[1] += 2
    assert tensor.sum() == 2 * 35 and (tensor[::2] == 0).all()


def test_other_devices_and_nothing_at_all():
    assert zeros_on_demand((2, 3), torch.float32, "meta").is_meta
    assert zeros_on_demand((2, 0), torch.float32, "cpu").shape == (2, 0)
