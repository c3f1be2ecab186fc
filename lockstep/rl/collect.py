"""Asking the generator: rollouts to train on, and held-out ones to judge by."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lockstep.config import RLConfig
from lockstep.data import Tokenizer
from lockstep.errors import UserError
from lockstep.generate import Completion, Engine, SamplingParams
from lockstep.rl.advantages import group_advantages
from lockstep.rl.environment import Environment, Example
from lockstep.rl.rewards import grade
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


def assign_rewards(rollouts: Sequence[Rollout], environment: Environment) -> None:
    """Grades every rollout. Raises UserError as `grade` does."""
    grades = grade(environment, [r.example for r in rollouts], [r.completion for r in rollouts])
    for rollout, graded in zip(rollouts, grades):
        rollout.rewards, rollout.reward = graded.by_name, graded.total


def assign_advantages(rollouts: Sequence[Rollout], normalize: bool) -> None:
    """Group-relative advantages; the rollouts stand group by group, all groups of one size."""
    groups = rollouts[-1].group + 1
    rewards = torch.tensor([r.reward for r in rollouts]).view(groups, -1)
    for rollout, advantage in zip(rollouts, group_advantages(rewards, normalize).flatten().tolist()):
        rollout.advantage = advantage


def evaluate(
    examples: Sequence[Example], environment: Environment, engine: Engine, tokenizer: Tokenizer, config: RLConfig
) -> list[Rollout]:
    """Graded completions of held-out examples: one each, sampled as in training.

    The draws depend on (config.seed, example) alone, so that two validations differ by the weights only.
    """
    rollouts = _sample(examples, 1, [config.seed, 0], environment, engine, tokenizer, config)
    assign_rewards(rollouts, environment)
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
