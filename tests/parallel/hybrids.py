"""A small model with both kinds of layers, and sequences that cross a boundary of the delta rule's chunks."""

from dataclasses import replace

from lockstep.model import preset
from lockstep.model.config import DeltaNet

VOCAB = 258
HYBRID = replace(
    preset("qwen3:micro", VOCAB), num_heads=8, num_kv_heads=4, delta=DeltaNet(4, 8, 16, 32),
    delta_layers=(True, False), attention_gate=True,
)  # fmt: skip
"""The first of every two layers has linear attention, with 4 key heads."""
FUSED = replace(HYBRID, delta=DeltaNet(4, 8, 16, 32, fused=True))
"""With the rows of a key head together, as Qwen3-Next's weights have them."""
LENGTHS = (70, 24, 73, 17) * 2
TOKENS = 100
"""Of a micro-batch: two sequences in each."""
