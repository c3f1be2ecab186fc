"""The whole workflow in a few minutes: pretrain from scratch, reinforce, and show that trainer and generator agree."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from lockstep.config import DataConfig, PretrainConfig, TrainConfig
from lockstep.recipes import digit_sum
from lockstep.rl.environments.digit_sum import pretraining_text

PRETRAIN_SHARE = 0.6
"""Share of the demo's time, for the progress bar."""
PRETRAIN_STEPS = 600
LINES, ERROR_RATE = 65_000, 0.5
"""Of the pretraining text; each line is seen about once."""

INTRODUCTION = (
    "A model of 1M parameters learned to continue sums such as 3+5+2=10 from a careless text: half of its lines repeat "
    "the last digit instead. Then GRPO sampled answers, rewarded the right ones, and moved the model towards them. "
    "Every fifth sum was held out from both stages: those are what the model is judged by."
)


@dataclass
class DemoConfig:
    """Pretrain a small model from scratch, then improve it with GRPO on sums of digits."""

    output: str = "run"
    """Folder of the reinforcement run; pretraining writes OUTPUT-pretrain."""
    seed: int = 0
    """Seed of initial weights, data and draws."""
    device: str = ""
    """`cpu`, `cuda` or `cuda:1` …; empty: the machine's accelerator if it has one."""
    overwrite: bool = True
    """Replace an earlier demo in `output`."""


def demo_pretraining(output: str, seed: int, device: str = "") -> PretrainConfig:
    """Pretraining for reinforcement on sums of digits; the text is `pretraining_text`."""
    return PretrainConfig(
        output=output,
        model="qwen3:micro",
        steps=PRETRAIN_STEPS,
        tokens_per_step=1024,
        sequence_length=512,
        loader=DataConfig(packing="whole"),
        dtype="float32",
        seed=seed,
        device=device,
        # Muon learns the sums in a quarter of the tokens that AdamW needs. Many small steps are better than few large
        # ones, and micro-batches of 1024 tokens fit a core's cache and need little memory.
        train=TrainConfig(
            optimizer="muon",
            muon_dtype="float32",
            learning_rate=8e-3,
            warmup_steps=20,
            tokens_per_microbatch=1024,
        ),
    )


def run_demo(config: DemoConfig) -> Path:
    """Runs both stages and returns the run's folder, whose summary.json has the times and tokens of both."""
    # Imported here, so that `lockstep demo --help` does not import PyTorch.
    from lockstep.observe import read_metrics, write_report
    from lockstep.progress import Progress
    from lockstep.rl.reinforce import reinforce
    from lockstep.train.pretrain import pretrain

    first = demo_pretraining(f"{config.output}-pretrain", config.seed, config.device)
    first.overwrite = config.overwrite and Path(first.output).is_dir()
    second = digit_sum()
    second.output, second.seed, second.device = config.output, config.seed, config.device
    second.overwrite = config.overwrite and Path(config.output).is_dir()
    with Progress("demo", 1.0) as bar:
        documents = list(pretraining_text(LINES, ERROR_RATE, config.seed))
        folder = pretrain(first, documents, bar.stage("1/2 pretrain", first.steps, PRETRAIN_SHARE))
        second.model = str(folder / "checkpoints" / f"step_{first.steps:08}")
        run = reinforce(second, progress=bar.stage("2/2 reinforce", second.steps, 1 - PRETRAIN_SHARE))
    summary = json.loads((run / "summary.json").read_text())
    pretraining = json.loads((folder / "summary.json").read_text())
    summary["seconds"] = pretraining["seconds"] | summary["seconds"]
    summary["tokens"] = {"pretrained": sum(m["tokens"] for m in read_metrics(folder / "metrics.jsonl"))} | summary[
        "tokens"
    ]
    (run / "summary.json").write_text(json.dumps(summary, indent=1))
    write_report(run, "Lockstep demo: sums of digits", INTRODUCTION, folder)
    return run
