"""Runs the model on a step's tensors."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from lockstep import ops
from lockstep.errors import UserError
from lockstep.generate.batch import StepBatch
from lockstep.model import Decoder
from lockstep.model.adapted_rows import adapted
from lockstep.model.adapters import Adapter
from lockstep.ops.vocabulary import Whole
from lockstep.parallel.tensor_group import tensor_group_of
from lockstep.parallel.vocabulary import ShardedSampler


def make_cache(model: Decoder, num_pages: int) -> ops.KVCache:
    """A cache for the key-value heads of this rank. Raises UserError if the device has no form of its format."""
    shape, group = model.config, tensor_group_of(model)
    heads = max(1, shape.num_kv_heads // (dist.get_world_size(group) if group else 1))
    values = shape.latent is None
    if shape.precision.cache != ops.NONE and model.device.type != "cpu":
        raise UserError(
            f"precision.cache {shape.precision.cache} has no kernels for GPUs yet; sample with precision.cache none, "
            "or on a CPU"
        )
    sizes, form = (shape.num_layers - shape.num_delta, num_pages, heads, shape.head_dim), shape.precision.cache
    return ops.KVCache(*sizes, model.dtype, model.device, values, form)


def sampler_of(model: Decoder) -> Any:
    """An object with `sample`, `top_log_probs` and `ranked_log_probs` for the logits of this rank."""
    group = tensor_group_of(model)
    return ops if group is None else ShardedSampler(model.config.vocab_size, group)


def has_custom_forward(model: Decoder) -> bool:
    """Whether some module has hooks or a replaced forward, which a recorded step would not run."""
    return any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in model.modules())


class Decoded(NamedTuple):
    """A decode step's results, one row per sequence; valid until the next step."""

    logits: Float[Tensor, "sequences vocab"]
    tokens: Int[Tensor, "sequences"]
    """Drawn without top-k, top-p and min-p."""
    log_probs: Float[Tensor, "sequences"]


class Runner:
    """Calls the model directly. `GraphRunner` replays recorded graphs where it can."""

    def __init__(self, model: Decoder, cache: ops.KVCache):
        self.model = model
        self.cache = cache
        self.sampler = sampler_of(model)
        self.vocabulary = Whole(model.config.vocab_size) if self.sampler is ops else self.sampler.part
        """The part of the vocabulary that this rank has the logits of."""

    @property
    def most_rows(self) -> int:
        """The most rows of a step to which drafts are added."""
        return sys.maxsize

    def fits(self, rows: int) -> bool:
        """Whether a step with drafts may have so many rows."""
        return True

    def padded(self, rows: int) -> int:
        """How many rows a decode step of so many computes, padding included."""
        return rows

    def release(self) -> None:
        """Frees recorded steps, and all that they keep of the weights."""

    def weights_changed(self) -> None:
        """The weights have new values, and may have new addresses."""

    def adapter_gone(self, adapter: Adapter) -> None:
        """Frees the recorded steps with rows of an adapter: it is unloaded, or its matrices have moved."""

    def decode(self, batch: StepBatch) -> Decoded | None:
        """The whole step including the draw, if it can be replayed; `batch` is on the CPU."""
        return None

    def hidden(self, batch: StepBatch) -> Float[Tensor, "rows dim"]:
        """The hidden state of every row; `batch` is on the model's device."""
        attention = ops.PagedAttention(self.cache, batch.block_table, batch.query_lengths, batch.context_lengths)
        with adapted(batch.adapted):
            return self.model(batch.tokens, batch.positions, attention)
