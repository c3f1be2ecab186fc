"""Rollouts from the generator: to train on, and held-out ones for validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from lockstep.config import RLConfig
from lockstep.data import continuation
from lockstep.errors import UserError
from lockstep.generate import Completion, SamplingParams
from lockstep.generate.sampler import Sampler
from lockstep.rl.conversations.play import play, unfit
from lockstep.rl.conversations.protocol import ConversationEnvironment
from lockstep.rl.conversations.rendering import Rendering
from lockstep.rl.environments.protocol import Environment, Example
from lockstep.rl.grading import Grader
from lockstep.rl.rollouts.records import Rollout, of_versions
from lockstep.rl.scoring.routes import routes_form


def training_params(config: RLConfig, environment: Environment, rendering: Rendering) -> SamplingParams:
    """How a run samples, apart from the seed; `n` is the number of completions of each prompt."""
    return SamplingParams(
        max_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        n=config.samples_per_prompt,
        stop=environment.stop,
        stop_token_ids=rendering.end_ids,
        routes=routes_form(config.router_replay, config.actors.separate),
    )


def validation_params(
    config: RLConfig, environment: Environment, rendering: Rendering
) -> tuple[SamplingParams, list[int]]:
    """How a run samples held-out examples: as in training, except for settings of validation; and the seed for
    `collect`, which does not depend on the step: two validations differ only by the weights."""
    params = replace(training_params(config, environment, rendering), n=config.validation_samples)
    if config.validation_temperature is not None:
        params = replace(params, temperature=config.validation_temperature)
    seed = config.seed if config.validation_seed is None else config.validation_seed
    return params, [seed, 0, 0]


def collect(
    groups: Mapping[int, Example],
    params: SamplingParams,
    seed: Sequence[int],
    environment: Environment,
    engine: Sampler,
    rendering: Rendering,
    grader: Grader,
    first: int | None = None,
) -> list[Rollout]:
    """`params.n` completions of each example, or conversations about it, one group after another; not graded yet.

    groups: the examples by group number. seed: of the run, the step, and the round of dynamic sampling. The draws are a
    function of it and the group number, and for a conversation also of its index in the group and the turn, whatever
    the engine's batches look like. first: how many groups are enough, as for `Engine.generate`; None: all.
    Conversations run in the worker processes of `grader`, if it has any.
    """
    if isinstance(environment, ConversationEnvironment):
        return play(groups, params, seed, environment, engine, rendering, grader, first)
    return complete(groups, params, seed, engine, rendering, first, environment.marks_reasoning)


def complete(
    groups: Mapping[int, Example],
    params: SamplingParams,
    seed: Sequence[int],
    engine: Sampler,
    rendering: Rendering,
    first: int | None = None,
    marks_reasoning: bool = False,
) -> list[Rollout]:
    """As `collect`, for prompts that are not conversations. marks_reasoning: as in `Environment`."""
    prompts = [encode_prompt(rendering, example, engine, params.max_tokens) for example in groups.values()]
    entropy = list(seed) if seed[-1] else list(seed[:-1])
    # Drawn for all groups up to the last, so that a group's seed does not depend on which rank requests it.
    seeds = np.random.default_rng(entropy).integers(2**62, size=max(groups, default=-1) + 1).tolist()
    completions = engine.generate(prompts, [replace(params, seed=seeds[group]) for group in groups], first)
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
            completion=completion_text(rendering, prompt, completion, marks_reasoning),
            **of_versions(completion.versions, engine.weights_version),
        )
        for group, prompt, of_group in zip(groups, prompts, completions)
        for completion in of_group
    ]


def encode_prompt(rendering: Rendering, example: Example, engine: Sampler, max_new_tokens: int) -> list[int]:
    """The prompt's tokens. Raises UserError if prompt and completion do not fit the context or the cache."""
    tokens = rendering.prompt(example)
    if problem := unfit(tokens, engine, max_new_tokens):
        raise UserError(f"example {example.name}: its {problem}")
    return tokens


def completion_text(rendering: Rendering, prompt: list[int], completion: Completion, marked: bool = False) -> str:
    """What the environment grades: the text that the completion adds to the prompt, without end tokens; of a family
    with channels, only that of the final one. marked: with tags where `answer_text` needs them to find the content."""
    if rendering.form.channels:
        text = rendering.reply_text(completion.token_ids, prompt)
    else:
        tokens = [token for token in completion.token_ids if token not in rendering.end_ids]
        text = continuation(rendering.tokenizer, prompt, tokens)
    return rendering.with_marks(text, rendering.reply_parts(completion.token_ids, prompt)) if marked else text
