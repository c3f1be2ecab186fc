"""The line with which a command starts."""

import torch

from lockstep.model import preset
from lockstep.observe.start import start_line


def test_of_a_mixture_it_says_how_many_weights_a_token_meets():
    line = start_line("m", preset("qwen3_moe:30b-a3b"), torch.device("cpu"), torch.float32, "nothing to do")
    assert line.startswith("m, 30.5B parameters (3.35B active) | cpu")
    assert "active" not in start_line("m", preset("qwen3:0.6b"), torch.device("cpu"), torch.float32, "")
