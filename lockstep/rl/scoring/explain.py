"""Finds where the trainer's and the generator's paths first diverge, by running both with every operator tapped."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep import ops
from lockstep.config.parallel import ROW_MULTIPLE
from lockstep.errors import UserError
from lockstep.generate.runner import delta_sizes, make_cache, sampler_of
from lockstep.model import Decoder, TrainableModel
from lockstep.model.decoder import Block
from lockstep.model.shard import is_dtensor
from lockstep.ops.attention_reference import PLAIN
from lockstep.parallel.exchange import gather_rows, whole_rows
from lockstep.parallel.messages import from_all
from lockstep.parallel.tensor_group import sharded_over_data, tensor_group_of

TAPPED = (
    "embedding", "rms_norm", "heads_norm", "branch_norm", "linear", "formatted_linear", "fused_linear", "head_linear",
    "rotary", "silu_mul", "sigmoid_mul", "gelu_mul", "relu_squared", "router_logits", "route", "experts",
    "clamped_experts", "add_bias", "softcap",
)  # fmt: skip
CHUNK = 16
"""Tokens of a prompt that the generator's path computes at once; completion tokens follow one by one."""

CHOICE = " of experts"

Tap = tuple[str, Tensor]
"""An operator's name, and its output: one row per token."""


@dataclass(frozen=True)
class Difference:
    """The first operator whose output differs, for the first token with a difference."""

    operator: str
    position: int
    different: int
    elements: int
    largest: float
    experts: str = ""
    """For a router's choice: both sides' experts."""
    rank: int = 0
    """The tensor rank that has these elements: the first one with a difference."""
    ranks: int = 1

    def __str__(self) -> str:
        place = f"{self.operator} on tensor rank {self.rank}" if self.ranks > 1 else self.operator
        if self.experts:
            return f"{place}: {self.experts} (token {self.position} of the sequence)"
        return (
            f"{place}: {self.different} of {self.elements} elements, largest difference {self.largest:.2g} "
            f"(token {self.position} of the sequence)"
        )


@torch.no_grad()
def first_difference(model: TrainableModel, tokens: list[int], prompt_length: int) -> Difference | None:
    """Runs `tokens` as the trainer packs them, and as the generator computes them: a prompt in chunks, then one by one.
    None if all operators agree in every bit. All tensor ranks call it, with the same tokens. Raises UserError for a
    model that is compiled or sharded over other ranks, whose operators cannot be observed one by one.
    """
    if not isinstance(model, Decoder) or model.halves is not Block or sharded_over_data(model):
        raise UserError(
            "operators can be compared only without compilation, and over no ranks but parallel.tensor; unset compile "
            "and the other axes of parallel"
        )
    group = tensor_group_of(model)
    whole = _trainer(model, tokens, group)
    for first, taps in _generator(model, tokens, prompt_length):
        local = _first_difference(taps, whole, first)
        places = [local] if group is None else from_all(local, group)
        if not any(places):
            continue
        rank = min((place, rank) for rank, place in enumerate(places) if place)[1]
        difference = None
        if local is not None and rank == (0 if group is None else dist.get_rank(group)):
            (operator, mine), other, row = taps[local[1]], whole[local[1]][1], local[0]
            difference = _difference(operator, first + row, mine[row], other[first + row])
        if group is None:
            return difference
        fields = from_all(difference and asdict(difference), group)[rank]
        return Difference(**fields | {"rank": rank, "ranks": len(places)})
    return None


def _first_difference(taps: list[Tap], whole: list[Tap], first: int) -> list[int] | None:
    """The row of the first difference, and the index of its operator, the earliest in that row."""
    of_operators = [_rows_apart(out, other[first : first + len(out)]) for (_, out), (_, other) in zip(taps, whole)]
    places = [[int(rows[0]), index] for index, rows in enumerate(of_operators) if len(rows)]
    return min(places, default=None)


def in_words(model: Decoder | None, sequence: tuple[list[int], int] | None) -> str:
    """What `first_difference` finds in a sequence that differed, as a sentence without its period.

    All tensor ranks call it, with the same sequence. None: no rank has a whole model.
    """
    if sequence is None:
        return "There is no sequence to explain it with"
    if model is None:
        return (
            "It cannot be explained: the ranks that train have no whole copy of the policy; run lockstep parity "
            "--explain on the model"
        )
    try:
        difference = first_difference(model, *sequence)
    except UserError as error:
        return f"It cannot be explained: {error}"
    if difference is None:
        return (
            "Every operator agrees when both paths run over that sequence with the current weights: other weights "
            "were used then, or the difference is outside the model's forward pass"
        )
    return f"The first operator that differs is {difference}"


def _trainer(model: Decoder, tokens: list[int], group: dist.ProcessGroup | None) -> list[Tap]:
    """The taps of all tokens: of padding, which the ranks of a tensor group share rows with, there are none."""
    padded = tokens + [0] * (-len(tokens) % ROW_MULTIPLE)
    row = torch.tensor(padded, device=model.device)
    taps = _taps_of(model, row, 0, ops.PackedAttention([len(tokens)], model.device))
    if group is not None:
        taps = [(name, out if len(out) == len(padded) else gather_rows(out, group)) for name, out in taps]
    return [(name, out[: len(tokens)]) for name, out in taps]


def _generator(model: Decoder, tokens: list[int], prompt_length: int) -> Iterator[tuple[int, list[Tap]]]:
    """The taps of each step, and the position of its first token."""
    pages, sizes = -(-len(tokens) // ops.PAGE), delta_sizes(model)
    cache = make_cache(model, pages)
    states = None if sizes is None else ops.DeltaCache(sizes, 2, 1, model.dtype, model.device)
    table = torch.arange(pages, device=model.device)[None]
    starts = [*range(0, prompt_length, CHUNK), *range(prompt_length, len(tokens)), len(tokens)]
    for first, stop in zip(starts, starts[1:]):
        count, context = (torch.tensor([number], device=model.device) for number in (stop - first, stop))
        row = torch.tensor(tokens[first:stop], device=model.device)
        delta = None if states is None else _delta_step(states, first, stop)
        with whole_rows():
            taps = _taps_of(model, row, first, ops.PagedAttention(cache, table, count, context, delta))
        yield first, taps


def _delta_step(cache: ops.DeltaCache, first: int, stop: int) -> ops.DeltaStep:
    """Of a sequence's tokens from `first` to `stop`, fewer than two chunks of the delta rule: their states take turns
    in two entries."""
    read, written = (position // ops.CHUNK for position in (first, stop))
    columns = (0, read % 2 if read else ops.NO_STATE, written % 2)
    return ops.DeltaStep(cache, *torch.tensor(columns, dtype=torch.int32, device=cache.states.device)[:, None])


def _taps_of(model: Decoder, tokens: Tensor, first: int, attention: ops.Attention) -> list[Tap]:
    """Every operator's output, from the embedding to the log-probability of each token as its own successor."""
    positions = torch.arange(first, first + len(tokens), device=tokens.device)
    with _tapped(model) as taps:
        hidden = model(tokens, positions, _TappedAttention(model, attention, taps))
        logits = model.logits(hidden)
    ones = torch.ones_like(tokens, dtype=torch.float32)
    if tensor_group_of(model) is None:
        log_probs, _, _ = ops.logits_log_probs(logits, tokens, ones)
    else:  # of the token that is drawn: each rank has a part of the vocabulary
        none = torch.zeros_like(tokens)
        _, log_probs, _ = sampler_of(model).sample(logits, ones, none, ones, ones * 0, ones.double() / 2)
    return [*taps, ("log-probability", log_probs[:, None])]


@contextmanager
def _tapped(model: Decoder) -> Iterator[list[Tap]]:
    """Inside it, the operators that the model calls append their outputs to the list."""
    names = {id(parameter): name.removesuffix(".weight") for name, parameter in model.named_parameters()}
    taps: list[Tap] = []
    exact = {kind: getattr(ops, kind) for kind in TAPPED}
    within = False

    def tap(kind: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal within
            if within:
                return exact[kind](*arguments, **named)
            # An operator on a sharded weight calls others on its local part.
            within = any(map(is_dtensor, arguments))
            try:
                out = exact[kind](*arguments, **named)
            finally:
                within = False
            weight = next((names[id(x)] for x in arguments if id(x) in names), "")
            operator = _in_words(kind, weight, taps)
            # For a route: the experts' weights, and which experts they are.
            taps.extend([(operator + CHOICE, out[1]), (operator, out[0])] if kind == "route" else [(operator, out)])
            return out

        return call

    for kind in TAPPED:
        setattr(ops, kind, tap(kind))
    try:
        yield taps
    finally:
        for kind, function in exact.items():
            setattr(ops, kind, function)


class _TappedAttention:
    """Appends what each layer attends to, or what its delta rule computes, to the taps."""

    def __init__(self, model: Decoder, attention: ops.Attention, taps: list[Tap]):
        self._attention, self._taps = attention, taps
        kinds = [model.config.is_delta(layer) for layer in range(model.config.num_layers)]
        self._layers = {kind: [layer for layer, each in enumerate(kinds) if each is kind] for kind in (False, True)}
        """The model's layers with attention, and with the delta rule: each kind is counted apart."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, terms: ops.Terms = PLAIN) -> Tensor:
        out = self._attention(layer, q, k, v, terms)
        self._taps.append((f"layer {self._layers[False][layer]}, attention", out))
        return out

    def delta(self, layer: int, mixed: Tensor, b: Tensor, a: Tensor, terms: ops.DeltaTerms) -> Tensor:
        out = self._attention.delta(layer, mixed, b, a, terms)
        self._taps.append((f"layer {self._layers[True][layer]}, delta rule", out))
        return out


def _in_words(kind: str, weight: str, before: list[Tap]) -> str:
    """`layer 7, o_proj`; an operator without a weight belongs to the layer of the one before it."""
    if kind.endswith("linear") and weight in ("embed_tokens", "lm_head"):
        return "lm_head"
    if match := re.fullmatch(r"layers\.(\d+)\.(?:\w+\.)*?(\w+(?:\.bias)?)", weight):
        # These are not named after their weights: a route's can be its choice bias, and experts have three.
        operator = "experts" if kind.endswith("experts") else kind if kind == "route" else match[2]
        return f"layer {match[1]}, {operator}"
    if weight:
        return weight
    last = before[-1][0]
    side = (" of keys" if last.endswith("rotary of queries") else " of queries") if kind == "rotary" else ""
    return f"{last.partition(',')[0]}, {kind}{side}"


def _rows_apart(out: Tensor, other: Tensor) -> Tensor:
    """The rows in which any bit differs."""
    kind = torch.int16 if out.element_size() == 2 else torch.int32
    apart = out.contiguous().view(kind) != other.contiguous().view(kind)
    return apart.flatten(1).any(1).nonzero()[:, 0]


def _difference(operator: str, position: int, out: Tensor, other: Tensor) -> Difference:
    apart = (out.float() - other.float()).abs().nan_to_num(nan=torch.inf)
    different = len(_rows_apart(out.flatten()[:, None], other.flatten()[:, None]))
    experts = f"{out.tolist()} in the generator, {other.tolist()} in the trainer" if operator.endswith(CHOICE) else ""
    return Difference(operator, position, different, out.numel(), float(apart.max()), experts)
