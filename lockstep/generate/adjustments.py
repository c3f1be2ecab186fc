"""What a request changes about the logits it is drawn from: biases, penalties, and the tokens it may sample.

Log-probabilities of the whole vocabulary are those without: adjustments only affect the draw, like top-k. They apply in
the order of vLLM: bias, then the repetition penalty, then the frequency and presence penalties, then the grammar.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

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
        self._biased = np.array([token for token, _ in params.logit_bias], dtype=np.int64)
        self._biases = np.array([bias for _, bias in params.logit_bias], dtype=np.float32)
        self._sampled: Counter[int] = Counter()
        self._seen = dict.fromkeys(prompt) if params.repetition_penalty != 1 else {}
        self._count = 0
        self.problem = ""
        """Why nothing can be drawn any more."""

    def accept(self, token: int, ends: bool) -> None:
        """Advances by a sampled token. ends: it ended the sample, so that nothing follows."""
        self._count += 1
        if self.params.frequency_penalty or self.params.presence_penalty:
            self._sampled[token] += 1
        if self.params.repetition_penalty != 1:
            self._seen[token] = None
        if self.matcher and not ends and not self.matcher.accept(token):
            self.problem = self.matcher.problem or "the grammar does not allow a sampled token"

    def apply(self, row: Float[np.ndarray, "tokens"], first: int) -> None:
        """Changes the logits of tokens from `first` on, in place, float32."""
        params, stop = self.params, first + len(row)

        def here(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            inside = (tokens >= first) & (tokens < stop)
            return tokens[inside] - first, inside

        if len(self._biased):
            places, inside = here(self._biased)
            row[places] += self._biases[inside]
        if self._seen:
            places, _ = here(np.fromiter(self._seen, np.int64, len(self._seen)))
            values = row[places]
            row[places] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        if self._sampled:
            places, inside = here(np.fromiter(self._sampled, np.int64, len(self._sampled)))
            counts = np.fromiter(self._sampled.values(), np.float32, len(self._sampled))[inside]
            row[places] -= params.frequency_penalty * counts + np.float32(params.presence_penalty)
        if self._count < params.min_tokens:
            row[here(self._end_ids)[0]] = -np.inf


def adjusted_logits(
    logits: Float[Tensor, "rows part"], adjustments: Sequence[Adjustment], part: VocabularyPart
) -> Float[Tensor, "rows part"]:
    """A float32 copy of the logits of a part of the vocabulary, as each row's adjustment changes them."""
    adjusted = logits.float().cpu().numpy() if logits.dtype != torch.float32 else logits.cpu().numpy().copy()
    for row, adjustment in zip(adjusted, adjustments, strict=True):
        adjustment.apply(row, part.first)
    matched = [(row, each.matcher) for row, each in enumerate(adjustments) if each.matcher is not None]
    if matched:
        bits = np.zeros((len(matched), -(-part.vocab // 32)), dtype=np.int32)
        for place, (_, matcher) in zip(bits, matched):
            matcher.fill_mask(place)
        allowed = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[:, part.first : part.stop]
        for (row, _), mask in zip(matched, allowed.view(bool)):
            adjusted[row][~mask] = -np.inf
    return torch.from_numpy(adjusted).to(logits.device)
