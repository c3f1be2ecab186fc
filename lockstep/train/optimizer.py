"""Float32 master weights under a forward pass in bfloat16 or float32, and the step that updates them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.config import TrainConfig
from lockstep.errors import UserError
from lockstep.model import Decoder, resolve_dtype
from lockstep.model.shard import local_values
from lockstep.train.adamw import State, adamw_state, adamw_update
from lockstep.train.gradient_norm import gradient_norms, local_squares, norms_of_squares
from lockstep.train.muon import muon_state, muon_update
from lockstep.train.parameter_groups import Settings, settings_of


class MasterOptimizer:
    """Owns the float32 master weights, their gradients and what AdamW and Muon keep of each.

    A parameter's gradient is added to its float32 sum as soon as backward has made it, so micro-batches
    accumulate exactly and a bfloat16 gradient lives only for a moment. float32 parameters are their own masters.

    With `optimizer_in_backward` the parameter is updated there and then, and nothing is left for `update`; the part of
    a gradient that a rank holds changes nothing where it is not finite.
    """

    def __init__(self, model: Decoder, config: TrainConfig):
        self.config = config
        whole = Decoder(model.config, torch.float32, "meta")  # a rank may hold some of the layers only
        settings = settings_of({n: p.shape for n, p in whole.named_parameters()}, config)
        self.parameters: dict[str, nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not settings[name].frozen)
            if not settings[name].frozen:
                self.parameters[name] = parameter
        self.settings = {name: settings[name] for name in self.parameters}
        self.masters = {n: _master(p) for n, p in self.parameters.items()}
        kinds = {"adamw": adamw_state, "muon": muon_state}
        dtype = resolve_dtype(config.moments_dtype)
        self.state: dict[str, State] = {
            n: kinds[self.settings[n].optimizer](m.detach(), dtype) for n, m in self.masters.items()
        }
        self._learning_rate = 0.0
        self._squares: dict[str, Tensor] = {}
        self._summed: set[str] = set()
        """Masters apart from their parameter whose gradient is of this step: the others' is an old one's memory."""
        for name, parameter in self.parameters.items():
            if config.optimizer_in_backward:
                parameter.register_post_accumulate_grad_hook(partial(self._update_now, name))
            elif self.masters[name] is not parameter:
                parameter.register_post_accumulate_grad_hook(partial(self._accumulate, name))

    def begin(self, learning_rate: float, microbatches: int) -> None:
        """Before a step's first backward. Raises UserError where its settings do not go with so many micro-batches."""
        if self.config.optimizer_in_backward and microbatches > 1:
            raise UserError(
                f"train.optimizer_in_backward updates with every micro-batch, but a step has {microbatches} of them; "
                "raise train.tokens_per_microbatch until it has one, or switch it off"
            )
        self._learning_rate = learning_rate

    def gradient_norms(self, stage_groups: Iterable[dist.ProcessGroup] = ()) -> dict[str, float]:
        """`grad_norm`, and `grad_norm/<part>` of each part of the model, before clipping; the same on every rank.

        stage_groups: process groups whose ranks hold different parameters, as the stages of a pipeline do.
        """
        if self.config.optimizer_in_backward:
            return norms_of_squares(self._squares, self.masters, stage_groups)
        return gradient_norms(self._grads(), stage_groups)

    def update(self, learning_rate: float, grad_norm: float) -> None:
        """Clips the gradients, whose norm is `grad_norm`, updates masters and model, clears the gradients."""
        grads = self._grads()
        if 0 < self.config.max_grad_norm < grad_norm:
            scale = self.config.max_grad_norm / (grad_norm + 1e-6)
            torch._foreach_mul_([local_values(g) for g in grads.values()], scale)
        together: dict[Settings, dict[str, Tensor]] = defaultdict(dict)
        for name, grad in grads.items():
            together[self.settings[name]][name] = grad
        for settings, members in together.items():
            self._update(settings, members, learning_rate)
        self.discard()

    def discard(self) -> None:
        """Clears the gradients: alone, it skips a step, and weights and moments keep their bits."""
        self._squares.clear()
        # Sums of masters apart from their parameters are written over by the next step, other gradients freed.
        self._summed.clear()
        for parameter in self.parameters.values():
            parameter.grad = None

    def _grads(self) -> dict[str, Tensor]:
        return {
            n: m.grad
            for n, m in self.masters.items()
            if m.grad is not None and (n in self._summed or m is self.parameters[n])
        }

    @torch.no_grad()
    def _accumulate(self, name: str, parameter: Tensor) -> None:
        grad, parameter.grad = parameter.grad, None
        master = self.masters[name]
        assert grad is not None
        if master.grad is None:
            master.grad = grad.float()
        elif name in self._summed:
            master.grad.add_(grad)
        else:
            master.grad.copy_(grad)
        self._summed.add(name)

    @torch.no_grad()
    def _update_now(self, name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        grad, parameter.grad = parameter.grad.float(), None
        self._squares |= local_squares({name: grad})
        self._update(self.settings[name], {name: grad}, self._learning_rate, ~self._squares[name].isfinite())

    def _update(
        self, settings: Settings, grads: dict[str, Tensor], learning_rate: float, skip: Tensor | None = None
    ) -> None:
        masters = [self.masters[name] for name in grads]
        states = [self.state[name] for name in grads]
        learning_rate *= settings.learning_rate
        if settings.optimizer == "muon":
            muon_update(masters, list(grads.values()), states, learning_rate, settings.weight_decay, self.config)
        else:
            adamw_update(masters, list(grads.values()), states, learning_rate, settings.weight_decay, self.config, skip)
        self._write_model(grads)

    @torch.no_grad()
    def _write_model(self, names: Iterable[str]) -> None:
        """Rounds masters into the model's own weights, in place: whoever reads those sees the new ones."""
        for name in names:
            if self.masters[name] is not self.parameters[name]:
                self.parameters[name].copy_(self.masters[name])

    def state_tensors(self) -> dict[str, Tensor]:
        """Masters, moments and momenta by name, for a checkpoint: the very tensors, sharded as the model is."""
        tensors = {f"master.{name}": master.detach() for name, master in self.masters.items()}
        for name, state in self.state.items():
            tensors |= {f"{key}.{name}": value for key, value in state.items()}
        return tensors

    @torch.no_grad()
    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `state_tensors`; also writes the model. Raises UserError for a missing tensor."""
        own = self.state_tensors()
        if missing := sorted(own.keys() - tensors.keys()):
            raise UserError(
                f"the checkpoint lacks {len(missing)} of the optimizer's tensors, such as {missing[0]}; "
                "train.optimizer and train.rules must be those that it was made with"
            )
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
        self._write_model(self.parameters)


def _master(parameter: nn.Parameter) -> Tensor:
    if parameter.dtype == torch.float32:
        return parameter
    return parameter.detach().float().requires_grad_()
