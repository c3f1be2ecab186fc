"""All conversations of a step over one engine: their requests are rendered, sampled in one batch, and answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.config import RLConfig
from lockstep.data.chat import ChatTemplateError
from lockstep.errors import UserError
from lockstep.generate import SamplingParams
from lockstep.generate.sampler import Sample, Sampler
from lockstep.generate.sampling_params import FinishReason
from lockstep.generate.stragglers import stragglers
from lockstep.rl.conversations.chat import Reply
from lockstep.rl.conversations.exchange import Again, Asked, Ended, Said
from lockstep.rl.conversations.protocol import ConversationEnvironment
from lockstep.rl.conversations.rendering import Rendering, Row, TooLongError, Transcript, message_values
from lockstep.rl.conversations.runner import ConversationRunner
from lockstep.rl.conversations.worker_runner import WorkerConversationRunner, task_of
from lockstep.rl.environments.protocol import Environment, Example
from lockstep.rl.grading.calling import INVALID, Grader, about, failure
from lockstep.rl.grading.pool import Workers
from lockstep.rl.rollouts.records import Conversation, Rollout, of_versions
from lockstep.rl.scoring.routes import routes_form

ASKS_PER_TURN = 4
"""Most requests per allowed turn of a conversation; requests whose reply it does not wait for count."""


@dataclass(eq=False)
class _Playing:
    """A conversation from the model's side."""

    example: Example
    group: int
    episode: int
    transcript: Transcript
    tool_calls: int = 0
    asks: int = 0
    """Including those that it has given up."""
    prompt_tokens: int = 0
    """Of the reply that it waits for."""
    tokens: int = 0
    """Of the model's replies."""
    sample: Sample | None = None
    """The reply that it waits for."""
    ended: Ended | None = None

    @property
    def sampled(self) -> int:
        return self.tokens + (self.sample.sampled if self.sample else 0)

    @property
    def finish_reason(self) -> FinishReason | None:
        """As for a sample: None while it is unfinished."""
        return "stop" if self.ended else None


def play(
    groups: Mapping[int, Example],
    samples: int,
    seed: Sequence[int],
    environment: ConversationEnvironment,
    engine: Sampler,
    rendering: Rendering,
    config: RLConfig,
    grader: Grader | None = None,
    first: int | None = None,
) -> list[Rollout]:
    """`samples` conversations about each example, one group after another, with the rows of each in order.

    groups: the examples by group number. first: how many groups are enough, namely those whose longest conversation has
    the fewest model tokens; the others are given up as soon as that is known. None: all.

    They run in worker processes if `grader` has them, else in this one. A draw depends on `seed`, the group, the
    conversation's place in it and the turn, not on timing. One whose `converse` fails before the model has said
    anything is a rollout without tokens. Raises UserError for messages that the chat template refuses, for a first
    prompt that does not fit, and if the environment blocks this process for too long.
    """
    for example in groups.values():
        rendering.check(example)
    playing = [
        _Playing(example, group, episode, Transcript(rendering, example.chat_template_kwargs))
        for group, example in groups.items()
        for episode in range(samples)
    ]
    with _runner(playing, seed, environment, config, grader) as runner:
        held = _Conversations(playing, runner, seed, environment, engine, rendering, config)
        try:
            while held.going:
                while held.going and (said := runner.next(wait=not held.sampling)) is not None:
                    held.hear(said)
                if held.sampling:
                    engine.step()
                held.answer()
                if first is not None:
                    held.give_up_all_but(first)
        finally:
            for request in held.sampling:
                engine.abort(request)
    version = engine.weights_version
    return [rollout for one in held.wanted() for rollout in _rollouts(one, environment, rendering, version)]


class _Conversations:
    """The conversations of a step, between the environment's side and the engine."""

    def __init__(
        self,
        playing: Sequence[_Playing],
        runner: ConversationRunner | WorkerConversationRunner,
        seed: Sequence[int],
        environment: ConversationEnvironment,
        engine: Sampler,
        rendering: Rendering,
        config: RLConfig,
    ):
        self._playing, self._runner, self._seed = playing, runner, seed
        self._environment, self._engine, self._rendering, self._config = environment, engine, rendering, config
        self.going = set(range(len(playing)))
        """Indices of the unfinished ones."""
        self.sampling: dict[int, Asked] = {}
        """What the engine is sampling, by engine request."""
        self._groups: dict[int, list[_Playing]] = {}
        """Those that have not been given up."""
        for one in playing:
            self._groups.setdefault(one.group, []).append(one)

    def wanted(self) -> list[_Playing]:
        """The conversations that have not been given up, one group after another."""
        return [one for group in self._groups.values() for one in group]

    def hear(self, said: Said | Again) -> None:
        """Passes a conversation's request to the engine, or records its end."""
        one = self._playing[said.number]
        self._abort(said.number)  # it has given up its request before
        if isinstance(said, Ended):
            one.ended = said
            self.going.discard(said.number)
        elif isinstance(said, Again):
            one.transcript = Transcript(self._rendering, one.example.chat_template_kwargs)
            one.tool_calls, one.asks, one.tokens = 0, 0, 0
        elif isinstance(said, Asked):
            one.asks += 1
            prompt = None
            if said.number in self.going:
                prompt = _prompt(one, said, self._environment, self._engine, self._config)
            if prompt is None:
                self._runner.answer(said.number, said.ask, None)
                return
            params = _params(one, self._seed, self._environment, self._rendering, self._config)
            request, one.prompt_tokens = self._engine.add(prompt, params), len(prompt)
            self.sampling[request], one.sample = said, self._engine.samples(request)[0]

    def answer(self) -> None:
        """Passes finished replies to their conversations."""
        for request, asked in list(self.sampling.items()):
            one = self._playing[asked.number]
            if one.sample is not None and one.sample.finish_reason is not None:
                del self.sampling[request]
                self._runner.answer(asked.number, asked.ask, _reply(one, one.sample, self._engine, self._rendering))
                one.sample = None

    def give_up_all_but(self, first: int) -> None:
        """Gives up the groups that are known not to be among the `first` to finish."""
        for group in stragglers(self._groups, first):
            late = self._groups.pop(group)
            for number in [number for number, one in enumerate(self._playing) if one in late]:
                self.going.discard(number)
                asked = self._abort(number)
                if asked is not None:
                    self._runner.answer(number, asked.ask, None)

    def _abort(self, number: int) -> Asked | None:
        """Ends the request that a conversation waits for, if any; returns it."""
        self._playing[number].sample = None
        for request, asked in self.sampling.items():
            if asked.number == number:
                del self.sampling[request]
                self._engine.abort(request)
                return asked
        return None


def _runner(
    playing: Sequence[_Playing],
    seed: Sequence[int],
    environment: ConversationEnvironment,
    config: RLConfig,
    grader: Grader | None,
) -> ConversationRunner | WorkerConversationRunner:
    if not isinstance(grader, Workers):
        return ConversationRunner(environment, [one.example for one in playing], config.rewards)
    seeds = [int(np.random.default_rng([*seed, one.group, one.episode]).integers(2**62)) for one in playing]
    return WorkerConversationRunner([task_of(one.example, own) for one, own in zip(playing, seeds)], grader)


def _prompt(
    one: _Playing, asked: Asked, environment: ConversationEnvironment, engine: Sampler, config: RLConfig
) -> list[int] | None:
    """What the engine is to continue; None at the limit of turns or tokens."""
    # One that gives up its replies and asks again would otherwise never end.
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
    """Why the engine cannot continue a prompt of an example, as a phrase after "its"; empty if it can."""
    limit, total = engine.max_positions, len(prompt) + max_new_tokens
    both = f"prompt of {len(prompt)} tokens and max_new_tokens {max_new_tokens}"
    if not prompt:
        return "prompt is empty; give at least one token to continue"
    if total > limit:
        return f"{both} exceed the context of {limit}; shorten one of them"
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
        stop_token_ids=rendering.end_ids,
        routes=routes_form(config),
    )


def _reply(one: _Playing, sample: Sample, engine: Sampler, rendering: Rendering) -> Reply:
    said = sample.completion()
    if said.finish_reason == "error":
        raise UserError(
            f"example {one.example.name}: logits are not finite (NaN or infinite) with weights version "
            f"{engine.weights_version}; check the weights, or load those of an earlier checkpoint"
        )
    text = one.transcript.add(
        said.token_ids, said.logprobs, said.finish_reason, said.truncated_logprobs, said.versions, said.routes
    )
    read = one.transcript.read
    one.tool_calls += len(read.calls)
    one.tokens += len(said.token_ids)
    message = message_values(read) if rendering.form.channels else {}
    tokens = one.prompt_tokens, len(said.token_ids)
    return Reply(text, said.finish_reason, read.calls, *tokens, read.reasoning, message, read.content)


def _rollouts(one: _Playing, environment: ConversationEnvironment, rendering: Rendering, version: int) -> list[Rollout]:
    ended = one.ended
    assert ended is not None
    turns, rows = one.transcript.turns, one.transcript.rows
    conversation = Conversation(
        ended.messages, ended.outcome, ended.over, turns, one.tool_calls, ended.seconds, ended.environment_seconds
    )
    if not rows and not (ended.outcome and ended.outcome.cause):
        problem = about(environment, one.example, "did not ask the model for any reply", "converse")
        conversation.outcome = failure(INVALID, problem)
    return [
        Rollout(
            example=one.example,
            group=one.group,
            prompt_ids=row.prompt_ids,
            token_ids=row.token_ids,
            logprobs=row.logprobs,
            truncated_logprobs=row.truncated_logprobs,
            routes=row.routes,
            finish_reason=row.finish_reason,
            completion=rendering.marked(row.completion, row.read) if environment.marks_reasoning else row.completion,
            **of_versions(row.versions, version),
            sampled=row.sampled,
            episode=one.episode,
            conversation=conversation,
        )
        for row in rows or [Row([])]
    ]
