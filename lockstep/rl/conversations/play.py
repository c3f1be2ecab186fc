"""All conversations of a step over one engine: what they ask is rendered, sampled in one batch, and answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.config import RLConfig
from lockstep.data.chat import ChatTemplateError
from lockstep.errors import UserError
from lockstep.generate import SamplingParams
from lockstep.generate.sampler import Sample, Sampler
from lockstep.rl.conversations.exchange import Again, Asked, Ended
from lockstep.rl.conversations.hosting import Hosting
from lockstep.rl.conversations.in_workers import HostingInWorkers, task_of
from lockstep.rl.conversations.protocol import ConversationEnvironment, Reply
from lockstep.rl.conversations.rendering import Rendering, Row, TooLongError, Transcript
from lockstep.rl.environment import Environment, Example
from lockstep.rl.rewards.calling import INVALID, Grader, about, failure
from lockstep.rl.rewards.workers import Workers
from lockstep.rl.rollouts import Conversation, Rollout, of_versions

ASKS_PER_TURN = 4
"""Asks of a conversation for each of its `turns`, at most: those count whose reply it does not wait for."""


@dataclass
class _Playing:
    """A conversation from the model's side."""

    example: Example
    group: int
    episode: int
    transcript: Transcript
    tool_calls: int = 0
    asks: int = 0
    """Those that it has given up included."""
    ended: Ended | None = None


def play(
    groups: Mapping[int, Example],
    samples: int,
    seed: Sequence[int],
    environment: ConversationEnvironment,
    engine: Sampler,
    rendering: Rendering,
    config: RLConfig,
    grader: Grader | None = None,
) -> list[Rollout]:
    """`samples` conversations about each example, one group after the other; of each, its rows one after the other.

    groups: the examples by their groups' numbers.

    They are held in worker processes where `grader` has them, else in this one. A draw depends on `seed`, the group,
    the conversation's place in it and the turn, not on who answers when. One whose `converse` fails before the model
    has said anything is a rollout without tokens. Raises UserError for messages that the chat template refuses, for a
    first prompt that does not fit, and where the environment blocks this process for too long.
    """
    playing = [
        _Playing(example, group, episode, Transcript(rendering))
        for group, example in groups.items()
        for episode in range(samples)
    ]
    sampling: dict[int, tuple[Asked, Sample]] = {}
    left = len(playing)
    try:
        with _hosting(playing, seed, environment, config, grader) as hosting:
            while left:
                while left and (said := hosting.next(wait=not sampling)) is not None:
                    one = playing[said.number]
                    # What it asked before, it has given up.
                    for request in [r for r, (asked, _) in sampling.items() if asked.number == said.number]:
                        del sampling[request]
                        engine.abort(request)
                    if isinstance(said, Ended):
                        one.ended = said
                        left -= 1
                    elif isinstance(said, Again):
                        one.transcript, one.tool_calls, one.asks = Transcript(rendering), 0, 0
                    elif isinstance(said, Asked):
                        one.asks += 1
                        prompt = _prompt(one, said, environment, engine, config)
                        if prompt is None:
                            hosting.answer(said.number, said.ask, None)
                            continue
                        request = engine.add(prompt, _params(one, seed, environment, rendering, config))
                        sampling[request] = said, engine.samples(request)[0]
                if sampling:
                    engine.step()
                for request, (asked, sample) in list(sampling.items()):
                    if sample.finish_reason is not None:
                        del sampling[request]
                        reply = _reply(playing[asked.number], sample, engine, rendering)
                        hosting.answer(asked.number, asked.ask, reply)
    finally:
        for request in sampling:
            engine.abort(request)
    return [rollout for one in playing for rollout in _rollouts(one, environment, engine.weights_version)]


def _hosting(
    playing: Sequence[_Playing],
    seed: Sequence[int],
    environment: ConversationEnvironment,
    config: RLConfig,
    grader: Grader | None,
) -> Hosting | HostingInWorkers:
    if not isinstance(grader, Workers):
        return Hosting(environment, [one.example for one in playing], config.rewards)
    seeds = [int(np.random.default_rng([*seed, one.group, one.episode]).integers(2**62)) for one in playing]
    return HostingInWorkers([task_of(one.example, own) for one, own in zip(playing, seeds)], grader)


def _prompt(
    one: _Playing, asked: Asked, environment: ConversationEnvironment, engine: Sampler, config: RLConfig
) -> list[int] | None:
    """What the engine is to continue; None at the limit of turns or of tokens."""
    # One that gives up its replies and asks again would otherwise go on for ever.
    if one.transcript.turns >= environment.turns or one.asks > ASKS_PER_TURN * environment.turns:
        return None
    try:
        prompt = one.transcript.prompt(asked.messages, engine.max_positions)
    except TooLongError as error:
        if one.transcript.rows:
            return None
        raise UserError(f"example {one.example.name}: its first prompt has {error}; shorten it") from error
    except ChatTemplateError as error:
        raise UserError(f"example {one.example.name}: {error}") from error
    problem = unfit(prompt, engine, config.max_new_tokens)
    if problem and (not prompt or not one.transcript.rows):
        raise UserError(f"example {one.example.name}: its first {problem}")
    return None if problem else prompt


def unfit(prompt: Sequence[int], engine: Sampler, max_new_tokens: int) -> str:
    """Why the engine cannot continue a prompt of an example, as what follows "its"; empty where it can."""
    limit, total = engine.max_positions, len(prompt) + max_new_tokens
    both = f"prompt of {len(prompt)} tokens and max_new_tokens {max_new_tokens}"
    if not prompt or total > limit:
        return f"{both} must together be between 1 and the context of {limit}; shorten one of them"
    if total > (cache := engine.cache_tokens):
        return f"{both} do not fit in the cache of {cache} tokens; raise engine.cache_tokens, or shorten one of them"
    return ""


def _params(
    one: _Playing, seed: Sequence[int], environment: ConversationEnvironment, rendering: Rendering, config: RLConfig
) -> SamplingParams:
    draws = np.random.default_rng([*seed, one.group, one.episode, one.transcript.turns])
    return sampling_params(config, environment, rendering, int(draws.integers(2**62)))


def sampling_params(
    config: RLConfig, environment: Environment, rendering: Rendering, seed: int, samples: int = 1
) -> SamplingParams:
    """How a run samples `samples` completions of one prompt."""
    return SamplingParams(
        max_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        n=samples,
        seed=seed,
        stop=environment.stop,
        stop_token_ids=rendering.stop_token_ids,
    )


def _reply(one: _Playing, sample: Sample, engine: Sampler, rendering: Rendering) -> Reply:
    said = sample.completion()
    if said.finish_reason == "error":
        raise UserError(
            f"example {one.example.name}: logits are not finite (NaN or infinite) with weights version "
            f"{engine.weights_version}; check the weights, or load those of an earlier checkpoint"
        )
    text = one.transcript.add(said.token_ids, said.logprobs, said.finish_reason, said.cut_logprobs, said.versions)
    calls = rendering.calls(text)
    one.tool_calls += len(calls)
    return Reply(text, said.finish_reason, calls)


def _rollouts(one: _Playing, environment: ConversationEnvironment, version: int) -> list[Rollout]:
    ended = one.ended
    assert ended is not None
    turns, rows = one.transcript.turns, one.transcript.rows
    conversation = Conversation(
        ended.messages, ended.outcome, ended.over, turns, one.tool_calls, ended.seconds, ended.environment_seconds
    )
    if not rows and not (ended.outcome and ended.outcome.cause):
        problem = about(environment, one.example, "asked the model for no reply", "converse")
        conversation.outcome = failure(INVALID, problem)
    return [
        Rollout(
            example=one.example,
            group=one.group,
            prompt_ids=row.prompt_ids,
            token_ids=row.token_ids,
            logprobs=row.logprobs,
            cut_logprobs=row.cut_logprobs,
            finish_reason=row.finish_reason,
            completion=row.completion,
            **of_versions(row.versions, version),
            sampled=row.sampled,
            episode=one.episode,
            conversation=conversation,
        )
        for row in rows or [Row([])]
    ]
