"""Options as other trainers and engines call them, answered with the name that they have here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from lockstep.errors import UserError

HERE = {
    "lr": ("train.learning-rate",),
    "learning-rate": ("train.learning-rate",),
    "weight-decay": ("train.weight-decay",),
    "warmup-steps": ("train.warmup-steps",),
    "warmup-ratio": ("train.warmup-steps",),
    "lr-scheduler-type": ("train.schedule",),
    "optim": ("train.optimizer",),
    "optimizer": ("train.optimizer",),
    "max-grad-norm": ("train.max-grad-norm",),
    "grad-clip": ("train.max-grad-norm",),
    "batch-size": ("tokens-per-step", "prompts-per-step"),
    "global-batch-size": ("tokens-per-step", "prompts-per-step"),
    "per-device-train-batch-size": ("train.tokens-per-microbatch",),
    "micro-batch-size": ("train.tokens-per-microbatch",),
    "gradient-accumulation-steps": ("train.tokens-per-microbatch",),
    "gradient-checkpointing": ("recompute.mode full",),
    "activation-checkpointing": ("recompute.mode full",),
    "seq-len": ("sequence-length", "max-new-tokens"),
    "max-seq-len": ("sequence-length",),
    "max-seq-length": ("sequence-length",),
    "max-length": ("sequence-length", "max-new-tokens", "max-tokens"),
    "max-completion-length": ("max-new-tokens", "max-tokens"),
    "max-new-tokens": ("max-tokens",),
    "max-tokens": ("max-new-tokens",),
    "num-generations": ("samples-per-prompt", "n"),
    "group-size": ("samples-per-prompt",),
    "num-samples": ("n", "samples-per-prompt"),
    "beta": ("kl-coefficient",),
    "kl-coef": ("kl-coefficient",),
    "epsilon": ("clip-low", "train.epsilon"),
    "max-steps": ("steps",),
    "num-steps": ("steps",),
    "num-train-epochs": ("epochs", "steps"),
    "epochs": ("steps",),
    "model-name-or-path": ("model",),
    "model-name": ("model",),
    "model-path": ("model",),
    "tokenizer-name": ("tokenizer",),
    "dataset": ("data",),
    "dataset-name": ("data",),
    "train-file": ("data",),
    "output-dir": ("output",),
    "out": ("output",),
    "save-steps": ("checkpoint.every",),
    "eval-steps": ("validation-every",),
    "resume-from-checkpoint": ("resume",),
    "bf16": ("dtype bfloat16",),
    "fp16": ("dtype bfloat16",),
    "fp32": ("dtype float32",),
    "tp": ("parallel.tensor",),
    "tp-size": ("parallel.tensor",),
    "tensor-parallel-size": ("parallel.tensor",),
    "pp": ("parallel.pipeline",),
    "pipeline-parallel-size": ("parallel.pipeline",),
    "cp": ("parallel.context",),
    "dp": ("parallel.data-shard",),
    "fsdp": ("parallel.data-shard",),
    "max-num-seqs": ("engine.max-sequences",),
    "max-num-batched-tokens": ("engine.max-tokens-per-step",),
    "max-model-len": ("engine.cache-tokens",),
    "gpu-memory-utilization": ("engine.cache-tokens",),
    "served-model-name": ("model-name",),
    "num-iterations": ("inner-steps",),
    "scale-rewards": ("normalize-advantages",),
    "reward-funcs": ("environment",),
    "loss-type": ("loss-average",),
    "num-workers": ("loader.workers",),
    "tensor-parallel-degree": ("parallel.tensor",),
    "context-parallel-degree": ("parallel.context",),
    "pipeline-parallel-degree": ("parallel.pipeline",),
    "gradient-clipping": ("train.max-grad-norm",),
    "activation-checkpoint.mode": ("recompute.mode",),
    "report-to": ("observe.tensorboard", "observe.wandb"),
}
"""The name elsewhere, and those here; the ones that a command has are told."""
PREFIXES = ("train", "training", "optimizer", "parallel", "parallelism", "model", "dataset", "checkpoint")
"""Groups of settings elsewhere: what stands behind the point is looked up without them too."""
COMMANDS_ELSEWHERE = {
    "evaluate": "eval",
    "lm-eval": "eval",
    "sample": "generate",
    "grpo": "rl",
    "ppo": "rl",
    "train": "pretrain",
    "finetune": "sft",
    "fine-tune": "sft",
    "export": "convert",
    "tokenize": "data tokenize",
    "plan": "pretrain --dry-run RANKS",
    "env": "doctor",
    "version": "--version",
    "help": "--help",
}


def refuse_other_names(kind: type, arguments: list[str]) -> None:
    """Raises UserError for an option that `kind`'s command does not have, but has by another name."""
    own = set(_options(kind))
    for argument in arguments:
        name = argument.removeprefix("--").partition("=")[0].replace("_", "-")
        if not argument.startswith("--") or name in own:
            continue
        prefix, _, rest = name.partition(".")
        known = HERE.get(name) or (HERE.get(rest, (rest,)) if prefix in PREFIXES and rest else ())
        found = [other for other in known if other.partition(" ")[0] in own]
        if found:
            raise UserError(f"there is no --{name}; write " + " or ".join(f"--{other}" for other in found))


def _options(kind: Any, prefix: str = "") -> Iterator[str]:
    """The names of all settings on the command line, nested ones too."""
    for field in dataclasses.fields(kind):
        name = prefix + field.name.replace("_", "-")
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        if dataclasses.is_dataclass(default):
            yield from _options(type(default), f"{name}.")
        else:
            yield name
