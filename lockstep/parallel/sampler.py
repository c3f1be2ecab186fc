"""Sampling over a sharded vocabulary: all ranks draw the tokens that one process would."""

from __future__ import annotations

from functools import partial

import torch.distributed as dist

from lockstep import ops
from lockstep.parallel.vocabulary import Part


class ShardedSampler:
    """`ops.sample` and `ops.top_log_probs` over `group`, given the logits of this rank's part of the vocabulary."""

    def __init__(self, vocab: int, group: dist.ProcessGroup):
        self.part = Part(vocab, group)
        self.sample = partial(ops.sample, part=self.part)
        self.top_log_probs = partial(ops.top_log_probs, part=self.part)
