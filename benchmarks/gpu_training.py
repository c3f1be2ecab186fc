"""Training steps of Llama-3-shaped models on one GPU, 8192 tokens in bfloat16, against the device's peak."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from gpu_clock import Row, row
from gpu_model import compile_model, random_model, random_prompts

from lockstep.config import RecomputeConfig, TrainConfig
from lockstep.model import preset
from lockstep.observe.speed import peak_flops, training_flops
from lockstep.parallel.recompute import apply_recompute
from lockstep.train import Trainer, pack
from lockstep.train.objective import NextTokenLoss

TOKENS, STEPS, GOAL = 8192, 4, 0.5


def train(size: str, compiled: bool) -> Iterator[Row]:
    """Tokens a second, model FLOPs utilisation and memory. At 8B activations are recomputed, moments are bfloat16."""
    model = random_model(preset(f"llama3:{size}"))
    if compiled:
        compile_model(model)
    large = size == "8b"
    apply_recompute(model, RecomputeConfig(mode="full" if large else "none"))
    settings = TrainConfig(learning_rate=1e-5, moments_dtype="bfloat16" if large else "float32")
    trainer = Trainer(model, settings, 100)
    batch = pack(random_prompts(1, TOKENS, model.config.vocab_size), device="cuda")
    loss = NextTokenLoss(TOKENS - 1)
    for _ in range(2):
        trainer.step([batch], loss)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for _ in range(STEPS):
        trainer.step([batch], loss)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / STEPS
    name = f"training Llama 3 {size.upper()} {'compiled' if compiled else 'eager'}, 1 x {TOKENS}"
    used = training_flops(model.config, [TOKENS]) / seconds / peak_flops(torch.device("cuda"), torch.bfloat16)
    yield row(name, TOKENS / seconds, "tokens/s")
    yield row(f"{name}: MFU", used, "", at_least=GOAL)
    yield row(f"{name}: peak memory", torch.cuda.max_memory_allocated() / 2**30, "GiB")
