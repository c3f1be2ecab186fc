"""A decode step of one sequence at two lengths of its context: what linear attention is for.

Run: python benchmarks/long_context.py [--lengths 512 8192] [--dtype bfloat16] [--models qwen3_5:0.8b qwen3:0.6b]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import replace

from lockstep import Engine, EngineConfig, SamplingParams, build_model
from lockstep.model import preset

NEW, BEFORE = 72, 24
"""Tokens sampled per length, and those before the timing: the steps that record a step graph."""


def decode_seconds(name: str, lengths: list[int], dtype: str) -> list[float]:
    """The median decode step at each length of the prompt."""
    config = replace(preset(name), max_positions=max(lengths) + NEW)
    engine = Engine(build_model(config, dtype), EngineConfig(cache_tokens=max(lengths) + NEW + 16, prefix_cache=False))
    medians = []
    for length in lengths:
        prompt = random.Random(length).choices(range(config.vocab_size), k=length)
        times = []
        for _ in engine.stream(prompt, SamplingParams(max_tokens=NEW, ignore_eos=True, seed=0)):
            times.append(time.perf_counter())
        steps = [after - before for before, after in zip(times, times[1:])]
        medians.append(statistics.median(steps[BEFORE:]))
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 8192])
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--models", nargs="+", default=["qwen3_5:0.8b", "qwen3:0.6b"])
    options = parser.parse_args()
    for name in options.models:
        seconds = decode_seconds(name, options.lengths, options.dtype)
        for length, each in zip(options.lengths, seconds):
            ratio = each / seconds[0]
            print(f"{name:14} {options.dtype:9} {length:6} tokens {each * 1e3:8.2f} ms  {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
