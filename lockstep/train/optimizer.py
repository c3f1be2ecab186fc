"""Float32 master weights for a forward pass in bfloat16 or float32, and the step that updates them."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.config import TrainConfig
from lockstep.config.rules import parse_rule
from lockstep.errors import RunStopped, UserError, closest
from lockstep.model import Decoder, TrainableModel, resolve_dtype
from lockstep.model.stored import is_float32
from lockstep.train.adamw import State, adamw_state, adamw_update, round_into
from lockstep.train.gradients import (
    Gradients,
    GradientsUsedInBackward,
    TreeSummedGradients,
)
from lockstep.train.muon import muon_state, muon_update

MATRICES = (2, 3)
"""Number of dimensions of a matrix, and of the stacked matrices of experts: what Muon trains."""

FILTERS = ".conv1d.weight"
"""Of linear attention: a filter per channel, `[channels, 1, width]`."""


@dataclass(frozen=True)
class Settings:
    """How one parameter is updated; parameters with equal settings are updated together."""

    optimizer: str = "adamw"
    learning_rate: float = 1.0
    """Relative to the schedule's."""
    weight_decay: float = 0.0
    frozen: bool = False


def settings_of(shapes: Mapping[str, torch.Size], config: TrainConfig) -> dict[str, Settings]:
    """The settings of every parameter, by name; if several rules match, the later ones win, key by key.

    `shapes` has the parameters of the whole model, since a rule that matches none of them is refused. Raises UserError
    for rules that cannot be followed.
    """
    settings = {name: _default(name, shape, config) for name, shape in shapes.items()}
    for rule in config.rules:
        pattern, changes = parse_rule(rule)
        matching = [name for name in settings if fnmatchcase(name, pattern)]
        if not matching:
            hint = closest(pattern, settings) or f" Parameter names are {', '.join([*settings][:4])}, …"
            raise UserError(f'train.rules "{rule}": no parameter has such a name.{hint}')
        for name in matching:
            settings[name] = dataclasses.replace(settings[name], **changes)
            if settings[name].optimizer == "muon" and len(shapes[name]) not in MATRICES:
                raise UserError(f'train.rules "{rule}": {name} is not a matrix, which Muon needs; use adamw for it')
    return settings


def _default(name: str, shape: torch.Size, config: TrainConfig) -> Settings:
    if is_float32(name):
        return Settings(frozen=True)  # changed by the load, not by a gradient
    vectors = name.endswith(("bias", FILTERS))  # of experts and of channels
    muon = config.optimizer == "muon" and len(shape) in MATRICES and name.startswith("layers.") and not vectors
    decayed = len(shape) > 1 and not vectors
    return Settings("muon" if muon else "adamw", weight_decay=config.weight_decay if decayed else 0.0)


class MasterOptimizer:
    """Owns the float32 master weights and their AdamW and Muon state. float32 parameters are their own masters.

    With `optimizer_in_backward`, every parameter is updated within the backward, and nothing is left for `update`.
    """

    def __init__(
        self, model: TrainableModel, config: TrainConfig, extra_parameters: Mapping[str, nn.Parameter] | None = None
    ):
        """`extra_parameters`: parameters that are trained with the model but are not part of it, by name."""
        self.config = config
        further = dict(extra_parameters or {})
        self._extra_parameters = further.keys()
        whole = Decoder(model.config, torch.float32, "meta")  # this rank may have only some of the layers
        settings = settings_of({n: p.shape for n, p in [*whole.named_parameters(), *further.items()]}, config)
        if frozen := [name for name in further if settings[name].frozen]:
            raise UserError(
                f"train.rules freeze {frozen[0]}, which starts at zero and would stay zero; add the rule "
                f'"{frozen[0]} frozen=false"'
            )
        # The base of an adapter, routers' choice biases, and the ones of norms without weights.
        fixed = [name for name, parameter in whole.named_parameters() if not parameter.requires_grad]
        settings |= {name: replace(settings[name], frozen=True) for name in fixed}
        if all(each.frozen for each in settings.values()):
            rules = ", ".join(f'"{rule}"' for rule in config.rules if "frozen=true" in rule)
            raise UserError(f"train.rules freeze every parameter, which leaves nothing to train: {rules}; remove some")
        self.parameters: dict[str, nn.Parameter] = {}
        for name, parameter in [*model.named_parameters(), *further.items()]:
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
        self.averages: dict[str, Tensor] = {}
        """Moving averages of masters by name, if a run keeps any: saved and loaded with them."""
        self._learning_rate = 0.0
        self.gradients = self._gradients()

    def _gradients(self) -> Gradients:
        if self.config.optimizer_in_backward:
            return GradientsUsedInBackward(self.parameters, lambda grads: self._update(grads, self._learning_rate))
        if self.config.deterministic_layout:
            return TreeSummedGradients(self.parameters)
        return Gradients(self.parameters)

    def use(self, config: TrainConfig) -> None:
        """Updates with the moments' decay, epsilon, clipping and weight decay of `config` from now on."""
        self.config = config
        self.settings = settings_of({name: master.shape for name, master in self.masters.items()}, config)

    def begin(self, learning_rate: float, microbatches: int) -> None:
        """Call before a step's first backward. Raises UserError if the settings do not allow so many micro-batches."""
        if self.config.optimizer_in_backward and microbatches > 1:
            raise UserError(
                f"train.optimizer_in_backward updates after every micro-batch, but a step has {microbatches} of them; "
                "raise train.tokens_per_microbatch until it has one, or switch it off"
            )
        self._learning_rate = learning_rate

    def gradient_norms(self, stage_groups: Sequence[dist.ProcessGroup] = ()) -> dict[str, float]:
        """`grad_norm`, and `grad_norm/<part>` for each part of the model, before clipping; the same on every rank.

        stage_groups: process groups whose ranks hold different parameters of the model, as the stages of a pipeline do.
        """
        return self.gradients.norms(stage_groups, self._extra_parameters)

    def update(self, learning_rate: float, grad_norm: float) -> None:
        """Clips the gradients, whose norm is `grad_norm`, updates masters and model, clears the gradients."""
        clips = 0 < self.config.max_grad_norm < grad_norm
        scale = self.config.max_grad_norm / (grad_norm + 1e-6) if clips else 1.0
        self._update(self.gradients.pending(), learning_rate, scale)
        self.gradients.clear()

    def skip(self) -> None:
        """Clears the gradients without an update: weights and moments stay bitwise the same.

        Raises RunStopped if updates in the backward have already changed some of them.
        """
        if self.gradients.updated_weights:
            raise RunStopped(
                "a gradient is not finite, and train.optimizer_in_backward has already updated weights with this "
                "step's gradients, so the step cannot be skipped and the run ends. --resume goes back to the newest "
                "checkpoint; switch train.optimizer_in_backward off or lower train.learning_rate",
                exit_code=1,
            )
        self.gradients.clear()

    def _update(self, grads: dict[str, Tensor], learning_rate: float, scale: float = 1.0) -> None:
        groups: dict[Settings, list[str]] = defaultdict(list)
        for name in grads:
            groups[self.settings[name]].append(name)
        for settings, names in groups.items():
            update = muon_update if settings.optimizer == "muon" else adamw_update
            update(
                [self.masters[name] for name in names],
                [self.parameters[name] for name in names],
                [grads[name] for name in names],
                [self.state[name] for name in names],
                learning_rate * settings.learning_rate,
                settings.weight_decay,
                self.config,
                scale,
            )

    def state_tensors(self) -> dict[str, Tensor]:
        """Masters, moments and momenta by name, for a checkpoint: the tensors themselves, sharded as the model is."""
        tensors = {f"master.{name}": master.detach() for name, master in self.masters.items()}
        for name, state in self.state.items():
            tensors |= {f"{key}.{name}": value for key, value in state.items()}
        return tensors | {f"average.{name}": average for name, average in self.averages.items()}

    @torch.no_grad()
    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `state_tensors`; updates the model's weights, too.

        Raises UserError if one is missing or has another shape or dtype.
        """
        state = self.state_tensors()
        if missing := sorted(state.keys() - tensors.keys()):
            raise UserError(
                f"the checkpoint lacks {len(missing)} of the optimizer's tensors, such as {missing[0]}; "
                "algorithm, train.optimizer, train.rules and kl_reference (if it averages) must be those of the run "
                "that wrote it"
            )
        # A smaller one would be broadcast, and one of another dtype rounded or widened.
        for what, of in (("shape", lambda t: list(t.shape)), ("dtype", lambda t: t.dtype)):
            if other := [name for name in sorted(state) if of(tensors[name]) != of(state[name])]:
                name = other[0]
                raise UserError(
                    f"the checkpoint has {len(other)} of the optimizer's tensors in another {what}, such as {name}: "
                    f"{of(tensors[name])}, not {of(state[name])}; give the train.moments_dtype that it was "
                    "written with, unless it is from another model"
                )
        for name, tensor in state.items():
            tensor.copy_(tensors[name])
        round_into([*self.parameters.values()], [*self.masters.values()])


def _master(parameter: nn.Parameter) -> Tensor:
    if parameter.dtype == torch.float32:
        return parameter
    return parameter.detach().float().requires_grad_()
