"""An engine whose weights' memory is given away: nothing is sampled, and no panel of them is held."""

import pytest
import torch

from lockstep.config import EngineConfig
from lockstep.generate import Engine, SamplingParams
from lockstep.model import build_model, preset


def test_nothing_is_sampled_until_the_weights_are_there_again():
    model = build_model(preset("qwen3:micro", 64), dtype=torch.float32, seed=0)
    engine = Engine(model, EngineConfig(cache_tokens=256))
    params = SamplingParams(max_tokens=8, seed=1)
    before = engine.generate([[1, 2, 3]], params)
    assert engine._weights._panels
    engine.release_weights()
    assert not engine._weights._panels and not engine._weights._current
    with pytest.raises(RuntimeError, match="the engine's weights were released; call weights_changed"):
        engine.generate([[1, 2, 3]], params)
    engine.weights_changed(1)
    after = engine.generate([[1, 2, 3]], params)
    assert [c.token_ids for c in after[0]] == [c.token_ids for c in before[0]]
    assert [c.logprobs for c in after[0]] == [c.logprobs for c in before[0]]
