"""What this machine can do at most, measured in the same run as what it is compared with."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lockstep import ops
from lockstep.model import ModelConfig


@dataclass
class Ceilings:
    products: float
    """Multiplications and additions a second of a large matrix product."""
    streaming: float
    """Bytes a second of weights that a product of one row reads from memory."""
    itemsize: int
    """Bytes of a weight and of a cached value."""

    def seconds(self, config: ModelConfig, prompts: int, length: int, new: int, samples: int, shared: bool) -> float:
        """The least time for sampling: every weight's product, or its reading where that takes longer; keys and values.

        Nothing is taken for norms, draws and softmax, and nothing is said of the cache's help.
        """
        head = config.vocab_size * config.dim
        layers = config.num_parameters - head * (1 if config.tie_embeddings else 2)
        sequences = prompts * samples
        prefill = 2 * layers * length * (prompts if shared else sequences) / self.products
        step = max(2 * (layers + head) * sequences / self.products, self.itemsize * (layers + head) / self.streaming)
        cached = (
            2
            * self.itemsize
            * config.num_layers
            * config.num_kv_heads
            * config.head_dim
            * sequences
            * (length + new / 2)
        )
        return prefill + new * (step + cached / self.streaming)


def measure(dtype: torch.dtype = torch.bfloat16) -> Ceilings:
    """Takes some seconds."""
    with torch.inference_mode():
        square = torch.randn(2048, 2048).to(dtype)
        # The faster of the library and our own: without bfloat16 instructions that is ours by far.
        products = 2 * 2048**3 / min(_best(lambda: ops.linear(square, square)), _best(lambda: square @ square, 2))
        weights = [torch.randn(4096, 4096).to(dtype) for _ in range(12)]
        row = torch.randn(1, 4096).to(dtype)
        streaming = sum(w.nbytes for w in weights) / _best(lambda: [ops.linear(row, w) for w in weights])
    return Ceilings(products, streaming, dtype.itemsize)


def _best(work: Callable[[], object], rounds: int = 10) -> float:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)
