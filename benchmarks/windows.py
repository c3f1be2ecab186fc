"""Prefill of one long prompt with a sliding window against full attention: the engine's whole step, and attention.

Run: python benchmarks/windows.py [--length 8192] [--window 1024] [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from lockstep import Engine, EngineConfig, SamplingParams, build_model, ops
from lockstep.model import ModelConfig, preset

MODELS = ("qwen2:tiny", "qwen2:small", "qwen2:0.5b")
ROUNDS = 3


def median_seconds(ways: list[Callable[[], object]]) -> list[float]:
    """Of several ways in turn, after one call of each."""
    times: list[list[float]] = [[] for _ in ways]
    for index in range(ROUNDS + 1):
        for way, taken in zip(ways, times):
            began = time.perf_counter()
            way()
            if index:
                taken.append(time.perf_counter() - began)
    return [statistics.median(taken) for taken in times]


def prefill(config: ModelConfig, length: int, dtype: str) -> Callable[[], object]:
    """The engine's time to the first token of a prompt."""
    engine = Engine(build_model(config, dtype), EngineConfig(cache_tokens=length + 64, prefix_cache=False))
    prompt = random.Random(0).choices(range(config.vocab_size), k=length)
    return lambda: engine.generate([prompt], SamplingParams(max_tokens=1, seed=0))


def attention(config: ModelConfig, length: int, dtype: str, window: int) -> Callable[[], object]:
    """One layer's attention over the prompt, without a gradient."""
    drawn = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(length, heads, config.head_dim, generator=drawn).to(getattr(torch, dtype))
        for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    )
    packed = ops.PackedAttention([length])
    return torch.no_grad()(lambda: packed(0, q, k, v, ops.Terms(window=window)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args()
    print(f"{options.length} tokens, a window of {options.window}, {options.dtype}: window, full, ratio")
    for name in MODELS:
        config = replace(preset(name), max_positions=options.length + 64)
        windowed = replace(config, windows=(options.window,))
        ways = [prefill(shape, options.length, options.dtype) for shape in (windowed, config)]
        ways += [attention(config, options.length, options.dtype, window) for window in (options.window, 0)]
        for what, (short, full) in zip(("prefill", "attention"), zip(*[iter(median_seconds(ways))] * 2)):
            print(f"{name:12} {what:10} {short:8.3f} s {full:8.3f} s {short / full:6.2f}", flush=True)


if __name__ == "__main__":
    main()
