"""Training at 110M parameters, bfloat16, against transformers on the same machine.

    step      our training step against a transformers model in a plain loop, 4 x 512 tokens
    run       a whole run on real text, `lockstep pretrain` against transformers' Trainer: importing the library,
              loading the model, tokenising, steps, saving
    ranks     two FSDP ranks of one thread each against one process of two threads
    overhead  the share of a run's step that is not forward, backward or optimizer

Ours keeps float32 master weights; the peers' AdamW works on the bfloat16 weights.
Run: python benchmarks/training.py [--work step]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROWS, LENGTH, VOCAB, STEPS = 4, 512, 32000, 3
RUN_STEPS, RUN_FILES = 20, 40


def tokens() -> list[list[int]]:
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


def rank_step(folder: str) -> Callable[[], object]:
    """One of two FSDP ranks, with half of the sequences."""
    import torch

    from lockstep.config import CompileConfig, ParallelConfig, TrainConfig
    from lockstep.model import load_weights, read_config
    from lockstep.parallel import open_world, parallel_model
    from lockstep.train import Trainer, pack
    from lockstep.train.pretrain import NextTokenLoss

    parallel = ParallelConfig()
    world = open_world(parallel, "cpu")
    fill = partial(load_weights, path=folder)
    model = parallel_model(read_config(Path(folder)), torch.bfloat16, world, parallel, CompileConfig(), fill)
    trainer = Trainer(model, TrainConfig(learning_rate=1e-4), 100, world)
    share = tokens()[world.data_rank :: world.data_size]
    return lambda: trainer.step([pack(share)], NextTokenLoss(ROWS * (LENGTH - 1)))


def median_seconds(step: Callable[[], object]) -> float:
    step()
    times = []
    for _ in range(STEPS):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2]


def lockstep_run(folder: str) -> float:
    began = time.perf_counter()
    from lockstep.config import DataConfig, PretrainConfig, TrainConfig
    from lockstep.train.pretrain import pretrain

    config = PretrainConfig(
        output=f"{folder}/run", model=folder, data=f"{folder}/text", steps=RUN_STEPS, tokens_per_step=ROWS * LENGTH,
        sequence_length=LENGTH, train=TrainConfig(learning_rate=1e-4), loader=DataConfig(separate_documents=False),
        overwrite=Path(f"{folder}/run").is_dir(),
    )  # fmt: skip
    pretrain(config)
    return time.perf_counter() - began


def transformers_run(folder: str) -> float:
    began = time.perf_counter()
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{folder}/tokenizer.json")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    arguments = TrainingArguments(
        output_dir=f"{folder}/peer", max_steps=RUN_STEPS, per_device_train_batch_size=ROWS, learning_rate=1e-4,
        use_cpu=True, report_to=[], save_strategy="steps", save_steps=RUN_STEPS, logging_steps=1, disable_tqdm=True,
    )  # fmt: skip
    texts = Dataset.from_dict({"text": [p.read_text() for p in sorted(Path(f"{folder}/text").iterdir())]})

    def rows(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        ids = [i for text in tokenizer(batch["text"])["input_ids"] for i in text]
        cut = [ids[i : i + LENGTH] for i in range(0, len(ids) - LENGTH + 1, LENGTH)]
        return {"input_ids": cut, "labels": cut}

    data = texts.map(rows, batched=True, remove_columns=["text"])
    Trainer(model=model, args=arguments, train_dataset=data).train()
    return time.perf_counter() - began


SIDES: dict[tuple[str, str], Callable[[str], float]] = {
    ("step", "lockstep"): lambda folder: median_seconds(lockstep_step(folder)),
    ("step", "transformers"): lambda folder: median_seconds(transformers_step(folder)),
    ("run", "lockstep"): lockstep_run,
    ("run", "transformers"): transformers_run,
    ("ranks", "one"): lambda folder: median_seconds(lockstep_step(folder)),
    ("ranks", "two"): lambda folder: median_seconds(rank_step(folder)),
}


def prepare(folder: str) -> None:
    """The model, and text with a tokenizer of its own, that all sides read."""
    from lockstep import build_model, save_model
    from lockstep.data import train_bpe
    from lockstep.model import preset

    save_model(build_model(preset("qwen3:small", VOCAB), dtype="bfloat16"), folder)
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = {p.name: p.read_text() for p in sorted(library.glob("*.py"))[:RUN_FILES]}
    (Path(folder) / "text").mkdir()
    for name, text in texts.items():
        (Path(folder) / "text" / f"{name}.txt").write_text(text)
    train_bpe(texts.values(), 8192).save(Path(folder))


def step_work(folder: str) -> None:
    from ceilings import measure
    from peers import compare

    from lockstep.model import preset

    work = f"training step: 110M Qwen3, bfloat16, {ROWS} x {LENGTH} tokens"
    arguments = ["--work", "step", "--folder", folder]
    seconds = compare(__file__, arguments, work, ROWS * LENGTH, "tokens/s", "transformers")
    products = measure().products
    used = 6 * preset("qwen3:small", VOCAB).num_parameters * ROWS * LENGTH / seconds
    print(f"  {used / 1e9:.0f} GF/s: {used / products:.0%} of the {products / 1e9:.0f} GF/s of a matrix product")


def run_work(folder: str) -> None:
    from peers import compare

    work = f"a run of {RUN_STEPS} steps on the standard library's text"
    units = RUN_STEPS * ROWS * LENGTH
    compare(__file__, ["--work", "run", "--folder", folder], work, units, "tokens/s", "transformers", rounds=2)


def ranks_work(folder: str) -> None:
    arguments = [__file__, "--work", "ranks", "--folder", folder]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    commands = {"one": [sys.executable, *arguments, "--side", "one"], "two": [*torchrun, *arguments, "--side", "two"]}
    best: dict[str, float] = {}
    for _ in range(2):
        for side, command in commands.items():
            environment = os.environ | ({"OMP_NUM_THREADS": "1"} if side == "two" else {})
            printed = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
            seconds = json.loads(next(line for line in printed.splitlines() if line.startswith("{")))["seconds"]
            best[side] = min(seconds, best.get(side, seconds))
    print(f"one process of 2 threads {best['one']:.2f} s a step, 2 FSDP ranks of 1 thread {best['two']:.2f} s")
    print(f"  speed of the ranks    {best['one'] / best['two']:7.2f} of the one process")


def overhead_work(folder: str) -> None:
    from lockstep.observe import read_metrics

    lockstep_run(folder)
    lines = read_metrics(Path(folder) / "run" / "metrics.jsonl")[1:]
    # From one step's line to the next: all that the loop does, checkpoints aside, for there is one at the end only.
    whole = lines[-1]["time"] - lines[0]["time"]
    inside = sum(m[f"time/{phase}"] for m in lines[1:] for phase in ("forward", "backward", "optimizer"))
    share = 1 - inside / whole
    milliseconds = (whole - inside) / (len(lines) - 1) * 1e3
    print(f"outside of forward, backward and optimizer: {milliseconds:.1f} ms, {share:.2%} of a step")


WORKS = {"step": step_work, "run": run_work, "ranks": ranks_work, "overhead": overhead_work}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=WORKS, default="")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps({"seconds": SIDES[options.work, options.side](options.folder)}))
        return
    with tempfile.TemporaryDirectory() as folder:
        prepare(folder)
        for name, work in WORKS.items():
            if options.work in ("", name):
                work(folder)


if __name__ == "__main__":
    main()
