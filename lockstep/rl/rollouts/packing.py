"""From graded rollouts to the micro-batches of a training step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lockstep import ops
from lockstep.config import RLConfig, algorithm_of
from lockstep.generate.routes import routes_in
from lockstep.model import Decoder, ScoringModel
from lockstep.parallel.tensor_group import tensor_group_of
from lockstep.rl.algorithms import PolicyLossInputs, objective, token_weights
from lockstep.rl.rollouts.microbatches import microbatches, shares_prompts
from lockstep.rl.rollouts.records import Rollout, episodes_of
from lockstep.rl.scoring.parity import Parity
from lockstep.rl.scoring.routes import ReplayFindings, different_routes, own_routes, routes_to_replay
from lockstep.rl.scoring.value_head import ValueHead
from lockstep.train.context import targets_of_others
from lockstep.train.packing import PackedRow, predicting_states, target_log_probs


@dataclass
class PolicyBatch:
    """One micro-batch of packed rollouts, whose targets are the sampled tokens."""

    rollouts: Sequence[Rollout]
    row: PackedRow
    old_log_probs: Float[Tensor, "targets"]
    """The generator's own, from sampling, before any cut."""
    advantages: Float[Tensor, "targets"]
    weights: Float[Tensor, "targets"]
    """Weight of each token in the loss; over the step they add up to 1, except with `loss_average = "budget"` or masked
    completions, whose tokens weigh 0."""
    reference_log_probs: Float[Tensor, "targets"] | None
    truncated_log_probs: Float[Tensor, "targets"] | None = None
    """The generator's own under the cut distribution that the tokens were drawn from; None: nothing was cut."""
    old_values: Float[Tensor, "targets"] | None = None
    """V of each token's state before the step, if there is a value function."""
    returns: Float[Tensor, "targets"] | None = None
    """The targets of the values."""
    before_step: Float[Tensor, "targets"] | None = None
    """The trainer's log-probabilities in the first update, for off-policy corrections."""
    current: Bool[Tensor, "targets"] | None = None
    """Which tokens were sampled from the weights that the step starts with; None: all."""
    without_replay: Float[Tensor, "targets"] | None = None
    """The trainer's log-probabilities without replayed routes, if they are measured."""
    idle: bool = False
    """Whether it is a filler for a rank that has none of the step's micro-batches left: it contributes nothing."""


def policy_batches(
    rollouts: Sequence[Rollout],
    config: RLConfig,
    device: str | torch.device = "cpu",
    budget: int = 0,
    version: int | None = None,
) -> list[PolicyBatch]:
    """Packs rollouts into micro-batches of at most `budget` tokens, of whole completions.

    budget: 0 means `train.tokens_per_microbatch`. version: of the weights at the start of the step; None: the one that
    sampled them all.
    """
    weights = _weights(rollouts, config)
    batches = []
    for plan in microbatches(rollouts, budget or config.train.tokens_per_microbatch, shares_prompts(config)):
        chosen = plan.rollouts
        stale = [] if version is None else [age for rollout in chosen for age in rollout.staleness(version)]
        batches.append(
            PolicyBatch(
                rollouts=chosen,
                current=torch.tensor([age == 0 for age in stale], device=device) if any(stale) else None,
                row=plan.packed(device),
                old_log_probs=torch.tensor([x for r in chosen for x in r.logprobs], device=device),
                advantages=torch.tensor([a for r in chosen for a in r.advantages_of_tokens()], device=device),
                weights=torch.cat([weights[number] for number in plan.numbers]).to(device),
                reference_log_probs=_optional([x for r in chosen for x in r.scores.reference_logprobs], device),
                truncated_log_probs=_optional([x for r in chosen for x in r.truncated_logprobs], device),
                old_values=_optional([x for r in chosen for x in r.scores.values], device),
                returns=_optional([x for r in chosen for x in r.scores.returns], device),
            )
        )
    return batches


def _optional(values: list[float], device: str | torch.device) -> Tensor | None:
    """None if no rollout has such values."""
    return torch.tensor(values, device=device) if values else None


def _weights(rollouts: Sequence[Rollout], config: RLConfig) -> list[Tensor]:
    """Weights of each rollout's sampled tokens; the rows of an episode are one completion, truncated if its last is."""
    episodes = episodes_of(rollouts)
    lengths = [[r.num_sampled for r in rows] for rows in episodes]
    masked = [config.mask_truncated_completions and rows[-1].finish_reason == "length" for rows in episodes]
    totals, average = [sum(own) for own in lengths], algorithm_of(config).loss_average
    whole = token_weights(totals, average, config.max_new_tokens, masked)
    return [part for of_rows, own in zip(whole, lengths) for part in of_rows.split(own)]


def masking_metrics(batches: Sequence[PolicyBatch], config: RLConfig) -> dict[str, float]:
    """The number of sampled tokens that nothing is learned from, if truncated completions are masked."""
    if not config.mask_truncated_completions:
        return {}
    return {"rollout/masked_tokens": sum(int((batch.weights == 0).sum()) for batch in batches)}


def packing_metrics(batches: Sequence[PolicyBatch]) -> dict[str, float]:
    """The number of micro-batches, and fractions of what goes through the model.

    `rollout/padding`: computed positions that hold no token. `rollout/prompt_tokens_shared`: prompt tokens that are not
    recomputed.
    """
    rows = sum(len(batch.row.tokens) for batch in batches)
    left_out = sum(sum(batch.row.left_out or ()) for batch in batches)
    held = sum(sum(batch.row.lengths) for batch in batches) - left_out
    prompts = sum(len(r.prompt_ids) for batch in batches for r in batch.rollouts)
    return {
        "rollout/microbatches": len(batches),
        "rollout/padding": 1 - held / rows,
        "rollout/prompt_tokens_shared": left_out / prompts,
    }


class PolicyLoss:
    """The loss of a micro-batch, as called by `Trainer.step`; collects the metrics and the parity of an update."""

    def __init__(self, config: RLConfig, compare: bool, critic: ValueHead | None = None):
        self.temperature = config.temperature
        self.algorithm = algorithm_of(config)
        self.sums_to_one = self.algorithm.loss_average != "budget" and not config.mask_truncated_completions
        self.compare = compare
        self.critic = critic
        self.parity = Parity()
        self.router_replay = config.router_replay
        self.replay = ReplayFindings()
        self._measured = False
        self.found: dict[str, list[float]] = {}
        """Each metric of each micro-batch."""
        self.weights: list[float] = []
        """Total weight of each micro-batch's tokens in the loss."""

    def __call__(self, model: ScoringModel, batch: PolicyBatch) -> Tensor:
        with ops.recorded_routes() as recorded:
            states, replayed = self._states(model, batch)
        log_probs, entropies = target_log_probs(model, batch.row, self.temperature, states)
        if (shared := targets_of_others(batch.row)) is not None:
            log_probs, entropies = shared.whole(log_probs), shared.whole(entropies)
        values = self.critic(states) if self.critic else None
        if values is not None and shared is not None:
            values = shared.whole(values)
        if batch.idle:
            return log_probs.sum() * 0.0
        if self.compare:
            self.parity.compare(batch.old_log_probs, log_probs, batch.rollouts, batch.current)
            if batch.without_replay is not None:
                self.replay.measure(batch.old_log_probs, log_probs, batch.without_replay, batch.current)
            if isinstance(model, Decoder) and model.config.mixtures:  # a stage's come after the step (`stage_routes`)
                row, rows, group = batch.row, len(batch.row.tokens), tensor_group_of(model)
                if replayed is not None:
                    self.replay.count(different_routes(replayed, row, rows, group), batch.current)
                else:
                    chosen = routes_in(own_routes(recorded, row, rows, group))
                    self.parity.compare_routes(batch.rollouts, chosen, model.config, batch.current)
            _note(batch.rollouts, log_probs.detach(), entropies.detach())
        old, sampler = batch.old_log_probs, None
        if self.algorithm.off_policy != "none":
            if batch.before_step is None:
                batch.before_step = log_probs.detach()
            old = batch.before_step
            sampler = batch.old_log_probs if batch.truncated_log_probs is None else batch.truncated_log_probs
        inputs = PolicyLossInputs(
            log_probs=log_probs,
            old_log_probs=old,
            advantages=batch.advantages,
            weights=batch.weights,
            reference_log_probs=batch.reference_log_probs,
            lengths=[r.num_sampled for r in batch.rollouts],
            sampler_log_probs=sampler,
            entropies=entropies,
            values=values,
            old_values=batch.old_values,
            returns=batch.returns,
        )
        loss, metrics = objective(inputs, self.algorithm)
        self.weights.append(float(ops.total(batch.weights)))
        for name, value in metrics.items():
            self.found.setdefault(name, []).append(float(value))
        # Ranks that share a row each have the full loss, and the gradient of their own tokens: the loss counts once.
        return loss if shared is None or shared.is_first else loss - loss.detach()

    def _states(self, model: ScoringModel, batch: PolicyBatch) -> tuple[Tensor, ops.ReplayedRoutes | None]:
        """Hidden states of the row's predicting positions, with the generator's routes if they are replayed."""
        if not (self.router_replay and isinstance(model, Decoder)):
            return predicting_states(model, batch.row), None
        if self.compare and not self._measured:
            self.measure_without_replay(model, batch)
        rows, group = len(batch.row.tokens), tensor_group_of(model)
        replayed = routes_to_replay(batch.rollouts, batch.row, model.config, rows, group)
        with ops.replayed_routes(replayed):
            return predicting_states(model, batch.row), replayed

    @torch.no_grad()
    def measure_without_replay(self, model: ScoringModel, batch: PolicyBatch) -> Tensor:
        """Computes `batch.without_replay`. Only for the first micro-batch: it takes another forward pass."""
        self._measured = True
        log_probs = target_log_probs(model, batch.row, self.temperature)[0]
        shared = targets_of_others(batch.row)
        batch.without_replay = log_probs if shared is None else shared.gather(log_probs)
        return log_probs.sum()

    @property
    def ratio_max(self) -> float:
        """The largest importance ratio so far."""
        return max(self.found.get("policy/ratio_max", [0.0]))

    def metrics(self) -> dict[str, float]:
        """Over all micro-batches so far, with sums as weighted means; the order in which they came does not matter."""
        # Where the weights add up to 1, dividing by their rounded sum would change bits.
        weight = 1.0 if self.sums_to_one else math.fsum(self.weights)
        means = {name: _joined(name, values, weight or 1.0) for name, values in self.found.items()}
        for name in [n for n in means if n.endswith("_square")]:
            stem, square = name.removesuffix("_square"), means.pop(name)
            means[f"{stem}_effective"] = means[f"{stem}_mean"] * means[f"{stem}_mean"] / square if square else 0.0
        return means | self.replay.metrics()


def _note(rollouts: Sequence[Rollout], log_probs: Float[Tensor, "tokens"], entropies: Float[Tensor, "tokens"]) -> None:
    """Stores the trainer's results for each token; its log-probabilities only if they differ from the generator's."""
    lengths = [r.num_sampled for r in rollouts]
    for rollout, own, entropy in zip(rollouts, log_probs.split(lengths), entropies.split(lengths)):
        rollout.scores.entropies, found = entropy.tolist(), own.tolist()
        rollout.scores.trainer_logprobs = found if found != rollout.logprobs else []


def _joined(name: str, values: Sequence[float], weight: float) -> float:
    if name.endswith("_max"):
        return max(values)
    return min(values) if name.endswith("_min") else math.fsum(values) / weight
