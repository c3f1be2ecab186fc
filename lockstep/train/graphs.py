"""CUDA graphs of training: a micro-batch's forward and backward through the blocks, recorded once per size.

Launching a small model's kernels one by one takes longer than the kernels do. Two graphs replace the launches: one from
the tokens to the hidden states, one from their gradient to the weights'. Head and loss stay between them, so every loss
trains this way, and a policy's is compared with the generator as before. The recorded kernels are those of a direct
pass over the same padded row; that both have the same bits is checked once per size.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lockstep import ops
from lockstep.config import TrainConfig
from lockstep.model import Decoder, TrainableModel
from lockstep.model.layers import projections
from lockstep.model.shard import is_dtensor, is_fsdp
from lockstep.ops.cuda.graph import CudaCapture, Replay, Tensors

TIMES_BEFORE_RECORDING = 2
"""Micro-batches of a size before it is recorded: many sizes occur once."""
MOST_SIZES = 16
"""Sizes that are recorded."""
ROWS, SEQUENCES = 64, 8
"""Of the smallest size."""


Recordable: TypeAlias = ops.PackedAttention | ops.SharedPrefixAttention


class Size(NamedTuple):
    """What a graph has a fixed number of; a micro-batch is padded to the next size."""

    rows: int
    sequences: int
    longest: int
    """At least the tokens of the longest sequence."""
    keys: int = 0
    """Those of all sequences, where some share a prefix; 0: as many as rows."""

    @classmethod
    def of(cls, rows: int, sequences: int, longest: int, keys: int = 0) -> Size:
        """A function of the micro-batch alone: what was recorded before changes no bit. At most an eighth of the rows
        are padding, or ROWS - 1; more of the others costs little."""
        step = max(ROWS, 1 << max(rows.bit_length() - 4, 0))
        rows, keys = -(-rows // step) * step, _power_of_two(keys) if keys else 0
        return cls(rows, max(SEQUENCES, _power_of_two(sequences)), min(keys or rows, _power_of_two(longest)), keys)


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()


class TrainingCapture(Protocol):
    """`CudaCapture`, or what stands for it in tests."""

    def warm_up(self, function: Any) -> Any: ...
    def record(self, function: Any) -> Replay: ...


def can_graph(model: TrainableModel, config: TrainConfig) -> TypeGuard[Decoder]:
    """Whether a model's training steps can be recorded, on one GPU: dense and unsharded, with gradients summed as they
    come."""
    if config.cuda_graphs == "none" or config.deterministic_layout or config.optimizer_in_backward:
        return False
    if not isinstance(model, Decoder) or model.device.type != "cuda" or model.runs_on is not None:
        return False
    shape = model.config
    if shape.latent is not None or shape.mixtures or shape.sinks or is_fsdp(model):
        return False
    return not any(is_dtensor(parameter) for parameter in model.parameters())


class GraphedModel:
    """A `ScoringModel` that computes padded rows, and replays those of sizes that it has recorded.

    A second forward before the backward of the first is run directly, since a replay overwrites what the first saved.
    What cannot be captured is run directly, with a warning.
    """

    def __init__(self, model: Decoder, new_capture: Callable[[], TrainingCapture] = CudaCapture):
        self.model = model
        self._new_capture = new_capture
        self._recorded: dict[Size, _Recorded] = {}
        self._times_seen: Counter[Size] = Counter()
        self._trained: list[Tensor] = []
        self._weights: list[Any] = []
        self._parameters: list[nn.Parameter] = []
        """Kept, so that no other has the identity of one of them."""
        self._gradients: list[Tensor] = []
        self._open: weakref.ref[_Pass] | None = None
        """The newest replayed forward, until its backward."""
        self._declined = False

    @property
    def head_weight(self) -> Tensor:
        return self.model.head_weight

    @property
    def head_terms(self) -> ops.HeadTerms:
        return self.model.head_terms

    @property
    def recorded(self) -> list[Size]:
        """The sizes whose passes are replayed."""
        return list(self._recorded)

    def reserve_positions(self, length: int) -> None:
        self.model.reserve_positions(length)

    def __call__(self, tokens: Tensor, positions: Tensor, attention: ops.Attention) -> Tensor:
        if not isinstance(attention, Recordable) or not torch.is_grad_enabled() or self._has_hooks():
            hidden: Tensor = self.model(tokens, positions, attention)
            return hidden
        row, size = _padding(tokens, positions, attention)
        if self._is_open() or (recorded := self._of(size, row)) is None:
            return forward(self.model, row.padded(size), size)[: len(tokens)]
        opened = _Pass(recorded, row)
        self._open = weakref.ref(opened)
        replayed: Tensor = _Replayed.apply(opened, *self._trained)
        return replayed[: len(tokens)]

    def _is_open(self) -> bool:
        """Whether a replayed forward waits for its backward: another, or a recording, would overwrite its memory."""
        return self._open is not None and self._open() is not None

    def _has_hooks(self) -> bool:
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        of_modules = any(getattr(module, kind) for module in self.model.modules() for kind in kinds)
        return of_modules or any(parameter._backward_hooks for parameter in self.model.parameters())

    def _of(self, size: Size, row: Row) -> _Recorded | None:
        """The recorded passes of this size, once it has been seen often enough."""
        parameters = [*self.model.parameters()]
        # By their identity, too: a parameter may be replaced by another one over its memory.
        weights: list[Any] = [(id(p), p.data_ptr(), p.dtype, p.shape, p.requires_grad) for p in parameters]
        weights += [id(self.model.halves), *((layer.adapted, layer.scaling) for _, layer in projections(self.model))]
        if weights != self._weights:  # they have moved, others are trained, or an adapter was switched
            self._recorded, self._gradients = {}, []
            self._capture = self._new_capture()  # memory cannot be reused once its graphs are freed
            self._weights, self._parameters = weights, parameters
            self._trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._times_seen[size] += 1
        if size in self._recorded or self._declined or self._times_seen[size] < TIMES_BEFORE_RECORDING:
            return self._recorded.get(size)
        if len(self._recorded) < MOST_SIZES:
            self._record(size, row)
        return self._recorded.get(size)

    def _record(self, size: Size, row: Row) -> None:
        try:
            recorded = _Recorded(self.model, size, row, self._trained, self._gradients, self._capture)
        except RuntimeError as error:
            self._declined = True
            warnings.warn(
                f"training steps run without CUDA graphs, as one cannot be captured ({error}); "
                'train.cuda_graphs = "none" saves the attempt',
                stacklevel=2,
            )
            return
        self._gradients = recorded.gradients
        self._recorded[size] = recorded


class Row(NamedTuple):
    """What the model reads of a micro-batch."""

    tokens: Tensor
    positions: Tensor
    contexts: Tensor
    left_out: Tensor

    def padded(self, size: Size) -> Row:
        lengths = (size.rows, size.rows, size.sequences, size.sequences)
        return Row(*(F.pad(part, (0, length - len(part))) for part, length in zip(self, lengths)))


def _padding(tokens: Tensor, positions: Tensor, attention: Recordable) -> tuple[Row, Size]:
    """A micro-batch as the graphs read it, and the size that it is padded to."""
    contexts, left_out, keys = attention.contexts, torch.zeros_like(attention.contexts), 0
    if isinstance(attention, ops.SharedPrefixAttention):
        left_out, keys = attention.left_out, attention.keys
    return Row(tokens, positions, contexts, left_out), Size.of(len(tokens), len(contexts), attention.longest, keys)


def forward(model: Decoder, row: Row, size: Size) -> Tensor:
    """The hidden states of a padded row, computed without reading a value on the CPU."""
    attention: ops.Attention = (
        ops.SharedPrefixAttention.of_contexts(row.contexts, row.left_out, size.rows, size.keys, size.longest)
        if size.keys
        else ops.PackedAttention.of_contexts(row.contexts, size.rows, size.longest)
    )
    hidden: Tensor = model(row.tokens, row.positions, attention)
    return hidden


class _Recorded:
    """The two graphs of one size.

    gradients: memory of another size's, which are used too; empty: those of this one.
    """

    def __init__(
        self,
        model: Decoder,
        size: Size,
        row: Row,
        trained: Sequence[Tensor],
        gradients: Sequence[Tensor],
        capture: TrainingCapture,
    ):
        # The model may replace its tables by larger ones, which the graphs would not read.
        self._tables = model.rotary.reserve(size.longest, model.device)
        self._row = Row(*(part.clone() for part in row.padded(size)))
        self._grad = torch.zeros(size.rows, model.config.dim, dtype=model.dtype, device=model.device)

        def run() -> Tensors:
            hidden = forward(model, self._row, size)
            self._grad.copy_(hidden.detach())  # any gradient will do, if it is zero for no weight
            return hidden.detach(), *_gradients(hidden, trained, self._grad)

        expected = capture.warm_up(run)
        captured: list[Tensor] = []

        def run_forward() -> Tensors:
            captured.append(forward(model, self._row, size))
            return (captured[0].detach(),)

        def run_backward() -> Tensors:
            found = _gradients(captured.pop(), trained, self._grad)
            for mine, new in zip(gradients, found):
                if new is not None:
                    mine.copy_(new)
            return tuple(gradients or found)

        self._forward, self._backward = capture.record(run_forward), capture.record(run_backward)
        found = self._forward()[0], *self._backward()
        self.gradients = list(found[1:])
        for mine, theirs in zip(found, expected, strict=True):
            if theirs is not None and not torch.equal(mine, theirs):
                raise RuntimeError("its replay has other bits than the pass that it records")

    def forward(self, row: Row) -> Tensor:
        for mine, new in zip(self._row, row):
            mine[: len(new)].copy_(new)
            mine[len(new) :].zero_()
        return self._forward()[0]  # type: ignore[no-any-return]

    def backward(self, grad: Tensor) -> Tensors:
        self._grad.copy_(grad)
        return self._backward()


def _gradients(hidden: Tensor, trained: Sequence[Tensor], grad: Tensor) -> Tensors:
    """None for a weight that the blocks do not read, such as an untied head's."""
    return torch.autograd.grad(hidden, trained, grad, allow_unused=True)


class _Pass:
    """A replayed forward whose backward is still to come."""

    def __init__(self, recorded: _Recorded, row: Row):
        self.recorded, self.row = recorded, row


class _Replayed(torch.autograd.Function):
    """The weights are inputs, so that autograd accumulates their gradients as it does without graphs."""

    @staticmethod
    def forward(ctx: Any, opened: _Pass, *trained: Tensor) -> Tensor:
        ctx.opened = opened
        return opened.recorded.forward(opened.row).clone()  # the next replay overwrites it

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensors:
        if ctx.opened is None:
            raise RuntimeError("a replayed micro-batch has one backward: its forward's results are overwritten")
        opened, ctx.opened = ctx.opened, None
        # Autograd copies gradients that someone else refers to, as `_Recorded` does, instead of keeping them.
        return None, *opened.recorded.backward(grad)
