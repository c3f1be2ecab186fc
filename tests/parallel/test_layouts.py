"""Every layout against one process: the same training, and the same bits forward where no sum is cut."""

from functools import cache
from pathlib import Path

import pytest
import torch

from lockstep.config import ParallelConfig
from tests.parallel.launch import launch
from tests.parallel.layouts import LAYOUTS, table
from tests.parallel.training import train


@pytest.fixture(scope="module")
def alone():
    """One process's training of a model in a dtype."""
    return cache(lambda model, dtype, tied: launch(1, train, ParallelConfig(), dtype, 20, model, 258, tied)[0])


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.name}-{layout.dtype}")
def test_training_follows_one_process(alone, layout):
    expected = alone(layout.model, layout.dtype, layout.tied)
    traces = launch(layout.ranks, train, layout.parallel, layout.dtype, layout.steps, layout.model, 258, layout.tied)
    if layout.same_bits:
        # Sorted, for the ranks of a context group have tokens from everywhere.
        found = torch.cat([trace.log_probs for trace in traces]).sort().values
        assert torch.equal(found, expected.log_probs.sort().values)
    # Sums are added in another order. In bfloat16 a weight is rounded to 8 bits, after every step; where a sum is cut,
    # so are its parts.
    tolerance = 1e-5 if layout.dtype == "float32" else 1e-3 if layout.same_bits else 5e-3
    for trace in traces:
        assert trace.losses == pytest.approx(expected.losses[: layout.steps], rel=tolerance)
        assert trace.norms[0] == pytest.approx(expected.norms[0], rel=tolerance)
        if layout.dtype == "float32":
            assert trace.norms == pytest.approx(expected.norms[: layout.steps], rel=1e-4)
    # A stage of a pipeline has its own layers' weights only.
    assert set().union(*(trace.weights for trace in traces)) == set(expected.weights)


def test_the_documented_table_is_that_of_the_tests():
    page = Path(__file__).parents[2] / "docs" / "parallelism.md"
    assert table() in page.read_text(), f"put this into {page}:\n{table()}"
