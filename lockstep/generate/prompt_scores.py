"""Log-probabilities of prompts, from the rows that compute them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lockstep.generate.sampling_params import PromptScores

if TYPE_CHECKING:
    from lockstep.generate.batch import StepBatch
    from lockstep.generate.runner import Runner
    from lockstep.generate.scheduler import Chunk


class PromptRows(NamedTuple):
    """Rows of one step that predict tokens of a prompt whose log-probabilities are not known yet."""

    scores: PromptScores
    row: int
    """The step's row that predicts the first of them."""
    first: int
    """The first token's position in the prompt."""
    length: int


def prompt_rows(chunks: Sequence[Chunk]) -> list[PromptRows]:
    """Those of a step's chunks."""
    found, row = [], 0
    for chunk in chunks:
        scores = chunk.sequence.prompt_scores
        if scores is not None and not scores.complete:
            begin = max(chunk.start, len(scores.logprobs))
            count = min(chunk.start + chunk.count, len(scores.tokens) - 1) - begin
            if count > 0:
                found.append(PromptRows(scores, row + begin - chunk.start, begin + 1, count))
        row += chunk.rows
    return found


def score_prompts(batch: StepBatch, hidden: Float[Tensor, "rows dim"], runner: Runner, most_rows: int) -> None:
    """Adds the log-probabilities that a step has computed to those of its `prompt_rows`. most_rows: whose logits are in
    memory at a time."""
    requested = batch.prompt_rows
    rows = [each.row + place for each in requested for place in range(each.length)]
    targets = [token for each in requested for token in each.scores.tokens[each.first : each.first + each.length]]
    counts = [each.scores.top for each in requested for _ in range(each.length)]
    results: Iterator[tuple[float, int, list[tuple[int, float]]]] = iter(
        [
            result
            for start in range(0, len(rows), most_rows)
            for result in _scores(
                batch, hidden, runner, *(each[start : start + most_rows] for each in (rows, targets, counts))
            )
        ]
    )
    for each in requested:
        each.scores.extend(each.first, [next(results) for _ in range(each.length)])


def _scores(
    batch: StepBatch, hidden: Tensor, runner: Runner, rows: list[int], targets: list[int], counts: list[int]
) -> list[tuple[float, int, list[tuple[int, float]]]]:
    """Log-probability and rank of each row's target, and the likeliest tokens."""
    device = hidden.device
    logits = runner.logits(batch, hidden, torch.tensor(rows, device=device))
    log_probs, ranks = runner.sampler.ranked_log_probs(logits, torch.tensor(targets, device=device))
    tops = runner.sampler.top_log_probs(logits, torch.ones(len(rows), device=device), counts)
    return list(zip(log_probs.tolist(), ranks.tolist(), tops, strict=True))
