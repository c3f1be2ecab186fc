"""Asking the generator: rollouts to train on, and held-out ones to judge by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from lockstep.config import Algorithm, RewardConfig, RLConfig
from lockstep.data import Tokenizer
from lockstep.errors import UserError
from lockstep.generate import Completion, Engine, SamplingParams
from lockstep.observe import log
from lockstep.rl.algorithms import (
    best_of_group,
    distillation_advantages,
    divergences,
    generalized_advantages,
    group_advantages,
    leave_one_out_advantages,
    overlong_penalty,
    rewards_to_go,
    value_returns,
    whitened,
)
from lockstep.rl.environment import Environment, Example
from lockstep.rl.rewards import Grader, Outcome, failures, grade_here, totals
from lockstep.rl.rollouts import Rollout


def collect(
    examples: Sequence[Example],
    environment: Environment,
    engine: Engine,
    tokenizer: Tokenizer,
    config: RLConfig,
    step: int,
    extra_round: int = 0,
) -> list[Rollout]:
    """`samples_per_prompt` completions of each example, one group after the other.

    The draws are a function of (config.seed, step) and of the round of dynamic sampling, whatever the engine's batches
    look like.
    """
    seed = [config.seed, step, extra_round] if extra_round else [config.seed, step]
    return _sample(examples, config.samples_per_prompt, seed, environment, engine, tokenizer, config)


def assign_rewards(
    rollouts: Sequence[Rollout],
    environment: Environment,
    config: RewardConfig | None = None,
    grader: Grader | None = None,
) -> list[Outcome]:
    """Grades every rollout, with `grader` where one is given, else in this process; marks those whose reward failed.

    Returns what the rewards came to, for `refuse_too_many`. Raises UserError as `totals` does.
    """
    config = config or RewardConfig()
    jobs = [(r.example, r.completion) for r in rollouts]
    outcomes = grader(jobs) if grader else grade_here(environment, jobs, config.seconds)
    if said := failures(outcomes):
        log.warning("%s", said)
    for rollout, graded in zip(rollouts, totals(environment, jobs, outcomes)):
        rollout.rewards, rollout.reward, rollout.failure = graded.by_name, graded.total, graded.failure
        rollout.counts = not graded.failure or config.on_failure == "zero"
    return outcomes


def charge_overlong(rollouts: Sequence[Rollout], limit: int, share: float) -> None:
    """Adds the penalty of completions that use the last `share` of `limit` tokens, as a reward named `overlong`."""
    for rollout in rollouts if share > 0 else ():
        rollout.rewards["overlong"] = penalty = overlong_penalty(len(rollout.token_ids), limit, share)
        rollout.reward += penalty


def assign_advantages(rollouts: Sequence[Rollout], algorithm: Algorithm) -> None:
    """Advantages by `algorithm.advantage`; the rollouts stand group by group.

    Rewards, and `reference_logprobs`, `teacher_logprobs` and `values` where the algorithm takes them, have been
    assigned.
    """
    if algorithm.advantage == "teacher":
        _assign(rollouts, [distillation_advantages(r.logprobs, r.teacher_logprobs) for r in rollouts])
        return
    charges = _charges(rollouts, algorithm)
    if algorithm.advantage == "gae":
        estimates = [_estimated(rollout, own, algorithm) for rollout, own in zip(rollouts, charges)]
        _assign(rollouts, whitened(estimates) if algorithm.normalize_advantages else estimates)
        return
    if algorithm.advantage == "batch":
        to_go = [rewards_to_go(r.reward, own) for r, own in zip(rollouts, charges)]
        _assign(rollouts, whitened(to_go, algorithm.normalize_advantages))
        return
    for _, members in groupby(zip(rollouts, charges), key=lambda member: member[0].group):
        group = list(members)
        # A group alone: of one whose rewards failed in part, fewer are left than of others.
        rewards = torch.tensor([[r.reward - math.fsum(own) for r, own in group]])
        for (rollout, _), advantage in zip(group, _relative(rewards, algorithm)[0].tolist()):
            rollout.advantage = advantage
    if algorithm.advantage == "group_batch":
        _assign(rollouts, whitened([r.advantages_of_tokens() for r in rollouts], algorithm.normalize_advantages))


def _estimated(rollout: Rollout, charges: Sequence[float], algorithm: Algorithm) -> list[float]:
    """By the values: the completion's reward is earned with its last token, the charges at their own."""
    rewards = [-charge for charge in charges]
    rewards[-1] += rollout.reward
    advantages = generalized_advantages(rewards, rollout.values, algorithm.gae_gamma, algorithm.gae_lambda)
    rollout.returns = value_returns(advantages, rollout.values)
    return advantages


def _relative(rewards: Tensor, algorithm: Algorithm) -> Tensor:
    if algorithm.advantage == "leave_one_out":
        return leave_one_out_advantages(rewards)
    if algorithm.advantage == "best":
        return best_of_group(rewards)
    return group_advantages(rewards, algorithm.advantage == "group" and algorithm.normalize_advantages)


def _charges(rollouts: Sequence[Rollout], algorithm: Algorithm) -> list[list[float]]:
    """What the KL divergence takes from the reward at each token."""
    if algorithm.kl_in == "loss" or algorithm.kl_coefficient == 0:
        return [[0.0] * len(r.token_ids) for r in rollouts]
    own, reference = (
        torch.tensor([x for r in rollouts for x in logprobs(r)])
        for logprobs in (lambda r: r.logprobs, lambda r: r.reference_logprobs)
    )
    charged = divergences(own, reference, algorithm.kl_estimator).double() * algorithm.kl_coefficient
    return [part.tolist() for part in charged.split([len(r.token_ids) for r in rollouts])]


def _assign(rollouts: Sequence[Rollout], of_tokens: Sequence[list[float]]) -> None:
    for rollout, own in zip(rollouts, of_tokens):
        rollout.token_advantages = own
        rollout.advantage = math.fsum(own) / max(len(own), 1)


def evaluate(
    examples: Sequence[Example],
    environment: Environment,
    engine: Engine,
    tokenizer: Tokenizer,
    config: RLConfig,
    grader: Grader | None = None,
) -> list[Rollout]:
    """Graded completions of held-out examples: one each, sampled as in training.

    The draws depend on (config.seed, example) alone, so that two validations differ by the weights only.
    """
    rollouts = _sample(examples, 1, [config.seed, 0], environment, engine, tokenizer, config)
    assign_rewards(rollouts, environment, config.rewards, grader)
    return rollouts


def _sample(
    examples: Sequence[Example],
    samples: int,
    seed: list[int],
    environment: Environment,
    engine: Engine,
    tokenizer: Tokenizer,
    config: RLConfig,
) -> list[Rollout]:
    prompts = [encode_prompt(tokenizer, e, engine, config.max_new_tokens) for e in examples]
    params = [
        SamplingParams(
            max_tokens=config.max_new_tokens,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            min_p=config.min_p,
            n=samples,
            seed=draw,
            stop=environment.stop,
        )
        for draw in np.random.default_rng(seed).integers(2**62, size=len(examples)).tolist()
    ]
    return [
        Rollout(
            example=example,
            group=group,
            prompt_ids=prompt,
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            cut_logprobs=completion.cut_logprobs,
            finish_reason=completion.finish_reason,
            completion=completion_text(tokenizer, completion),
            version=engine.weights_version,
        )
        for group, (example, prompt, completions) in enumerate(zip(examples, prompts, engine.generate(prompts, params)))
        for completion in completions
    ]


def encode_prompt(tokenizer: Tokenizer, example: Example, engine: Engine, max_new_tokens: int) -> list[int]:
    """The prompt's tokens. Raises UserError if prompt and completion do not fit the context."""
    tokens = tokenizer.encode(example.prompt)
    limit = engine.model.config.max_positions
    if not tokens or len(tokens) + max_new_tokens > limit:
        raise UserError(
            f"example {example.name}: its prompt of {len(tokens)} tokens and max_new_tokens {max_new_tokens} must "
            f"together be between 1 and the context of {limit}; shorten one of them"
        )
    return tokens


def completion_text(tokenizer: Tokenizer, completion: Completion) -> str:
    """What the environment grades: the text without end-of-text tokens."""
    return tokenizer.decode([t for t in completion.token_ids if t != tokenizer.eos_id])
