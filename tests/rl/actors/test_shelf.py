"""Replicas take from a shelf the trainer's weights, rounded, from every layout; what is damaged stays there."""

import json

import pytest
import torch

from lockstep.config import ParallelConfig
from lockstep.model import build_model
from lockstep.parallel import open_world
from lockstep.rl.actors.shelf import Shelf
from lockstep.rl.actors.shelf_reader import ShelfReader
from tests.rl.actors.test_weights import SHAPE

KEY = bytes(range(32))


def _trained():
    model = build_model(SHAPE, dtype=torch.float32, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0001)  # so that rounding to the generator's dtype shows
    return dict(model.named_parameters())


def _shelf(tensors=None, dtype=torch.bfloat16):
    return Shelf(tensors or _trained(), dtype, open_world(ParallelConfig(), "cpu"), KEY)


def _reader(dtype=torch.bfloat16, shape=SHAPE):
    return ShelfReader(build_model(shape, dtype=dtype, seed=2), open_world(ParallelConfig(), "cpu"), KEY)


@pytest.mark.parametrize("way", ["memory", "TCP"])
def test_one_to_one(way):
    shelf, reader = _shelf(), _reader()
    for version in (1, 2, 3):
        edition = json.loads(json.dumps(shelf.publish(version)))
        if way == "TCP":
            edition["shelf"]["ranks"][0]["place"] = None
        taken = reader.take(edition)
        assert taken.outcome == "taken", taken
    for name, p in _trained().items():
        assert torch.equal(dict(reader._model.named_parameters())[name], p.to(torch.bfloat16))
    shelf.close()
    reader.close()
