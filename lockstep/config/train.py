"""The optimizer, its schedule and the shape of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from lockstep.config.bounds import Above, AtLeast, AtMost, Below

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
    """Decoupled weight decay of matrices; vectors are never decayed unless a rule says so."""
    rules: tuple[str, ...] = ()
    """`PATTERN key=value …` for parameters by name; keys: learning_rate (a factor), weight_decay, optimizer, frozen."""
    optimizer_in_backward: bool = False
    """Update each parameter when its gradient is complete, and free the gradient: no clipping, one micro-batch."""
    deterministic_layout: bool = False
    """Sum gradients in a fixed order, so that losses and weights have the same bits in every layout: any number of
    data-parallel ranks (at most two GPUs), and on CPUs tensor, context and pipeline ranks. Costs communication."""
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
