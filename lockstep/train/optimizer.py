"""AdamW over float32 master weights, under a forward pass in bfloat16 or float32."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lockstep.config import TrainConfig
from lockstep.model.shard import local_part
from lockstep.train.gradient_norm import gradient_norm


class MasterAdamW:
    """Owns the float32 master weights, their gradients and AdamW's moments (arXiv 1711.05101).

    A parameter's gradient is added to its float32 sum as soon as backward has made it, so micro-batches
    accumulate exactly and a bfloat16 gradient lives only for a moment. float32 parameters are their own masters.
    """

    def __init__(self, model: nn.Module, config: TrainConfig):
        self.config = config
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.masters = {n: _master(p) for n, p in self.parameters.items()}
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter:
                parameter.register_post_accumulate_grad_hook(_accumulate_into(self.masters[name]))
        decayed = [m for m in self.masters.values() if m.ndim >= 2]
        others = [m for m in self.masters.values() if m.ndim < 2]
        self.adamw = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            fused=True,
        )

    def gradient_norm(self) -> Tensor:
        """Of all gradients together, before clipping; the same on every rank."""
        return gradient_norm(self._grads())

    def update(self, learning_rate: float, grad_norm: Tensor) -> None:
        """Clips by `grad_norm`, updates masters and model, clears the gradients."""
        if self.config.max_grad_norm > 0:
            scale = (self.config.max_grad_norm / (grad_norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_([local_part(g)[0] for g in self._grads()], scale)
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        self.adamw.step()
        self.write_model()
        self.discard()

    def discard(self) -> None:
        """Clears the gradients: alone, it skips a step, and weights and moments keep their bits."""
        # Zeroed, not freed: fresh memory costs a page fault every 4 KiB at the next step.
        self.adamw.zero_grad(set_to_none=False)

    def _grads(self) -> list[Tensor]:
        return [m.grad for m in self.masters.values() if m.grad is not None]

    @torch.no_grad()
    def write_model(self) -> None:
        """Rounds the masters into the model's own weights, in place: whoever reads those sees the new ones."""
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter:
                parameter.copy_(self.masters[name])

    def state_tensors(self) -> dict[str, Tensor]:
        """Masters and moments by name, for a checkpoint."""
        tensors = {f"master.{n}": m.detach() for n, m in self.masters.items()}
        for name, master in self.masters.items():
            for key, value in self.adamw.state.get(master, {}).items():
                tensors[f"{key}.{name}"] = value
        return tensors

    @torch.no_grad()
    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `state_tensors`; also writes the model. Raises KeyError for a missing tensor."""
        for name, master in self.masters.items():
            master.copy_(tensors[f"master.{name}"])
            keys = ("step", "exp_avg", "exp_avg_sq")
            if f"step.{name}" in tensors:
                self.adamw.state[master] = {k: tensors[f"{k}.{name}"].to(master.device, copy=True) for k in keys}
        self.write_model()


def learning_rate_at(step: int, total_steps: int, config: TrainConfig) -> float:
    """The learning rate of step `step` (from 0): linear warm-up, then constant, linear or cosine decay."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    final = config.final_learning_rate_ratio
    remaining = {
        "constant": 1.0,
        "linear": 1.0 - (1.0 - final) * progress,
        "cosine": final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[config.schedule]
    return config.learning_rate * remaining


def _master(parameter: nn.Parameter) -> Tensor:
    if parameter.dtype == torch.float32:
        return parameter
    return parameter.detach().float().requires_grad_()


def _accumulate_into(master: Tensor):  # type: ignore[no-untyped-def]
    @torch.no_grad()
    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return hook
