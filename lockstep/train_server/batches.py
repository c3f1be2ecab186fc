"""From a request's data to micro-batches, and from a micro-batch to log-probabilities and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lockstep.config.parallel import ROW_MULTIPLE
from lockstep.errors import UserError
from lockstep.model import Decoder, ModelConfig, check_token_ids
from lockstep.train.packing import PackedRow, target_log_probs
from lockstep.train_server.losses import Loss
from lockstep.train_server.wire import tensor_of, tokens_of

TARGETS = "target_tokens"


@dataclass(frozen=True)
class Datum:
    """One sequence, and what a loss reads of it."""

    tokens: list[int]
    targets: Int[Tensor, "tokens"] | Int[Tensor, "tokens several"]
    """What each token's row is to predict."""
    inputs: Mapping[str, Tensor]
    """The loss's other inputs by name, float32: of the targets' shape, or of a custom loss's own."""

    @property
    def size(self) -> int:
        """Numbers in its targets and other inputs."""
        return self.targets.numel() + sum(value.numel() for value in self.inputs.values())

    @property
    def work(self) -> int:
        """Rows that the layers or the head compute, whichever are more."""
        return max(len(self.tokens), self.targets.numel())

    @property
    def per_token(self) -> int:
        """Targets of each token."""
        return self.targets.shape[1] if self.targets.ndim == 2 else 1


def datum_of(message: Any, number: int, loss: Loss, shape: ModelConfig) -> Datum:
    """Datum `number` of a request. Raises UserError, naming what is wrong, for one that cannot be computed."""
    name = f"data[{number}]"
    tokens = tokens_of(message.model_input, f"{name}.model_input")
    check_token_ids(tokens, shape.vocab_size, f"{name}.model_input")
    if len(tokens) > shape.max_positions:
        raise UserError(
            f"{name}.model_input has {len(tokens)} tokens, but the model's context is {shape.max_positions}"
        )
    given = {key: tensor_of(value, f"{name}.loss_fn_inputs[{key!r}]") for key, value in message.loss_fn_inputs.items()}
    targets = given.pop(TARGETS, None)
    if targets is None:
        raise UserError(f"{name} has no loss_fn_inputs[{TARGETS!r}]")
    if targets.dtype != torch.int64 or targets.ndim not in (1, 2) or len(targets) != len(tokens):
        raise UserError(
            f"{name}: {TARGETS} is {_form(targets)}, but the input has {len(tokens)} tokens; send int64 of the shape "
            f"[{len(tokens)}], or [{len(tokens)}, K] for several targets a token"
        )
    check_token_ids(targets.flatten().tolist(), shape.vocab_size, f"{name}: {TARGETS}")
    _refuse_inputs(given, name, loss)
    inputs = {key: value.to(torch.float32) for key, value in given.items()}
    for key in (*loss.required, *loss.optional):
        if key in inputs and inputs[key].shape != targets.shape:
            raise UserError(f"{name}: {key} is {_form(given[key])}, but {TARGETS} {_form(targets)}; send one shape")
    return Datum(tokens, targets, inputs)


def _refuse_inputs(given: Mapping[str, Tensor], name: str, loss: Loss) -> None:
    if missing := [key for key in (*loss.required, *loss.of_graph) if key not in given]:
        raise UserError(f"{name} has no loss_fn_inputs[{missing[0]!r}], which the loss needs")
    if unknown := sorted(given.keys() - {*loss.required, *loss.optional, *loss.of_graph}):
        raise UserError(f"{name} has loss_fn_inputs[{unknown[0][:60]!r}], which the loss does not read; leave it out")
    if infinite := [key for key, value in given.items() if not value.isfinite().all()]:
        raise UserError(f"{name}: {infinite[0]} is not finite")


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of the shape {list(tensor.shape)}"


def active_targets(datum: Datum, loss: Loss) -> Tensor:
    """Which of its targets, flattened, have a loss."""
    gate = datum.inputs.get(loss.gate)
    return torch.ones(datum.targets.numel(), dtype=torch.bool) if gate is None else gate.flatten() != 0


@dataclass(frozen=True)
class MicroBatch:
    """Data that are computed in one pass."""

    data: Sequence[Datum]
    row: PackedRow
    """Of all their targets."""
    active: Tensor
    """Which targets have a loss; only these rows of the head have a gradient."""

    def to(self, device: torch.device) -> MicroBatch:
        tensors: Any = {name: value.to(device) for name, value in vars(self.row).items() if isinstance(value, Tensor)}
        return MicroBatch(self.data, replace(self.row, **tensors), self.active.to(device))


def micro_batches(data: Sequence[Datum], loss: Loss, budget: int) -> Iterator[MicroBatch]:
    """Consecutive data of at most `budget` tokens together, or targets if these are more; a longer one is alone."""
    part: list[tuple[Datum, int]] = []
    size = 0
    lead: tuple[int | None, list[int]] = None, []
    for datum in data:
        prompt = _prompt(datum, loss)
        shared = prompt[0] if part and prompt == lead and prompt[0] else 0
        if part and size + datum.work - shared > budget:
            yield _packed(part, loss)
            part, size, shared = [], 0, 0
        lead = lead if shared else prompt
        part.append((datum, shared))
        size += datum.work - shared
    if part:
        yield _packed(part, loss)


def _prompt(datum: Datum, loss: Loss) -> tuple[int | None, list[int]]:
    """The number of tokens that data of the same prompt share, and the prompt: these, and the last token, whose row
    predicts what was sampled. None, and nothing: the loss shares no prompts.

    What was sampled begins where any of the inputs is not zero: the advantages of a group may all be.
    """
    sampled = [int(place) for name in loss.shares for place in datum.inputs[name].flatten().nonzero()[:1]]
    first = min(sampled) // datum.per_token if sampled else None
    return first, [] if first is None else datum.tokens[: first + 1]


def _packed(part: Sequence[tuple[Datum, int]], loss: Loss) -> MicroBatch:
    """The data, each with the number of its leading tokens that it shares with the last complete one before it."""
    tokens: list[int] = []
    positions: list[int] = []
    counts: list[int] = []
    predictors: list[Tensor] = []
    lead = 0
    for datum, left_out in part:
        lead = lead if left_out else len(tokens)
        counts[lead : lead + left_out] = [count + 1 for count in counts[lead : lead + left_out]]
        own = torch.arange(left_out, len(datum.tokens)) - left_out + len(tokens)
        rows = torch.cat([torch.arange(lead, lead + left_out), own])
        predictors.append(rows.repeat_interleave(datum.per_token))
        tokens += datum.tokens[left_out:]
        positions += range(left_out, len(datum.tokens))
        counts += [1] * (len(datum.tokens) - left_out)
    padding = [0] * (-len(tokens) % ROW_MULTIPLE)
    data, shared = [datum for datum, _ in part], [left_out for _, left_out in part]
    row = PackedRow(
        tokens=torch.tensor(tokens + padding),
        positions=torch.tensor(positions + padding),
        lengths=[len(datum.tokens) for datum in data],
        predictors=torch.cat(predictors),
        targets=torch.cat([datum.targets.flatten() for datum in data]),
        counts=torch.tensor(counts + padding),
        left_out=shared if any(shared) else None,
    )
    return MicroBatch(data, row, torch.cat([active_targets(datum, loss) for datum in data]))


def log_probs_of(model: Decoder, batch: MicroBatch) -> Float[Tensor, "targets"]:
    """The log-probability of every target, on the CPU; with a gradient, if enabled, to those that have a loss."""
    batch = batch.to(model.device)
    row = batch.row
    model.reserve_positions(max(row.lengths))
    hidden = model(row.tokens, row.positions, row.attend())
    rest = ~batch.active
    trained = _head(model, hidden, row, batch.active)
    with torch.no_grad():
        others = _head(model, hidden.detach(), row, rest)
    log_probs = torch.zeros(len(row.targets), device=hidden.device)
    return log_probs.masked_scatter(batch.active, trained).masked_scatter(rest, others).cpu()


def _head(model: Decoder, hidden: Tensor, row: PackedRow, chosen: Tensor) -> Tensor:
    part = replace(row, predictors=row.predictors[chosen], targets=row.targets[chosen])
    return target_log_probs(model, part, 1.0, hidden[part.predictors])[0]


LossOfData = Callable[[Sequence[Datum], Float[Tensor, "targets"]], tuple[Tensor, list[Mapping[str, float]]]]
"""From a micro-batch's data and log-probabilities to its losses, to be summed, and each datum's own metrics."""


def losses_of(loss: Loss, options: Mapping[str, float]) -> LossOfData:
    """A built-in loss of a micro-batch."""

    def of_data(data: Sequence[Datum], log_probs: Tensor) -> tuple[Tensor, list[Mapping[str, float]]]:
        if loss.spans:
            sizes = [datum.targets.numel() for datum in data]
            of_each = [loss.compute(own, _flat([datum]), options) for datum, own in zip(data, log_probs.split(sizes))]
            return torch.cat(of_each), []
        return loss.compute(log_probs, _flat(data), options), []

    return of_data


def _flat(data: Sequence[Datum]) -> dict[str, Tensor]:
    """The inputs of all data, flattened one after the other."""
    names = data[0].inputs.keys()
    if any(datum.inputs.keys() != names for datum in data):
        raise UserError("the data of one request differ in which loss_fn_inputs they have; send all of them in each")
    return {name: torch.cat([datum.inputs[name].flatten() for datum in data]) for name in names}
