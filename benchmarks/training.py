"""The training step against a transformers model in a plain loop: 110M-parameter Qwen3, bfloat16, 4 x 512 tokens.

Ours keeps float32 master weights; the plain loop's AdamW works on the bfloat16 weights.
Run: python benchmarks/training.py
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable

ROWS, LENGTH, VOCAB, STEPS = 4, 512, 32000, 2


def tokens() -> list[list[int]]:
    import random

    draw = random.Random(0)
    return [[draw.randrange(VOCAB) for _ in range(LENGTH)] for _ in range(ROWS)]


def lockstep_step(folder: str) -> Callable[[], object]:
    from lockstep import load_model
    from lockstep.config import TrainConfig
    from lockstep.train import Trainer, pack
    from lockstep.train.pretrain import NextTokenLoss

    trainer = Trainer(load_model(folder), TrainConfig(learning_rate=1e-4), 100)
    return lambda: trainer.step([pack(tokens())], NextTokenLoss(ROWS * (LENGTH - 1)))


def transformers_step(folder: str) -> Callable[[], object]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    row = torch.tensor(tokens())

    def step() -> None:
        model(input_ids=row, labels=row).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--side")
    parser.add_argument("--folder")
    options = parser.parse_args()
    if options.side:
        step = (lockstep_step if options.side == "lockstep" else transformers_step)(options.folder)
        step()
        began = time.perf_counter()
        for _ in range(STEPS):
            step()
        print(json.dumps({"seconds": (time.perf_counter() - began) / STEPS}))
        return
    from peers import compare

    from lockstep import build_model, save_model
    from lockstep.model import preset

    with tempfile.TemporaryDirectory() as folder:
        save_model(build_model(preset("qwen3:small", VOCAB), dtype="bfloat16"), folder)
        work = f"training step: 110M Qwen3, bfloat16, {ROWS} x {LENGTH} tokens"
        compare(__file__, ["--folder", folder], work, ROWS * LENGTH, "tokens/s", "transformers")


if __name__ == "__main__":
    main()
