"""From graded rollouts to the micro-batches that the trainer steps on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lockstep import ops
from lockstep.config import RLConfig
from lockstep.model import Decoder, ScoringModel
from lockstep.rl.losses import PolicyLossInputs, policy_loss, token_weights
from lockstep.rl.parity import Parity
from lockstep.rl.rollouts import Rollout
from lockstep.train.packing import PackedRow, pack, split_by_tokens, target_log_probs


@dataclass
class PolicyBatch:
    """One micro-batch: packed rollouts, whose targets are the sampled tokens."""

    rollouts: Sequence[Rollout]
    row: PackedRow
    old_log_probs: Float[Tensor, "targets"]
    """The generator's own, from sampling."""
    advantages: Float[Tensor, "targets"]
    weights: Float[Tensor, "targets"]
    """Share of each token in the loss; over the whole step they add up to 1."""
    reference_log_probs: Float[Tensor, "targets"] | None


def policy_batches(
    rollouts: Sequence[Rollout], config: RLConfig, reference: Decoder | None = None, device: str | torch.device = "cpu"
) -> list[PolicyBatch]:
    """Packs rollouts into micro-batches of at most `train.tokens_per_microbatch` tokens."""
    weights = token_weights([len(r.token_ids) for r in rollouts], config.loss_average)
    lengths = [len(r.prompt_ids) + len(r.token_ids) for r in rollouts]
    batches = []
    for part in split_by_tokens(lengths, config.train.tokens_per_microbatch):
        chosen = rollouts[part]
        row = pack([r.prompt_ids + r.token_ids for r in chosen], [len(r.prompt_ids) for r in chosen], device)
        reference_log_probs = None
        if reference is not None:
            with torch.no_grad():
                reference_log_probs, _ = target_log_probs(reference, row, config.temperature)
        counts = torch.tensor([len(r.token_ids) for r in chosen])
        batches.append(
            PolicyBatch(
                rollouts=chosen,
                row=row,
                old_log_probs=torch.tensor([x for r in chosen for x in r.logprobs], device=device),
                advantages=torch.tensor([r.advantage for r in chosen]).repeat_interleave(counts).to(device),
                weights=torch.cat(weights[part]).to(device),
                reference_log_probs=reference_log_probs,
            )
        )
    return batches


class PolicyLoss:
    """The loss of a micro-batch, as `Trainer.step` calls it; keeps the metrics and the parity of one step."""

    def __init__(self, config: RLConfig, compare: bool):
        self.config = config
        self.compare = compare
        self.parity = Parity()
        self.sums: dict[str, float] = {}
        self.ratio_max = 0.0

    def __call__(self, model: ScoringModel, batch: PolicyBatch) -> Tensor:
        log_probs, entropy = target_log_probs(model, batch.row, self.config.temperature)
        if self.compare:
            self.parity.compare(batch.old_log_probs, log_probs, batch.rollouts)
        loss, metrics = policy_loss(
            PolicyLossInputs(
                log_probs=log_probs,
                old_log_probs=batch.old_log_probs,
                advantages=batch.advantages,
                weights=batch.weights,
                reference_log_probs=batch.reference_log_probs,
            ),
            clip_low=self.config.clip_low,
            clip_high=self.config.clip_high,
            kl_coefficient=self.config.kl_coefficient,
        )
        metrics["policy/entropy"] = ops.total(entropy * batch.weights)
        self.ratio_max = max(self.ratio_max, float(metrics.pop("policy/ratio_max")))
        for name, value in metrics.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)
        return loss

    def metrics(self) -> dict[str, float]:
        return {"policy/ratio_max": self.ratio_max, **self.sums}
