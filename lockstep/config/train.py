"""The optimizer, its schedule and the shape of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from lockstep.config.bounds import Above, AtLeast, AtMost, Below
from lockstep.config.rules import parse_rule
from lockstep.errors import UserError

Dtype = Literal["bfloat16", "float32"]
ModelDtype = Literal["auto", "bfloat16", "float32"]
Arithmetic = Literal["auto", "portable", "bf16_pairs", "bf16_tiles", "pytorch"]


@dataclass
class TrainConfig:
    """Optimizer, schedule and batch shape."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon`: Muon for the layers' matrices (each expert's separately), AdamW for embedding, head and norms."""
    learning_rate: Annotated[float, Above(0)] = 1e-3
    """Peak learning rate, of AdamW and Muon alike."""
    warmup_steps: Annotated[int, AtLeast(0)] = 10
    """Steps over which the learning rate rises linearly from zero."""
    schedule: Literal["constant", "linear", "cosine", "wsd", "csv"] = "cosine"
    """Shape of the learning rate after warm-up; `wsd` stays at the peak and then decays, `csv` is `schedule_file`."""
    decay_share: Annotated[float, Above(0), AtMost(1)] = 0.2
    """wsd: the share of all steps, at the end, over which the learning rate decays."""
    decay_shape: Literal["linear", "cosine", "sqrt"] = "linear"
    """wsd: shape of the decay; `sqrt` falls as 1 - √progress."""
    final_learning_rate_ratio: Annotated[float, AtLeast(0)] = 0.1
    """Final learning rate of linear, cosine and wsd, relative to the peak: what the step after the last would have."""
    schedule_file: str = ""
    """csv: lines of `step,learning_rate` under that header, steps from 1; interpolated, constant before and after."""
    beta1: Annotated[float, AtLeast(0), Below(1)] = 0.9
    """AdamW's decay of the first moment."""
    beta2: Annotated[float, AtLeast(0), Below(1)] = 0.95
    """AdamW's decay of the second moment."""
    epsilon: Annotated[float, AtLeast(0)] = 1e-8
    """AdamW's denominator offset."""
    muon_momentum: Annotated[float, AtLeast(0), Below(1)] = 0.95
    """Muon's decay of the momentum."""
    muon_dtype: Dtype = "bfloat16"
    """Dtype of Muon's orthogonalization iterations, which take several times as long in float32."""
    moments_dtype: Dtype = "float32"
    """Dtype of AdamW's moments and Muon's momentum; the master weights are always float32."""
    weight_decay: Annotated[float, AtLeast(0)] = 0.0
    """Decoupled weight decay of matrices; vectors are not decayed, unless by a rule."""
    rules: tuple[str, ...] = ()
    """`PATTERN key=value …` for parameters by name; keys: learning_rate (a factor), weight_decay, optimizer, frozen."""
    optimizer_in_backward: bool = False
    """Update each parameter when its gradient is complete, and free the gradient: no clipping, one micro-batch."""
    deterministic_layout: bool = False
    """Sum gradients in a fixed order, so that losses and weights have the same bits in every layout: any number of
    data-parallel ranks (at most two GPUs), and on CPUs tensor, context and pipeline ranks. Costs communication."""
    cuda_graphs: Literal["auto", "none"] = "auto"
    """CUDA graphs for the trainer. `auto`: on one GPU, sizes of micro-batch are recorded when they recur, padded by
    up to an eighth; mixtures of experts and latent attention are run directly."""
    keep_freed_memory: bool = True
    """On a CPU: keep freed memory in the process, for speed; off: return it to the system, for a lower peak."""
    router_auxiliary: Annotated[float, AtLeast(0)] = 0.0
    """Mixtures of experts: weight of the load-balancing loss, which uses the load of the previous step; 0.001 is
    common."""
    router_z: Annotated[float, AtLeast(0)] = 0.0
    """Mixtures of experts: weight of the loss that keeps the router's logits small; 0.001 is common."""
    router_bias_rate: Annotated[float, AtLeast(0)] = 0.0
    """Mixtures with a bias in the choice of experts (DeepSeek-V3): its change after each step; 0.001 is common."""
    max_grad_norm: Annotated[float, AtLeast(0)] = 1.0
    """Clip gradients to this global norm; 0: no clipping."""
    tokens_per_microbatch: Annotated[int, Above(0)] = 8192
    """Tokens per packed forward and backward pass; a step accumulates as many passes as it needs."""


def train_problems(train: TrainConfig) -> Iterator[str]:
    """A message for each combination that cannot work, and for each rule that cannot be parsed."""
    if (train.schedule == "csv") != bool(train.schedule_file):
        yield (
            f'train.schedule is "{train.schedule}" and train.schedule_file is "{train.schedule_file}"; '
            "csv needs a file, the other schedules take none"
        )
    if train.optimizer_in_backward:
        if train.deterministic_layout:
            yield "train.deterministic_layout sums gradients that train.optimizer_in_backward does not keep; use one"
        if train.max_grad_norm > 0:
            yield (
                "train.optimizer_in_backward updates before the norm of all gradients is known, so they cannot be "
                f"clipped to train.max_grad_norm {train.max_grad_norm}; set max_grad_norm = 0"
            )
        if train.optimizer == "muon" or any("optimizer=muon" in rule for rule in train.rules):
            yield "train.optimizer_in_backward works only with adamw: ranks gather Muon's matrices together"
    for rule in train.rules:
        try:
            parse_rule(rule)
        except UserError as error:
            yield str(error)
