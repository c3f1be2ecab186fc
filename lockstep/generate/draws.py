"""From a step's tensors to the tokens that it samples: the model, then a draw after each sampled row."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep import ops
from lockstep.generate.adjustments import Adjustment, adjusted_logits
from lockstep.generate.batch import StepBatch
from lockstep.generate.prompt_scores import score_prompts
from lockstep.generate.routes import routes_of_rows, written
from lockstep.generate.runner import Runner

LOGITS_ELEMENTS = 1 << 24
"""Logits in memory at a time: 64 MB in float32."""


class Draw(NamedTuple):
    """A token that is sampled after a row."""

    token: int
    log_prob: float
    truncated_log_prob: float
    """Under the distribution that it was drawn from."""
    top: list[tuple[int, float]]
    """The likeliest tokens and their log-probabilities, as many as requested."""
    route: str
    """The experts of the row, in the form that its request specifies; empty if not requested."""


def draw(batch: StepBatch, runner: Runner) -> list[Draw]:
    """Runs the model; scores `batch.prompt_rows`, and samples after each row of `batch.sampled_rows`. `batch` is on the
    CPU."""
    model, params = runner.model, batch.params
    hidden = None
    with _recorded_routes(batch, runner) as recorded:
        decoded = runner.decode(batch)
        if decoded is None:
            batch = batch.to(model.device)
            hidden = runner.hidden(batch)
    routes = _routes(recorded, batch)
    if decoded is not None and not any(p.truncates or p.top_logprobs for p in params):
        drawn = zip(decoded.tokens.tolist(), decoded.log_probs.tolist(), routes, strict=True)
        return [Draw(token, log_prob, log_prob, [], route) for token, log_prob, route in drawn]
    batch = batch.to(model.device)
    runner.copy(batch)
    rows = max(1, LOGITS_ELEMENTS // model.config.vocab_size)
    if batch.prompt_rows:
        assert hidden is not None
        score_prompts(batch, hidden, runner, rows)
    draws: list[Draw] = []
    for start in range(0, len(params), rows):
        part = slice(start, start + rows)
        if decoded is not None:
            logits = decoded.logits[part]
        else:
            assert hidden is not None
            logits = runner.logits(batch, hidden, batch.sampled_rows[part])
        sampling = [values[part] for values in batch.sampling]
        tokens, log_probs, truncated = _sample(logits, sampling, batch.adjustments[part], runner)
        tops: list[list[tuple[int, float]]] = [[]] * len(params[part])
        if any(counts := [p.top_logprobs for p in params[part]]):
            tops = runner.sampler.top_log_probs(logits, sampling[0], counts)
        draws += map(Draw, tokens.tolist(), log_probs.tolist(), truncated.tolist(), tops, routes[part])
    return draws


def _sample(
    logits: Tensor, sampling: list[Tensor], adjustments: list[Adjustment | None], runner: Runner
) -> tuple[Tensor, Tensor, Tensor]:
    """A token per row, its log-probability among all tokens, and that under the distribution it was drawn from."""
    sampler = runner.sampler
    places = [row for row, each in enumerate(adjustments) if each is not None]
    if not places:
        drawn: tuple[Tensor, Tensor, Tensor] = sampler.sample(logits, *sampling)
        return drawn
    others = [row for row, each in enumerate(adjustments) if each is None]
    chosen = logits[places]
    changed = adjusted_logits(chosen, [each for each in adjustments if each], runner.vocabulary)
    parts = [sampler.sample(chosen, *(values[places] for values in sampling), adjusted=changed)]
    if others:
        parts.append(sampler.sample(logits[others], *(values[others] for values in sampling)))
    order = torch.tensor(places + others).argsort()
    tokens, log_probs, truncated = (torch.cat(each)[order] for each in zip(*parts))
    return tokens, log_probs, truncated


def _recorded_routes(batch: StepBatch, runner: Runner) -> AbstractContextManager[list[Tensor]]:
    """Records routes if requested; otherwise an outer recorder stays active."""
    requested = any(each.routes for each in batch.params) and runner.model.config.mixtures
    return ops.recorded_routes() if requested else nullcontext([])


def _routes(recorded: list[Tensor], batch: StepBatch) -> list[str]:
    """The routes of each sampled row, in the form that its request specifies."""
    forms = [params.routes for params in batch.params] if recorded else []
    if not any(forms):
        return [""] * len(batch.sampled_rows)
    routes = routes_of_rows(recorded, batch.sampled_rows, len(batch.tokens))
    return [written(route, form) for route, form in zip(routes, forms, strict=True)]
