"""How long a training step waits for its checkpoint: written in the background, and written at once.

    python benchmarks/checkpoint.py [--model qwen3:small] [--folder FOLDER] [--rows 4]

Prints seconds of a step, of each save as the step sees it, and of steps while a save is being written.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from lockstep import build_model
from lockstep.checkpoint.checkpoints import Checkpoints
from lockstep.config import CheckpointConfig, PretrainConfig, TrainConfig
from lockstep.data import ByteTokenizer
from lockstep.model import preset
from lockstep.train import Trainer, pack
from lockstep.train.objective import NextTokenLoss

LENGTH = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3:small")
    parser.add_argument("--folder", default=None, help="on the disk to measure; default: the system's temporary one")
    parser.add_argument("--rows", type=int, default=4, help=f"of {LENGTH} tokens in a step")
    options = parser.parse_args()
    shape = preset(options.model)
    trainer = Trainer(build_model(shape, dtype="bfloat16"), TrainConfig(), 1000)
    rows = torch.randint(shape.vocab_size, (options.rows, LENGTH), generator=torch.Generator().manual_seed(0)).tolist()
    loss = NextTokenLoss(options.rows * (LENGTH - 1))

    def step() -> float:
        began = time.perf_counter()
        trainer.step([pack(rows)], loss)
        return time.perf_counter() - began

    step()
    alone = statistics.median(step() for _ in range(3))
    print(f"{shape.num_parameters / 1e6:.0f}M parameters, {torch.get_num_threads()} threads; a step {alone:.2f} s")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for asynchronous in (True, False):
            settings = CheckpointConfig(asynchronous=asynchronous)
            config = PretrainConfig(dtype="bfloat16", checkpoint=settings, steps=1000)
            with Checkpoints(Path(folder) / str(asynchronous), trainer, ByteTokenizer(), config) as checkpoints:
                for attempt in ("first", "second", "third"):
                    began = time.perf_counter()
                    checkpoints.save(trainer.updates, {})
                    waited = time.perf_counter() - began
                    beside = step()
                    checkpoints.wait()
                    whole = time.perf_counter() - began
                    kind = "background" if asynchronous else "at once   "
                    print(
                        f"{kind} {attempt}: waited {waited:.2f} s; next step {beside:.2f} s; on disk after {whole:.2f}"
                    )
            size = sum(f.stat().st_size for f in Path(folder).rglob("*.safetensors")) / len(
                list(Path(folder).rglob("step_*"))
            )
            print(f"{size / 1e9:.2f} GB a checkpoint")


if __name__ == "__main__":
    main()
