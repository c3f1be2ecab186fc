"""Training at 110M parameters against transformers on the same machine.

    step      our training step against a transformers model in a plain loop, 4 x 512 tokens
    run       a whole run on real text, `lockstep pretrain` against transformers' Trainer: importing the library,
              loading the model, tokenizing, steps, saving
    ranks     two FSDP ranks of one thread each against one process of two threads
    overhead  the share of a run's step that is not forward, backward or optimizer

In bfloat16 ours keeps float32 master weights; the peers' AdamW works on the bfloat16 weights.
Run: python benchmarks/training.py [--work step] [--dtype float32] [--rows 4] [--model qwen3:small|hybrid]
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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.model import ModelConfig

LENGTH, VOCAB, STEPS = 512, 32000, 3
RUN_STEPS, RUN_FILES = 20, 40


@dataclass(frozen=True)
class Work:
    """What every side is given: a folder with the model and the text, and how it trains."""

    folder: str
    dtype: str
    rows: int
    model: str

    def arguments(self) -> list[str]:
        return ["--folder", self.folder, "--dtype", self.dtype, "--rows", str(self.rows), "--model", self.model]


def shape_of(model: str) -> ModelConfig:
    """The shape of a preset; `hybrid`: of 110M parameters, three of four layers with linear attention."""
    from lockstep.model import preset
    from lockstep.model.config import DeltaNet

    if model != "hybrid":
        return preset(model, VOCAB)
    return replace(
        preset("qwen3_5:small", VOCAB), dim=768, num_layers=12, num_heads=6, num_kv_heads=2, head_dim=128,
        rotated_features=32, intermediate_size=2048, delta=DeltaNet(6, 6, 128, 128),
    )  # fmt: skip


def tokens(rows: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(VOCAB) for _ in range(LENGTH)] for _ in range(rows)]


def lockstep_step(work: Work) -> Callable[[], object]:
    from lockstep import load_model
    from lockstep.config import TrainConfig
    from lockstep.train import Trainer, pack
    from lockstep.train.objective import NextTokenLoss

    trainer = Trainer(load_model(work.folder), TrainConfig(learning_rate=1e-4), 100)
    return lambda: trainer.step([pack(tokens(work.rows))], NextTokenLoss(work.rows * (LENGTH - 1)))


def transformers_step(work: Work) -> Callable[[], object]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(work.folder, dtype=getattr(torch, work.dtype)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    row = torch.tensor(tokens(work.rows))

    def step() -> None:
        model(input_ids=row, labels=row).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def rank_step(work: Work) -> Callable[[], object]:
    """One of two FSDP ranks, with half of the sequences."""
    import torch

    from lockstep.config import CompileConfig, ParallelConfig, TrainConfig
    from lockstep.model import load_weights, read_config
    from lockstep.parallel import open_world, parallel_model
    from lockstep.train import Trainer, pack
    from lockstep.train.objective import NextTokenLoss

    parallel = ParallelConfig()
    world = open_world(parallel, "cpu")
    fill = partial(load_weights, path=work.folder)
    dtype = getattr(torch, work.dtype)
    model = parallel_model(read_config(Path(work.folder)), dtype, world, parallel, CompileConfig(), fill)
    trainer = Trainer(model, TrainConfig(learning_rate=1e-4), 100, world)
    share = tokens(work.rows)[world.data_rank :: world.data_size]
    return lambda: trainer.step([pack(share)], NextTokenLoss(work.rows * (LENGTH - 1)))


def median_seconds(step: Callable[[], object]) -> float:
    step()
    times = []
    for _ in range(STEPS):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2]


def lockstep_run(work: Work) -> float:
    began = time.perf_counter()
    from lockstep.config import DataConfig, PretrainConfig, TrainConfig
    from lockstep.train.pretrain import pretrain

    config = PretrainConfig(
        output=f"{work.folder}/run", model=work.folder, data=f"{work.folder}/text", steps=RUN_STEPS,
        tokens_per_step=work.rows * LENGTH,
        sequence_length=LENGTH, train=TrainConfig(learning_rate=1e-4), loader=DataConfig(separate_documents=False),
        overwrite=Path(f"{work.folder}/run").is_dir(),
    )  # fmt: skip
    pretrain(config)
    return time.perf_counter() - began


def transformers_run(work: Work) -> float:
    began = time.perf_counter()
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{work.folder}/tokenizer.json")
    model = AutoModelForCausalLM.from_pretrained(work.folder, dtype=getattr(torch, work.dtype))
    arguments = TrainingArguments(
        output_dir=f"{work.folder}/peer", max_steps=RUN_STEPS, per_device_train_batch_size=work.rows,
        learning_rate=1e-4, use_cpu=True, report_to=[], save_strategy="steps", save_steps=RUN_STEPS, logging_steps=1,
        disable_tqdm=True,
    )  # fmt: skip
    texts = Dataset.from_dict({"text": [p.read_text() for p in sorted(Path(f"{work.folder}/text").iterdir())]})

    def rows(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        ids = [i for text in tokenizer(batch["text"])["input_ids"] for i in text]
        cut = [ids[i : i + LENGTH] for i in range(0, len(ids) - LENGTH + 1, LENGTH)]
        return {"input_ids": cut, "labels": cut}

    data = texts.map(rows, batched=True, remove_columns=["text"])
    Trainer(model=model, args=arguments, train_dataset=data).train()
    return time.perf_counter() - began


SIDES: dict[tuple[str, str], Callable[[Work], float]] = {
    ("step", "lockstep"): lambda work: median_seconds(lockstep_step(work)),
    ("step", "transformers"): lambda work: median_seconds(transformers_step(work)),
    ("run", "lockstep"): lockstep_run,
    ("run", "transformers"): transformers_run,
    ("ranks", "one"): lambda work: median_seconds(lockstep_step(work)),
    ("ranks", "two"): lambda work: median_seconds(rank_step(work)),
}


def prepare(work: Work) -> None:
    """The model, and text with a tokenizer of its own, that all sides read."""
    from lockstep import build_model, save_model
    from lockstep.data import train_bpe

    save_model(build_model(shape_of(work.model), dtype=work.dtype), work.folder)
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = {p.name: p.read_text() for p in sorted(library.glob("*.py"))[:RUN_FILES]}
    (Path(work.folder) / "text").mkdir()
    for name, text in texts.items():
        (Path(work.folder) / "text" / f"{name}.txt").write_text(text)
    train_bpe(texts.values(), 8192).save(Path(work.folder))


def step_work(work: Work) -> None:
    import torch
    from ceilings import measure
    from peers import compare

    name = f"training step: {work.model}, {work.dtype}, {work.rows} x {LENGTH} tokens"
    units = work.rows * LENGTH
    seconds = compare(__file__, ["--work", "step", *work.arguments()], name, units, "tokens/s", "transformers")
    products = measure(getattr(torch, work.dtype)).products
    used = 6 * shape_of(work.model).num_parameters * units / seconds
    print(f"  {used / 1e9:.0f} GF/s: {used / products:.0%} of the {products / 1e9:.0f} GF/s of a matrix product")


def run_work(work: Work) -> None:
    from peers import compare

    name = f"a run of {RUN_STEPS} steps on the standard library's text, {work.dtype}"
    units = RUN_STEPS * work.rows * LENGTH
    compare(__file__, ["--work", "run", *work.arguments()], name, units, "tokens/s", "transformers", rounds=2)


def ranks_work(work: Work) -> None:
    arguments = [__file__, "--work", "ranks", *work.arguments()]
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


def overhead_work(work: Work) -> None:
    from lockstep.observe import read_metrics

    lockstep_run(work)
    lines = read_metrics(Path(work.folder) / "run" / "metrics.jsonl")[1:]
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
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rows", type=int, default=4, help=f"sequences of {LENGTH} tokens a step")
    parser.add_argument("--model", default="qwen3:small", help="a size by name")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        work = Work(options.folder, options.dtype, options.rows, options.model)
        print(json.dumps({"seconds": SIDES[options.work, options.side](work)}))
        return
    with tempfile.TemporaryDirectory() as folder:
        work = Work(folder, options.dtype, options.rows, options.model)
        prepare(work)
        for name, measure_work in WORKS.items():
            if options.work in ("", name):
                measure_work(work)


if __name__ == "__main__":
    main()
