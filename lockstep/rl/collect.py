"""Asking the generator: rollouts to train on, and held-out ones to judge by."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch

from lockstep.config import RewardConfig, RLConfig
from lockstep.data import Tokenizer
from lockstep.errors import UserError
from lockstep.generate import Completion, Engine, SamplingParams
from lockstep.observe import log
from lockstep.rl.advantages import group_advantages
from lockstep.rl.environment import Environment, Example
from lockstep.rl.ledger import FAILED_REWARDS, Ledger
from lockstep.rl.rewards import Grader, failures, grade_here, refuse_too_many, totals
from lockstep.rl.rollouts import Rollout


def collect(
    examples: Sequence[Example],
    environment: Environment,
    engine: Engine,
    tokenizer: Tokenizer,
    config: RLConfig,
    step: int,
) -> list[Rollout]:
    """`samples_per_prompt` completions of each example, one group after the other.

    The draws are a function of (config.seed, step), whatever the engine's batches look like.
    """
    return _sample(examples, config.samples_per_prompt, [config.seed, step], environment, engine, tokenizer, config)


def assign_rewards(
    rollouts: Sequence[Rollout],
    environment: Environment,
    config: RewardConfig | None = None,
    grader: Grader | None = None,
) -> None:
    """Grades every rollout, with `grader` where one is given, else in this process; marks those whose reward failed.

    Raises UserError where a larger share than `failure_limit` failed, and as `totals` does.
    """
    config = config or RewardConfig()
    jobs = [(r.example, r.completion) for r in rollouts]
    outcomes = grader(jobs) if grader else grade_here(environment, jobs, config.seconds)
    refuse_too_many(outcomes, config.failure_limit)
    if said := failures(outcomes):
        log.warning("%s", said)
    for rollout, graded in zip(rollouts, totals(environment, jobs, outcomes)):
        rollout.rewards, rollout.reward, rollout.failure = graded.by_name, graded.total, graded.failure
        rollout.counts = not graded.failure or config.on_failure == "zero"


def without_failures(rollouts: Sequence[Rollout], ledger: Ledger) -> list[Rollout]:
    """The rollouts to train on: those that count, of groups in which two or more do. The ledger gets the others."""
    kept: list[Rollout] = []
    for _, members in groupby(rollouts, key=lambda r: r.group):
        counting = [r for r in members if r.counts]
        if len(counting) >= 2:
            kept += counting
        else:
            ledger.drop(FAILED_REWARDS)
    if not kept:
        raise UserError(
            f"no group of this step has two rewards that did not fail ({len(rollouts)} rollouts), so there is nothing "
            'to train on; mend the reward, or set rewards.on_failure = "zero"'
        )
    return kept


def assign_advantages(rollouts: Sequence[Rollout], normalize: bool) -> None:
    """Group-relative advantages; the rollouts stand group by group."""
    for _, members in groupby(rollouts, key=lambda r: r.group):
        group = list(members)
        rewards = torch.tensor([[r.reward for r in group]])
        for rollout, advantage in zip(group, group_advantages(rewards, normalize)[0].tolist()):
            rollout.advantage = advantage


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
