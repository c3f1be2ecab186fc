"""A mixture of experts against transformers, vLLM, and a dense model of as many active parameters.

The model is `qwen3_moe:small`: 8 layers, 32 experts of which a token meets 4; 0.12B active parameters of 0.52B.

    train     a step of 4 x 512 tokens: ours, transformers' with each of its implementations, and the dense model's
    decode    1 and 32 sequences of 32 tokens, 64 new ones each: ours, vLLM's, and the dense model's

Run: python benchmarks/experts.py [--work train|decode] [--dtype float32]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

PRESET, VOCAB = "qwen3_moe:small", 32000
ROWS, LENGTH, STEPS = 4, 512, 3
PROMPT, NEW = 32, 64
SEQUENCES = (1, 32)
ROUNDS = 2
PATIENCE = 120.0
"""Seconds for a step: an implementation that takes longer is left out, and said so."""
TRAINED = ("lockstep", "dense", "transformers grouped_mm", "transformers batched_mm", "transformers eager")
DECODED = ("lockstep", "dense", "vLLM")


def tokens(rows: int, length: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(VOCAB) for _ in range(length)] for _ in range(rows)]


def median_seconds(step: Callable[[], object]) -> float:
    """Ends the process where a step takes too long to be of interest."""
    signal.signal(signal.SIGALRM, _give_up)
    signal.alarm(int(PATIENCE))
    step()
    signal.alarm(0)
    times = []
    for _ in range(STEPS):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2]


def _give_up(*_: object) -> None:
    raise SystemExit(f"a step takes more than {PATIENCE:.0f} s")


def our_step(folder: str) -> Callable[[], object]:
    from lockstep import load_model
    from lockstep.config import TrainConfig
    from lockstep.train import Trainer, pack
    from lockstep.train.objective import NextTokenLoss

    trainer = Trainer(load_model(folder), TrainConfig(learning_rate=1e-4), 100)
    return lambda: trainer.step([pack(tokens(ROWS, LENGTH))], NextTokenLoss(ROWS * (LENGTH - 1)))


def their_step(folder: str, dtype: str, implementation: str) -> Callable[[], object]:
    import torch
    from transformers import AutoModelForCausalLM

    options = dict(dtype=getattr(torch, dtype), experts_implementation=implementation)
    model = AutoModelForCausalLM.from_pretrained(folder, **options).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    row = torch.tensor(tokens(ROWS, LENGTH))

    def step() -> None:
        model(input_ids=row, labels=row).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def our_decode(folder: str, sequences: int) -> float:
    from lockstep import Engine, EngineConfig, SamplingParams, load_model

    engine = Engine(load_model(folder), EngineConfig(prefix_cache=False, draft="none"))
    prompts = tokens(sequences, PROMPT)

    def seconds(new: int) -> float:
        began = time.perf_counter()
        engine.generate(prompts, SamplingParams(max_tokens=new, ignore_eos=True, seed=0))
        return time.perf_counter() - began

    seconds(4)
    # Of one token more and less the prompt takes the same time.
    return min(seconds(NEW) for _ in range(2)) - min(seconds(1) for _ in range(2))


def vllm_decode(folder: str, sequences: int) -> float:
    from vllm import LLM, SamplingParams

    model = LLM(model=folder, skip_tokenizer_init=True, max_model_len=512, enable_prefix_caching=False,
                max_num_seqs=64, disable_log_stats=True)  # fmt: skip
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in tokens(sequences, PROMPT)]

    def seconds(new: int) -> float:
        params = SamplingParams(max_tokens=new, ignore_eos=True, logprobs=0, detokenize=False)
        began = time.perf_counter()
        model.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - began

    seconds(4)
    return min(seconds(NEW) for _ in range(2)) - min(seconds(1) for _ in range(2))


def run_side(side: str, work: str, folder: str, dtype: str, sequences: int) -> dict[str, float]:
    name, _, implementation = side.partition(" ")
    if name == "dense":
        folder = f"{folder}-dense"
    if work == "decode":
        return {"seconds": (vllm_decode if name == "vLLM" else our_decode)(folder, sequences)}
    step = their_step(folder, dtype, implementation) if name == "transformers" else our_step(folder)
    return {"seconds": median_seconds(step)}


def report(work: str, folder: str, dtype: str, sequences: int = 0) -> None:
    from peers import best_of

    arguments = ["--work", work, "--folder", folder, "--dtype", dtype, "--sequences", str(sequences)]
    best: dict[str, dict[str, Any]] = {}
    for side in TRAINED if work == "train" else DECODED:
        try:
            best |= best_of(__file__, arguments, [side], ROUNDS)
        except SystemExit as error:
            print(f"  {side}: left out, {str(error).strip().splitlines()[-1][:120]}", flush=True)
    amount = ROWS * LENGTH if work == "train" else sequences * (NEW - 1)
    what = f"{ROWS} x {LENGTH} tokens" if work == "train" else f"{sequences} sequences, {NEW} new tokens"
    print(f"\n{work}: {PRESET}, {what}, {dtype} ({len(os.sched_getaffinity(0))} cores, best of {ROUNDS} processes)")
    for side, result in best.items():
        seconds = result["seconds"]
        ratio = seconds / best["lockstep"]["seconds"]
        print(f"  {side:24} {seconds:8.3f} s {amount / seconds:8.0f} tokens/s  ratio {ratio:.2f}", flush=True)


def save_models(folder: str, dtype: str) -> None:
    """The mixture, and beside it a dense model whose feed-forward is as wide as a token's experts together."""
    from lockstep import build_model, save_model
    from lockstep.model import preset

    mixture = preset(PRESET, VOCAB)
    dense = dataclasses.replace(mixture, family="qwen3", experts=None)
    save_model(build_model(mixture, dtype), folder)
    save_model(build_model(dense, dtype), f"{folder}-dense")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", choices=("train", "decode"))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--side")
    parser.add_argument("--folder")
    parser.add_argument("--sequences", type=int, default=0)
    options = parser.parse_args()
    if options.side:
        find = partial(run_side, options.side, options.work, options.folder, options.dtype, options.sequences)
        print(json.dumps(find()))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = f"{scratch}/model"
        save_models(folder, options.dtype)
        for work in [options.work] if options.work else ["train", "decode"]:
            for sequences in (0,) if work == "train" else SEQUENCES:
                report(work, folder, options.dtype, sequences)


if __name__ == "__main__":
    main()
