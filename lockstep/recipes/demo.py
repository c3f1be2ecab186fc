"""The main job in a few minutes: pretrain from scratch, reinforce, and show that both sides agree."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from lockstep.config import DataConfig, PretrainConfig, TrainConfig
from lockstep.observe import Progress, write_report
from lockstep.recipes import digit_sum
from lockstep.rl.controller import reinforce
from lockstep.rl.environments.digit_sum import pretraining_text
from lockstep.train.pretrain import pretrain

PRETRAIN_SHARE = 0.6
"""Of the demo's time, for the progress bar."""


@dataclass
class DemoConfig:
    """Pretrain a small model from scratch, then improve it with GRPO on sums of digits."""

    output: str = "run"
    """Folder of the reinforcement run; pretraining writes OUTPUT-pretrain."""
    seed: int = 0
    """Fixes initial weights, data and draws."""
    device: str = ""
    """`cpu`, `cuda` or `cuda:1` …; empty: the machine's accelerator where it has one."""
    overwrite: bool = True
    """Replace an earlier demo in `output`."""


def run_demo(config: DemoConfig) -> Path:
    """Runs both stages and returns the run's folder, whose summary.json holds the times of both."""
    first = PretrainConfig(
        output=f"{config.output}-pretrain",
        model="qwen3:micro",
        steps=1000,
        tokens_per_step=4096,
        # Seven documents a row, none of them cut.
        sequence_length=512,
        loader=DataConfig(packing="whole"),
        dtype="float32",
        seed=config.seed,
        device=config.device,
        train=TrainConfig(learning_rate=3e-3, warmup_steps=30),
        overwrite=config.overwrite and Path(f"{config.output}-pretrain").is_dir(),
    )
    second = digit_sum()
    second.output, second.seed, second.device = config.output, config.seed, config.device
    second.overwrite = config.overwrite and Path(config.output).is_dir()
    with Progress("demo", 1.0) as bar:
        documents = list(pretraining_text(40_000, error_rate=0.45, seed=config.seed))
        folder = pretrain(first, documents, bar.stage("1/2 pretrain", first.steps, PRETRAIN_SHARE))
        second.model = str(folder / "checkpoints" / f"step_{first.steps:08}")
        run = reinforce(second, bar.stage("2/2 reinforce", second.steps, 1 - PRETRAIN_SHARE))
    summary = json.loads((run / "summary.json").read_text())
    pretraining = json.loads((folder / "summary.json").read_text())
    summary["seconds"] = pretraining["seconds"] | summary["seconds"]
    (run / "summary.json").write_text(json.dumps(summary, indent=1))
    write_report(run, "Lockstep demo: sums of digits")
    return run
