"""The policy's loss on micro-batches, and the comparison of the trainer with the generator in the same forward pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from lockstep import ops
from lockstep.config import Algorithm
from lockstep.generate.routes import routes_in
from lockstep.model import Decoder, ScoringModel
from lockstep.parallel.tensor_group import tensor_group_of
from lockstep.rl.algorithms import LossFunction, PolicyLossInputs, objective
from lockstep.rl.rollouts.packing import PolicyBatch
from lockstep.rl.rollouts.records import Rollout
from lockstep.rl.rollouts.replicas import Replicas
from lockstep.rl.scoring.parity import Parity
from lockstep.rl.scoring.routes import different_routes, routes_to_replay, trainer_routes
from lockstep.rl.scoring.value_head import ValueHead
from lockstep.train.context import targets_of_others
from lockstep.train.packing import predicting_states, target_log_probs


class PolicyLoss:
    """The loss of a micro-batch, as called by `Trainer.step`; collects the metrics and the parity of an update."""

    def __init__(
        self,
        algorithm: Algorithm,
        temperature: float,
        compare: bool,
        mask_truncated: bool = False,
        replay_routes: bool = False,
        value_head: ValueHead | None = None,
        own: LossFunction | None = None,
    ):
        """compare: whether to compare the trainer's log-probabilities and routes with the generator's.

        mask_truncated: as in `Packing`. replay_routes: whether tokens go to the generator's experts. own: the user's
        loss, in place of the algorithm's.
        """
        self.algorithm, self.temperature, self.own = algorithm, temperature, own
        self.sums_to_one = algorithm.loss_average != "budget" and not mask_truncated
        """Whether the weights of the step's tokens add up to 1."""
        self.compare, self.replay_routes, self.value_head = compare, replay_routes, value_head
        self.parity = Parity()
        self.routes_replayed = [0, 0]
        """One per token and mixture; and those that the trainer's router would have chosen differently."""
        self.of_microbatches: dict[str, list[float]] = {}
        """Each metric of each micro-batch."""
        self.weights: list[float] = []
        """Total weight of each micro-batch's tokens in the loss."""

    def __call__(self, model: ScoringModel, batch: PolicyBatch) -> Tensor:
        with ops.recorded_routes() as recorded:
            states, replayed = self._states(model, batch)
        log_probs, entropies = target_log_probs(model, batch.row, self.temperature, states)
        if (shared := targets_of_others(batch.row)) is not None:
            log_probs, entropies = shared.whole(log_probs), shared.whole(entropies)
        values = self.value_head(states) if self.value_head else None
        if values is not None and shared is not None:
            values = shared.whole(values)
        if batch.idle:
            return log_probs.sum() * 0.0
        if self.compare:
            self.parity.compare(batch.old_log_probs, log_probs, batch.rollouts, batch.current)
            if isinstance(model, Decoder) and model.config.mixtures:  # a stage's come after the step (`stage_routes`)
                row, rows, group = batch.row, len(batch.row.tokens), tensor_group_of(model)
                if replayed is not None:
                    self.count_routes(batch, different_routes(replayed, row, rows, group))
                else:
                    chosen = routes_in(trainer_routes(recorded, row, rows, group))
                    self.parity.compare_routes(batch.rollouts, chosen, model.config, batch.current)
            _store(batch.rollouts, log_probs.detach(), entropies.detach())
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
        loss, metrics = objective(inputs, self.algorithm, self.own)
        self.weights.append(float(ops.total(batch.weights)))
        for name, value in metrics.items():
            self.of_microbatches.setdefault(name, []).append(float(value))
        # Ranks that share a row each have the full loss, and the gradient of their own tokens: the loss counts once.
        return loss if shared is None or shared.is_first else loss - loss.detach()

    def _states(self, model: ScoringModel, batch: PolicyBatch) -> tuple[Tensor, ops.ReplayedRoutes | None]:
        """Hidden states of the row's predicting positions, with the generator's routes if they are replayed."""
        if not (self.replay_routes and isinstance(model, Decoder)):
            return predicting_states(model, batch.row), None
        rows, group = len(batch.row.tokens), tensor_group_of(model)
        replayed = routes_to_replay(batch.rollouts, batch.row, model.config, rows, group)
        with ops.replayed_routes(replayed):
            return predicting_states(model, batch.row), replayed

    def count_routes(self, batch: PolicyBatch, different: Bool[Tensor, "targets mixtures"]) -> None:
        """Counts the replayed routes of tokens sampled from the current weights."""
        different = different if batch.current is None else different[batch.current]
        self.routes_replayed[0] += different.numel()
        self.routes_replayed[1] += int(different.sum())

    def combine_ranks(self, batches: Sequence[PolicyBatch], share: Sequence[PolicyBatch], replicas: Replicas) -> None:
        """Combines the results of all ranks, here and in the rollouts of `batches`, on every rank.

        batches: of all ranks. share: those that this rank has computed.
        """
        world = replicas.world
        if world.mesh is None:
            return
        reports = not (world.coordinate("tensor") or world.coordinate("context")) and bool(self.of_microbatches)
        of_ranks = replicas.gather([self._plain(batches, share)] if reports else [])
        results = [result for of_rank in of_ranks for result in of_rank]
        names = results[0]["metrics"]
        self.of_microbatches = {name: [v for each in results for v in each["metrics"][name]] for name in names}
        self.weights = [weight for each in results for weight in each["weights"]]
        self.parity.combine([each["parity"] for each in results])
        self.routes_replayed = [sum(counts) for counts in zip(*(each["routes_replayed"] for each in results))]
        for each in results:
            for batch, number, entropies, log_probs in each["scores"]:
                scores = batches[batch].rollouts[number].scores
                scores.entropies, scores.trainer_logprobs = entropies, log_probs

    def _plain(self, batches: Sequence[PolicyBatch], share: Sequence[PolicyBatch]) -> dict[str, Any]:
        """JSON-able. A rollout is identified by its micro-batch and its index there."""
        scores = []
        if self.compare:
            computed = {id(rollout) for batch in share if not batch.idle for rollout in batch.rollouts}
            for index, batch in enumerate(batches):
                for number, rollout in enumerate(batch.rollouts):
                    if id(rollout) in computed:
                        scores.append([index, number, rollout.scores.entropies, rollout.scores.trainer_logprobs])
        return {
            "metrics": self.of_microbatches,
            "weights": self.weights,
            "parity": self.parity.plain(),
            "routes_replayed": self.routes_replayed,
            "scores": scores,
        }

    @property
    def ratio_max(self) -> float:
        """The largest importance ratio so far."""
        return max(self.of_microbatches.get("policy/ratio_max", [0.0]))

    def metrics(self) -> dict[str, float]:
        """Over all micro-batches so far, with sums as weighted means; independent of their order."""
        # Where the weights add up to 1, dividing by their rounded sum would change bits.
        weight = 1.0 if self.sums_to_one else math.fsum(self.weights)
        means = {name: _combined(name, values, weight or 1.0) for name, values in self.of_microbatches.items()}
        for name in [n for n in means if n.endswith("/ratio_square")]:
            stem, square = name.removesuffix("_square"), means.pop(name)
            means[f"{stem}_effective"] = means[f"{stem}_mean"] * means[f"{stem}_mean"] / square if square else 0.0
        routes, different = self.routes_replayed
        return means | ({"routes/different": different / routes} if routes else {})


def _store(rollouts: Sequence[Rollout], log_probs: Float[Tensor, "tokens"], entropies: Float[Tensor, "tokens"]) -> None:
    """Stores the trainer's results for each token; its log-probabilities only if they differ from the generator's."""
    remaining, entropies_left = iter(log_probs.tolist()), iter(entropies.tolist())
    for rollout in rollouts:
        trainer = list(islice(remaining, rollout.num_sampled))
        rollout.scores.trainer_logprobs = trainer if trainer != rollout.logprobs else []
        rollout.scores.entropies = list(islice(entropies_left, rollout.num_sampled))


def _combined(name: str, values: Sequence[float], weight: float) -> float:
    if name.endswith("_max"):
        return max(values)
    return min(values) if name.endswith("_min") else math.fsum(values) / weight
