"""A decode step of 16 sequences with 1, 4 and 16 adapters against none, and against one adapter that is built in.

    python benchmarks/adapters.py [--model qwen3:tiny] [--dtype float32] [--rank 16] [--sequences 16] [--rounds 3]

Fresh weights of the preset's shape; the adapters are for all linear layers, and the sequences have them in turn.
Processor seconds of the fastest step, which others on the machine change least, of the steps after the prompts in all
rounds; in a round all sides run in turn. `direct`: steps that are not recorded.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace

import torch
from lora import processor

from lockstep import Engine, EngineConfig, SamplingParams
from lockstep.generate.runner import Runner
from lockstep.model import build_model, lora_of, preset
from lockstep.model.adapters import build_adapter

PROMPT, WARM_STEPS = 64, 24


def make_engine(options: argparse.Namespace, adapters: int, built_in: bool = False, graphs: bool = True) -> Engine:
    """An engine with `sequences` requests that are past their prompts."""
    shape = preset(options.model)
    lora = lora_of(shape, options.rank, 2.0 * options.rank, ("*_proj",))
    model = build_model(replace(shape, lora=lora) if built_in else shape, options.dtype)
    model.requires_grad_(False)
    engine = Engine(model, EngineConfig(max_sequences=options.sequences, cache_tokens=16384))
    if not graphs:
        engine.runner = Runner(model, engine.cache)
    for number in range(adapters):
        adapter = build_adapter(model, lora, number)
        with torch.no_grad():
            for a, b in adapter.matrices.values():
                b.weight.copy_(0.01 * a.weight.new_ones(b.weight.shape))
        engine.load_adapter(f"adapter-{number}", adapter)
    for number in range(options.sequences):
        params = SamplingParams(
            max_tokens=WARM_STEPS + options.steps + 8, seed=number, ignore_eos=True,
            adapter=f"adapter-{number % adapters}" if adapters else "",
        )  # fmt: skip
        engine.add([(7 * number + place) % shape.vocab_size for place in range(PROMPT)], params)
    for _ in range(WARM_STEPS):
        engine.step()
    return engine


def seconds_of(engine: Engine, steps: int) -> float:
    """Of the fastest of some steps."""
    seconds = []
    for _ in range(steps):
        began = time.process_time()
        engine.step()
        seconds.append(time.process_time() - began)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3:tiny")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--steps", type=int, default=30, help="per side and round")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    sides = {
        "none": dict(adapters=0),
        "1 built in": dict(adapters=0, built_in=True),
        "1": dict(adapters=1),
        "4": dict(adapters=4),
        "16": dict(adapters=16),
        "none, direct": dict(adapters=0, graphs=False),
        "4, direct": dict(adapters=4, graphs=False),
    }
    best: dict[str, float] = {}
    for _ in range(options.rounds):
        for name, side in sides.items():
            engine = make_engine(options, **side)  # type: ignore[arg-type]
            best[name] = min(best.get(name, float("inf")), seconds_of(engine, options.steps))
    print(f"{options.model}, {options.dtype}, {options.sequences} sequences, rank {options.rank}, all linear layers")
    print(f"{processor()}, OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'unset')}")
    for name, seconds in best.items():
        print(f"adapters: {name:20} {1e3 * seconds:8.2f} ms a step, {seconds / best['none']:.2f} of none")


if __name__ == "__main__":
    main()
