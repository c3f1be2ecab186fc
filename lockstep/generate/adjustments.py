"""What a request changes about the logits it is drawn from: biases, penalties, and the tokens it may sample.

Log-probabilities of the whole vocabulary are those without: adjustments only affect the draw, like top-k. They apply in
the order of vLLM: bias, then the repetition penalty, then the frequency and presence penalties, then the tokens that
the grammar and `min_tokens` leave.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lockstep.errors import UserError
from lockstep.generate.grammars import Matcher
from lockstep.generate.sampling_params import SamplingParams
from lockstep.ops.vocabulary import VocabularyPart


class Adjustment:
    """The adjustments of one sample, which follow from its tokens so far."""

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int], end_ids: Collection[int], matcher: Matcher | None
    ):
        self.params, self.matcher = params, matcher
        self._end_ids = np.array(sorted(end_ids), dtype=np.int64)
        self._changed = _ChangedLogits(params, prompt)
        self._count = 0
        self.problem = ""
        """Why nothing can be drawn any more."""

    def accept(self, token: int, ends: bool) -> None:
        """Advances by a sampled token. ends: it ended the sample, so that nothing follows."""
        self._count += 1
        self._changed.sampled(token)
        if self.matcher and not ends and not self.problem:
            try:
                if not self.matcher.accept(token):
                    self.problem = self.matcher.problem or "the grammar does not allow a sampled token"
            except UserError as error:  # of this sample, not of the step
                self.problem = str(error)

    def tokens(self) -> np.ndarray:
        """The tokens, int64, whose logits `change` changes."""
        return self._changed.tokens

    def change(self, logits: np.ndarray, places: np.ndarray) -> np.ndarray:
        """The changed float32 logits of `tokens()[places]`."""
        return self._changed.apply(logits, places)

    def refused(self) -> np.ndarray:
        """The tokens that would end the sample too early."""
        return self._end_ids if self._count < self.params.min_tokens else self._end_ids[:0]

    def fill_mask(self, bits: np.ndarray) -> None:
        """Sets the bits, of a row of int32, of the tokens that may be drawn. The sample of a grammar that is complete
        ends even before `min_tokens`.

        With `problem`, what is drawn has no meaning, so that all bits are set.
        """
        assert self.matcher is not None
        try:
            self.matcher.fill_mask(bits)
            self.problem = self.problem or self.matcher.problem
        except UserError as error:
            self.problem = str(error)
        if self.problem:
            bits[:] = -1
        elif len(refused := self.refused()):
            without = bits.copy()
            np.bitwise_and.at(without, refused // 32, ~(np.int32(1) << (refused % 32).astype(np.int32)))
            if without.any():
                bits[:] = without


class _ChangedLogits:
    """The tokens with a bias or a penalty, in the order in which they got one."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int]):
        self._repetition, self._frequency = params.repetition_penalty, params.frequency_penalty
        self._presence = params.presence_penalty
        seen = dict.fromkeys(prompt) if self._repetition != 1 else {}
        known = list(dict.fromkeys((*(token for token, _ in params.logit_bias), *seen)))
        self._place = dict(zip(known, range(len(known))))
        self._tokens = np.array(known, dtype=np.int64)
        self._bias, self._times = (np.zeros(len(known), dtype=np.float32) for _ in range(2))
        self._seen = np.zeros(len(known), dtype=bool)
        for token, bias in params.logit_bias:
            self._bias[self._place[token]] += np.float32(bias)
        self._seen[[self._place[token] for token in seen]] = True

    def sampled(self, token: int) -> None:
        if self._repetition != 1 or self._frequency or self._presence:
            place = self._find(token)
            self._seen[place] = True
            self._times[place] += 1

    @property
    def tokens(self) -> np.ndarray:
        return self._tokens[: len(self._place)]

    def apply(self, logits: np.ndarray, places: np.ndarray) -> np.ndarray:
        values = logits + self._bias[places]
        if self._repetition != 1:
            penalized = np.where(values > 0, values / self._repetition, values * self._repetition)
            values = np.where(self._seen[places], penalized, values)
        times = self._times[places]
        values = values - np.float32(self._frequency) * times
        return np.asarray(values - np.float32(self._presence) * (times > 0), dtype=np.float32)

    def _find(self, token: int) -> int:
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._tokens):
            more = max(64, place)
            self._tokens, self._bias, self._times, self._seen = (
                np.concatenate((each, np.zeros(more, each.dtype)))
                for each in (self._tokens, self._bias, self._times, self._seen)
            )
        self._tokens[place] = token
        return place


def adjusted_logits(
    logits: Float[Tensor, "rows part"], adjustments: Sequence[Adjustment], part: VocabularyPart
) -> Float[Tensor, "rows part"]:
    """The logits of a part of the vocabulary as each row's adjustment changes them: in float32 if some change by more
    than to -inf."""
    device, adjusted = logits.device, logits
    rows, tokens, values = _changes(logits, adjustments, part)
    if len(rows):
        adjusted = logits.to(torch.float32, copy=True)
        adjusted[_on(rows, device), _on(tokens, device)] = _on(values, device)
    matched = [row for row, each in enumerate(adjustments) if each.matcher is not None]
    if len(matched) == len(adjustments):
        return torch.minimum(adjusted, _limits(adjustments, part, adjusted.dtype, device))
    adjusted = adjusted.clone() if adjusted is logits else adjusted
    if matched:
        limits = _limits([adjustments[row] for row in matched], part, adjusted.dtype, device)
        adjusted[matched] = torch.minimum(adjusted[matched], limits)
    for row, each in enumerate(adjustments):
        refused = each.refused() if each.matcher is None else ()
        if here := [token - part.first for token in refused if part.first <= token < part.stop]:
            adjusted[row, here] = -torch.inf
    return adjusted


def _changes(
    logits: Tensor, adjustments: Sequence[Adjustment], part: VocabularyPart
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rows, places in the part, and float32 values of all logits with a bias or a penalty."""
    rows, tokens, each_places = [], [], []
    for row, adjustment in enumerate(adjustments):
        changed = adjustment.tokens()
        places = ((changed >= part.first) & (changed < part.stop)).nonzero()[0]
        rows.append(np.full(len(places), row))
        tokens.append(changed[places] - part.first)
        each_places.append(places)
    all_rows, all_tokens = np.concatenate(rows), np.concatenate(tokens)
    if not len(all_rows):
        return all_rows, all_tokens, np.zeros(0, dtype=np.float32)
    before = logits[_on(all_rows, logits.device), _on(all_tokens, logits.device)].float().cpu().numpy()
    split = np.split(before, np.cumsum([len(places) for places in each_places])[:-1])
    changed_values = map(Adjustment.change, adjustments, split, each_places)
    return all_rows, all_tokens, np.concatenate(list(changed_values))


def _limits(
    adjustments: Sequence[Adjustment], part: VocabularyPart, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "rows part"]:
    """What the logits may be at most: infinity for the tokens that each row's grammar allows, else -infinity.

    The minimum of both is computed at the same speed for any mask, unlike a choice by the mask.
    """
    words = np.zeros((len(adjustments), -(-part.vocab // 32)), dtype=np.int32)
    for row, adjustment in zip(words, adjustments):
        adjustment.fill_mask(row)
    first, stop = part.first // 8, -(-part.stop // 8)
    numbers = words.view(np.uint8)[:, first:stop].astype(np.int32)
    limits = _limits_of_bytes(dtype, device).index_select(0, _on(numbers.reshape(-1), device))
    begin = part.first - 8 * first
    return limits.view(len(adjustments), -1)[:, begin : begin + part.stop - part.first]


@cache
def _limits_of_bytes(dtype: torch.dtype, device: torch.device) -> Float[Tensor, "256 8"]:
    """For the bits of each byte, infinity if set and -infinity if not."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.where(torch.from_numpy(bits) > 0, torch.inf, -torch.inf).to(device, dtype)


def _on(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)
