"""The bias of a router's choice keeps its float32 on ranks that share bfloat16 weights, and moves as in one process."""

from dataclasses import replace

import pytest
import torch

from lockstep.config import ParallelConfig
from lockstep.model import ExpertsConfig, Latent, preset
from lockstep.ops import Routing
from tests.parallel.launch import launch
from tests.parallel.training import train

VOCAB = 259
SHAPE = replace(
    preset("deepseek_v3:micro", VOCAB), dim=64, num_layers=2, intermediate_size=96, head_dim=48,
    latent=Latent(32, 16, 16, 24, q_rank=40),
    experts=ExpertsConfig(
        8, 48, Routing(2, "sigmoid", groups=4, groups_kept=2), 48, choice_bias=True, dense_layers=(0,)
    ),
)  # fmt: skip
BIAS = "layers.1.mlp.gate.e_score_correction_bias"
# A step that bfloat16 would round away beside 0.01.
SETTINGS = {"router_bias_rate": 1e-5, "learning_rate": 1e-4}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_biases_move_as_in_one_process(dtype):
    # In another order bfloat16 gradients round otherwise, and one token that then takes another expert may turn a load
    # that is just the mean into one below: there all layouts sum in one order.
    settings = SETTINGS | {"deterministic_layout": dtype == "bfloat16"}
    arguments = (dtype, 4, SHAPE, VOCAB, False, settings, None, False, 2)
    (alone,) = launch(1, train, ParallelConfig(), *arguments)
    ranks = launch(2, train, ParallelConfig(), *arguments)
    bias = alone.weights[BIAS]
    assert bias.dtype == torch.float32 and 1e-5 <= bias.abs().max() <= 4.01e-5
    for rank in ranks:
        assert torch.equal(rank.weights[BIAS], bias)
    assert torch.equal(torch.cat([rank.log_probs for rank in ranks]).sort()[0], alone.log_probs.sort()[0])
