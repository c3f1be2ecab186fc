"""Finds where the trainer's and the generator's paths first diverge, by running both with every operator tapped."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep import ops
from lockstep.errors import UserError
from lockstep.generate.runner import make_cache
from lockstep.model import Decoder, TrainableModel
from lockstep.model.decoder import Block
from lockstep.ops.attention_reference import PLAIN

TAPPED = (
    "embedding", "rms_norm", "linear", "head_linear", "rotary", "silu_mul", "router_logits", "route", "experts",
    "clamped_experts", "add_bias",
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

    def __str__(self) -> str:
        if self.experts:
            return f"{self.operator}: {self.experts} (token {self.position} of the sequence)"
        return (
            f"{self.operator}: {self.different} of {self.elements} elements, largest difference {self.largest:.2g} "
            f"(token {self.position} of the sequence)"
        )


@torch.no_grad()
def first_difference(model: TrainableModel, tokens: list[int], prompt_length: int) -> Difference | None:
    """Runs `tokens` as the trainer packs them, and as the generator computes them: a prompt in chunks, then one by one.
    None if all operators agree in every bit. Raises UserError for a model that is compiled or sharded over ranks, whose
    operators cannot be observed one by one.
    """
    if (
        not isinstance(model, Decoder)
        or model.halves is not Block
        or type(model.embed_tokens.weight) is not torch.nn.Parameter
    ):
        raise UserError("operators can be compared only in one process without compilation; unset compile and parallel")
    whole = _trainer(model, tokens)
    for first, taps in _generator(model, tokens, prompt_length):
        found = [_rows_apart(own[1], other[1][first : first + len(own[1])]) for own, other in zip(taps, whole)]
        if not any(len(rows) for rows in found):
            continue
        row = min(int(rows[0]) for rows in found if len(rows))
        index = next(i for i, rows in enumerate(found) if len(rows) and int(rows[0]) == row)
        (operator, own), other = taps[index], whole[index][1]
        return _difference(operator, first + row, own[row], other[first + row])
    return None


def in_words(model: TrainableModel, sequence: tuple[list[int], int] | None) -> str:
    """What `first_difference` finds in a sequence that differed, as a sentence without its period."""
    if sequence is None:
        return "There is no sequence to explain it with"
    try:
        found = first_difference(model, *sequence)
    except UserError as error:
        return f"It cannot be explained: {error}"
    if found is None:
        return (
            "Every operator agrees when both paths run over that sequence with the current weights: other weights "
            "were used then, or the difference is outside the model's forward pass"
        )
    return f"The first operator that differs is {found}"


def _trainer(model: Decoder, tokens: list[int]) -> list[Tap]:
    row = torch.tensor(tokens, device=model.device)
    return _taps_of(model, row, 0, ops.PackedAttention([len(tokens)], model.device))


def _generator(model: Decoder, tokens: list[int], prompt_length: int) -> Iterator[tuple[int, list[Tap]]]:
    """The taps of each step, and the position of its first token."""
    pages = -(-len(tokens) // ops.PAGE)
    cache = make_cache(model, pages)
    table = torch.arange(pages, device=model.device)[None]
    starts = [*range(0, prompt_length, CHUNK), *range(prompt_length, len(tokens)), len(tokens)]
    for first, stop in zip(starts, starts[1:]):
        counts = (torch.tensor([count], device=model.device) for count in (stop - first, stop))
        row = torch.tensor(tokens[first:stop], device=model.device)
        yield first, _taps_of(model, row, first, ops.PagedAttention(cache, table, *counts))


def _taps_of(model: Decoder, tokens: Tensor, first: int, attention: ops.Attention) -> list[Tap]:
    """Every operator's output, from the embedding to the log-probability of each token as its own successor."""
    positions = torch.arange(first, first + len(tokens), device=tokens.device)
    with _tapped(model) as taps:
        hidden = model(tokens, positions, _tapped_attention(attention, taps))
        logits = model.logits(hidden)
    log_probs, _, _ = ops.logits_log_probs(logits, tokens, torch.ones_like(tokens, dtype=torch.float32))
    return [*taps, ("log-probability", log_probs[:, None])]


@contextmanager
def _tapped(model: Decoder) -> Iterator[list[Tap]]:
    """Inside it, the operators that the model calls append their outputs to the list."""
    names = {id(parameter): name.removesuffix(".weight") for name, parameter in model.named_parameters()}
    taps: list[Tap] = []
    exact = {kind: getattr(ops, kind) for kind in TAPPED}

    def tap(kind: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            out = exact[kind](*arguments, **named)
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


def _tapped_attention(attention: ops.Attention, taps: list[Tap]) -> ops.Attention:
    def call(layer: int, q: Tensor, k: Tensor, v: Tensor | None, terms: ops.Terms = PLAIN) -> Tensor:
        out = attention(layer, q, k, v, terms)
        taps.append((f"layer {layer}, attention", out))
        return out

    return call


def _in_words(kind: str, weight: str, before: list[Tap]) -> str:
    """`layer 7, o_proj`; an operator without a weight belongs to the layer of the one before it."""
    if kind == "linear" and weight in ("embed_tokens", "lm_head"):
        return "lm_head"
    if found := re.fullmatch(r"layers\.(\d+)\.(?:\w+\.)*?(\w+(?:\.bias)?)", weight):
        # These are not named after their weights: a route's can be its choice bias, and experts have three.
        own = "experts" if kind.endswith("experts") else kind if kind == "route" else found[2]
        return f"layer {found[1]}, {own}"
    if weight:
        return weight
    last = before[-1][0]
    side = (" of keys" if last.endswith("rotary of queries") else " of queries") if kind == "rotary" else ""
    return f"{last.partition(',')[0]}, {kind}{side}"


def _rows_apart(own: Tensor, other: Tensor) -> Tensor:
    """The rows in which any bit differs."""
    kind = torch.int16 if own.element_size() == 2 else torch.int32
    apart = own.contiguous().view(kind) != other.contiguous().view(kind)
    return apart.flatten(1).any(1).nonzero()[:, 0]


def _difference(operator: str, position: int, own: Tensor, other: Tensor) -> Difference:
    apart = (own.float() - other.float()).abs().nan_to_num(nan=torch.inf)
    different = len(_rows_apart(own.flatten()[:, None], other.flatten()[:, None]))
    experts = f"{own.tolist()} in the generator, {other.tolist()} in the trainer" if operator.endswith(CHOICE) else ""
    return Difference(operator, position, different, own.numel(), float(apart.max()), experts)
