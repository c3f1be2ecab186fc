"""A loss and advantages of one's own: GSPO's (arXiv 2507.18071), with the bits of `--algorithm gspo`.

lockstep rl --algorithm gspo --loss examples/gspo_loss.py:loss --advantage examples/gspo_loss.py:advantages …
"""

import torch

import lockstep.rl as rl
from lockstep import ops

LOW, HIGH = 1 - 3e-4, 1 + 4e-4


def loss(inputs: rl.PolicyLossInputs):
    mean = inputs.completion_means(inputs.log_probs - inputs.old_log_probs)
    ratio = ops.exp(mean) * ops.exp(inputs.log_probs - inputs.log_probs.detach())
    plain = -inputs.advantages * ratio
    clipped = -inputs.advantages * ratio.detach().clamp(LOW, HIGH)
    is_clipped = clipped > plain
    return torch.where(is_clipped, clipped, plain), {"clip_fraction": inputs.average(is_clipped)}


def advantages(inputs: rl.AdvantageInputs):
    return [rl.group_advantages(rewards[None])[0] for rewards in inputs.rewards]
