"""Rollouts from the generator: to train on, and held-out ones for validation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, groupby, islice, pairwise

import numpy as np
import torch
from torch import Tensor

from lockstep.config import Algorithm, RewardConfig, RLConfig
from lockstep.data import Tokenizer, continuation
from lockstep.errors import UserError
from lockstep.generate import Completion, SamplingParams
from lockstep.generate.sampler import Sampler
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
from lockstep.rl.conversations.grading import grade_conversations
from lockstep.rl.conversations.play import play, unfit
from lockstep.rl.conversations.protocol import ConversationEnvironment
from lockstep.rl.conversations.rendering import Rendering
from lockstep.rl.environments.protocol import Environment, Example
from lockstep.rl.grading import Grader, InProcessGrader, Outcome, failures, refuse_none, totals
from lockstep.rl.rollouts.records import OVERLONG, Rollout, episodes_of, of_versions
from lockstep.rl.scoring.routes import routes_form


def collect(
    examples: Sequence[Example],
    environment: Environment,
    engine: Sampler,
    tokenizer: Tokenizer,
    config: RLConfig,
    step: int,
    extra_round: int = 0,
    rendering: Rendering | None = None,
    grader: Grader | None = None,
    numbers: Sequence[int] | None = None,
    first: int | None = None,
) -> list[Rollout]:
    """`samples_per_prompt` completions of each example, or conversations about it, one group after another.

    numbers: indices of the examples to request here, if others are requested elsewhere; None: all. first: how many of
    these groups are enough, as for `Engine.generate`; None: all. The draws are a function of (config.seed, step) and
    the round of dynamic sampling, and for a conversation also of its place in the group and the turn, whatever the
    engine's batches look like. Prompts are tokenized by `rendering`; without one they are encoded as they are.
    Conversations run in the worker processes of `grader`, if it has any.
    """
    rendering = rendering or Rendering(tokenizer)
    samples = config.samples_per_prompt
    groups = _groups(examples, numbers)
    if isinstance(environment, ConversationEnvironment):
        params = sampling_params(config, environment, rendering, samples)
        grader = grader or InProcessGrader(environment, config.rewards)
        return play(groups, params, [config.seed, step, extra_round], environment, engine, rendering, grader, first)
    seed = [config.seed, step, extra_round] if extra_round else [config.seed, step]
    return _sample(groups, samples, seed, environment, engine, rendering, config, first)


def _groups(examples: Sequence[Example], numbers: Sequence[int] | None) -> dict[int, Example]:
    """The examples to request, by group number."""
    return {number: examples[number] for number in (range(len(examples)) if numbers is None else numbers)}


def assign_rewards(
    rollouts: Sequence[Rollout],
    environment: Environment,
    config: RewardConfig | None = None,
    grader: Grader | None = None,
) -> list[Outcome]:
    """Grades every rollout, with `grader` if one is given, else in this process; marks those whose reward failed.

    The rows of a conversation get its rewards: what `converse` returned, else the group's `grade`, else `reward` of
    the last reply. One without a reply from the model never counts. Returns the outcomes of the rewards, for
    `refuse_too_many`. Raises UserError as `totals` does.
    """
    config = config or RewardConfig()
    episodes = episodes_of(rollouts)
    jobs = [(rows[-1].example, rows[-1].completion) for rows in episodes]
    grader = grader or InProcessGrader(environment, config)
    if isinstance(environment, ConversationEnvironment):
        outcomes = grade_conversations(environment, episodes, grader)
    else:
        outcomes = grader(jobs)
    outcomes = [refuse_none(outcome, environment) for outcome in outcomes]
    if said := failures(outcomes):
        log.warning("%s", said)
    for rows, graded in zip(episodes, totals(environment, jobs, outcomes)):
        for rollout in rows:
            scores = rollout.scores
            scores.rewards, scores.reward, scores.failure = dict(graded.by_name), graded.total, graded.failure
            scores.counts = not graded.failure or (config.on_failure == "zero" and bool(rollout.token_ids))
    return outcomes


def charge_overlong(rollouts: Sequence[Rollout], limit: int, share: float) -> None:
    """Adds the penalty of completions that use the last `share` of `limit` tokens, as a reward named `overlong`.

    For a conversation it is that of its longest reply.
    """
    for rows in episodes_of(rollouts) if share > 0 else ():
        penalty = overlong_penalty(max(rollout.longest_reply() for rollout in rows), limit, share)
        for rollout in rows:
            rollout.scores.rewards[OVERLONG] = penalty
            rollout.scores.reward += penalty


def assign_advantages(rollouts: Sequence[Rollout], algorithm: Algorithm) -> None:
    """Assigns advantages by `algorithm.advantage`; the rollouts are ordered by group.

    Rewards, and `reference_logprobs`, `teacher_logprobs` and `values` if the algorithm uses them, must have been
    assigned.
    """
    if algorithm.advantage == "teacher":
        _assign(rollouts, [distillation_advantages(r.logprobs, r.scores.teacher_logprobs) for r in rollouts])
        return
    charges = _charges(rollouts, algorithm)
    episodes = episodes_of(rollouts)
    places = iter(charges)
    charges_of_episodes = [[charge for _ in rows for charge in next(places)] for rows in episodes]
    if algorithm.advantage == "gae":
        estimates = [_estimated(rows, own, algorithm) for rows, own in zip(episodes, charges_of_episodes)]
        _assign_to_rows(episodes, whitened(estimates) if algorithm.normalize_advantages else estimates)
        return
    if algorithm.advantage == "batch":
        to_go = [rewards_to_go(rows[0].scores.reward, own) for rows, own in zip(episodes, charges_of_episodes)]
        _assign_to_rows(episodes, whitened(to_go, algorithm.normalize_advantages))
        return
    for _, members in groupby(zip(episodes, charges_of_episodes), key=lambda member: member[0][0].group):
        group = list(members)
        # One group at a time: if some rewards failed, groups differ in size.
        rewards = torch.tensor([[rows[0].scores.reward - math.fsum(own) for rows, own in group]], dtype=torch.float64)
        for (rows, _), advantage in zip(group, _relative(rewards, algorithm)[0].tolist()):
            for rollout in rows:
                rollout.scores.advantage = advantage
    if algorithm.advantage == "group_batch":
        own = [[a for rollout in rows for a in rollout.advantages_of_tokens()] for rows in episodes]
        _assign_to_rows(episodes, whitened(own, algorithm.normalize_advantages))


def _estimated(rows: Sequence[Rollout], charges: Sequence[float], algorithm: Algorithm) -> list[float]:
    """Advantages from the values: an episode's reward counts at its last token, each charge at its own token."""
    values = [value for rollout in rows for value in rollout.scores.values]
    rewards = [-charge for charge in charges]
    rewards[-1] += rows[0].scores.reward
    advantages = generalized_advantages(rewards, values, algorithm.gae_gamma, algorithm.gae_lambda)
    returns = iter(value_returns(advantages, values))
    for rollout in rows:
        rollout.scores.returns = list(islice(returns, len(rollout.scores.values)))
    return advantages


def _relative(rewards: Tensor, algorithm: Algorithm) -> Tensor:
    if algorithm.advantage == "leave_one_out":
        return leave_one_out_advantages(rewards)
    if algorithm.advantage == "best":
        return best_of_group(rewards)
    return group_advantages(rewards, algorithm.advantage == "group" and algorithm.normalize_advantages)


def _charges(rollouts: Sequence[Rollout], algorithm: Algorithm) -> list[list[float]]:
    """What the KL divergence subtracts from the reward at each token."""
    if algorithm.kl_in == "loss" or algorithm.kl_coefficient == 0:
        return [[0.0] * r.num_sampled for r in rollouts]
    own, reference = (
        torch.tensor([x for r in rollouts for x in logprobs(r)])
        for logprobs in (lambda r: r.logprobs, lambda r: r.scores.reference_logprobs)
    )
    charged = divergences(own, reference, algorithm.kl_estimator).double() * algorithm.kl_coefficient
    return [part.tolist() for part in charged.split([r.num_sampled for r in rollouts])]


def _assign_to_rows(episodes: Sequence[Sequence[Rollout]], of_tokens: Sequence[list[float]]) -> None:
    """Splits each episode's advantages among its rows."""
    for rows, own in zip(episodes, of_tokens):
        ends = [0, *accumulate(rollout.num_sampled for rollout in rows)]
        _assign(rows, [own[start:end] for start, end in pairwise(ends)])
        for rollout in rows:
            rollout.scores.advantage = math.fsum(own) / max(len(own), 1)


def _assign(rollouts: Sequence[Rollout], of_tokens: Sequence[list[float]]) -> None:
    for rollout, own in zip(rollouts, of_tokens):
        rollout.scores.token_advantages = own
        rollout.scores.advantage = math.fsum(own) / max(len(own), 1)


def sample_held_out(
    examples: Sequence[Example],
    environment: Environment,
    engine: Sampler,
    tokenizer: Tokenizer,
    config: RLConfig,
    grader: Grader | None = None,
    rendering: Rendering | None = None,
    numbers: Sequence[int] | None = None,
) -> list[Rollout]:
    """Completions of held-out examples, or conversations about them, `validation_samples` of each; not graded yet.

    They are sampled as in training, except for `validation_temperature` and `validation_seed`. The draws depend only on
    (seed, example), so two validations differ only by the weights. numbers: as for `collect`.
    """
    rendering, groups = rendering or Rendering(tokenizer), _groups(examples, numbers)
    seed = config.seed if config.validation_seed is None else config.validation_seed
    if config.validation_temperature is not None:
        config = replace(config, temperature=config.validation_temperature)
    samples = config.validation_samples
    if isinstance(environment, ConversationEnvironment):
        params = sampling_params(config, environment, rendering, samples)
        grader = grader or InProcessGrader(environment, config.rewards)
        return play(groups, params, [seed, 0, 0], environment, engine, rendering, grader)
    return _sample(groups, samples, [seed, 0], environment, engine, rendering, config)


def _sample(
    groups: Mapping[int, Example],
    samples: int,
    seed: list[int],
    environment: Environment,
    engine: Sampler,
    rendering: Rendering,
    config: RLConfig,
    first: int | None = None,
) -> list[Rollout]:
    prompts = [encode_prompt(rendering, e, engine, config.max_new_tokens) for e in groups.values()]
    # Drawn for all groups up to the last, so that a group's seed does not depend on which rank requests it.
    draws = np.random.default_rng(seed).integers(2**62, size=max(groups, default=-1) + 1).tolist()
    shared = sampling_params(config, environment, rendering, samples)
    params = [replace(shared, seed=draws[group]) for group in groups]
    return [
        Rollout(
            example=groups[group],
            group=group,
            prompt_ids=prompt,
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            truncated_logprobs=completion.truncated_logprobs,
            routes=completion.routes,
            finish_reason=completion.finish_reason,
            completion=completion_text(rendering, prompt, completion, environment.marks_reasoning),
            **of_versions(completion.versions, engine.weights_version),
        )
        for group, prompt, completions in zip(groups, prompts, engine.generate(prompts, params, first))
        for completion in completions
    ]


def sampling_params(config: RLConfig, environment: Environment, rendering: Rendering, samples: int) -> SamplingParams:
    """How a run samples `samples` completions of each prompt, apart from their seed."""
    return SamplingParams(
        max_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        n=samples,
        stop=environment.stop,
        stop_token_ids=rendering.end_ids,
        routes=routes_form(config),
    )


def encode_prompt(rendering: Rendering, example: Example, engine: Sampler, max_new_tokens: int) -> list[int]:
    """The prompt's tokens. Raises UserError if prompt and completion do not fit the context or the cache."""
    tokens = rendering.prompt(example)
    if problem := unfit(tokens, engine, max_new_tokens):
        raise UserError(f"example {example.name}: its {problem}")
    return tokens


def completion_text(rendering: Rendering, prompt: list[int], completion: Completion, marked: bool = False) -> str:
    """What the environment grades: the text that the completion adds to the prompt, without end tokens; of a family
    with channels, only what it says in the final one. marked: with tags where `answer_text` needs them to find the
    content."""
    if rendering.form.channels:
        text = rendering.reply_text(completion.token_ids, prompt)
    else:
        said = [token for token in completion.token_ids if token not in rendering.end_ids]
        text = continuation(rendering.tokenizer, prompt, said)
    return rendering.with_marks(text, rendering.reply_parts(completion.token_ids, prompt)) if marked else text
