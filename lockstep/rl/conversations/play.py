"""Samples all conversations of a step from one engine: renders their requests, batches them, returns the replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lockstep.data.chat import ChatTemplateError
from lockstep.errors import UserError
from lockstep.generate import SamplingParams
from lockstep.generate.sampler import Sample, Sampler
from lockstep.generate.sampling_params import FinishReason
from lockstep.generate.stragglers import stragglers
from lockstep.rl.conversations.chat import Reply
from lockstep.rl.conversations.protocol import ConversationEnvironment
from lockstep.rl.conversations.rendering import Rendering, Row, TooLongError, Transcript, message_values
from lockstep.rl.conversations.runner import ConversationRunner
from lockstep.rl.conversations.worker_runner import WorkerConversationRunner, worker_task
from lockstep.rl.environments.protocol import Example
from lockstep.rl.grading.calling import INVALID, Grader, call_problem, failure
from lockstep.rl.grading.exchange import ConversationEnded, ConversationRestarted, Event, ReplyRequest
from lockstep.rl.grading.pool import GraderPool
from lockstep.rl.rollouts.records import Conversation, Rollout, of_versions

REQUESTS_PER_TURN = 4
"""Maximum number of requests per allowed turn of a conversation, including those that it abandons."""


@dataclass(eq=False)
class _Conversation:
    """A conversation from the model's side."""

    example: Example
    group: int
    episode: int
    transcript: Transcript
    tool_calls: int = 0
    requests: int = 0
    """Including abandoned ones."""
    prompt_tokens: int = 0
    """Of the request in flight."""
    tokens: int = 0
    """Of the model's replies."""
    sample: Sample | None = None
    """The reply in flight."""
    ended: ConversationEnded | None = None

    @property
    def sampled(self) -> int:
        return self.tokens + (self.sample.sampled if self.sample else 0)

    @property
    def finish_reason(self) -> FinishReason | None:
        """As for a sample: None while it is unfinished."""
        return "stop" if self.ended else None

    def restart(self) -> None:
        self.transcript = Transcript(self.transcript.rendering, self.example.chat_template_kwargs)
        self.tool_calls, self.requests, self.tokens = 0, 0, 0


def play(
    groups: Mapping[int, Example],
    params: SamplingParams,
    seed: Sequence[int],
    environment: ConversationEnvironment,
    engine: Sampler,
    rendering: Rendering,
    grader: Grader,
    first: int | None = None,
) -> list[Rollout]:
    """Samples `params.n` conversations about each example, one group after another, with the rows of each in order.

    groups: the examples by group number. params: of each reply, apart from its seed. first: how many groups are enough,
    namely those whose longest conversation has the fewest model tokens; the others are dropped as soon as they are
    known. None: all.

    Conversations run in worker processes if `grader` has them, else in this one. A draw depends on `seed`, the group,
    the conversation's place in it and the turn, not on timing. A conversation whose `converse` fails before the first
    reply is a rollout without tokens. Raises UserError for messages that the chat template refuses, for a first prompt
    that does not fit, and if the environment blocks this process for too long.
    """
    for example in groups.values():
        rendering.check(example)
    conversations = [
        _Conversation(example, group, episode, Transcript(rendering, example.chat_template_kwargs))
        for group, example in groups.items()
        for episode in range(params.n)
    ]
    with _open_runner(conversations, seed, environment, grader) as runner:
        batch = _Batch(conversations, runner, seed, environment, engine, rendering, replace(params, n=1))
        try:
            while batch.unfinished:
                while batch.unfinished and (event := runner.next(wait=not batch.in_flight)) is not None:
                    batch.handle(event)
                if batch.in_flight:
                    engine.step()
                batch.answer()
                if first is not None:
                    batch.drop_stragglers(first)
        finally:
            for request_id in batch.in_flight:
                engine.abort(request_id)
    version = engine.weights_version
    return [
        rollout
        for conversation in batch.remaining()
        for rollout in _rollouts(conversation, environment, rendering, version)
    ]


class _Batch:
    """The conversations of a step, between the environment's side and the engine."""

    def __init__(
        self,
        conversations: Sequence[_Conversation],
        runner: ConversationRunner | WorkerConversationRunner,
        seed: Sequence[int],
        environment: ConversationEnvironment,
        engine: Sampler,
        rendering: Rendering,
        params: SamplingParams,
    ):
        self._conversations, self._runner, self._seed = conversations, runner, seed
        self._environment, self._engine, self._rendering, self._params = environment, engine, rendering, params
        self.unfinished = set(range(len(conversations)))
        """Indices of conversations."""
        self.in_flight: dict[int, ReplyRequest] = {}
        """What the engine is sampling, by engine request."""
        self._groups: dict[int, list[_Conversation]] = {}
        """Those that have not been dropped."""
        for conversation in conversations:
            self._groups.setdefault(conversation.group, []).append(conversation)

    def remaining(self) -> list[_Conversation]:
        """The conversations that have not been dropped, one group after another."""
        return [conversation for group in self._groups.values() for conversation in group]

    def handle(self, event: Event | ConversationRestarted) -> None:
        """Passes a conversation's request to the engine, or records its end."""
        conversation = self._conversations[event.number]
        self._abort(event.number)  # the conversation has abandoned its previous request
        if isinstance(event, ConversationEnded):
            conversation.ended = event
            self.unfinished.discard(event.number)
        elif isinstance(event, ConversationRestarted):
            conversation.restart()
        elif isinstance(event, ReplyRequest):
            conversation.requests += 1
            prompt = self._prompt(conversation, event) if event.number in self.unfinished else None
            if prompt is None:
                self._runner.answer(event.number, event.request, None)
                return
            request_id = self._engine.add(prompt, self._reply_params(conversation))
            conversation.prompt_tokens = len(prompt)
            self.in_flight[request_id], conversation.sample = event, self._engine.samples(request_id)[0]

    def answer(self) -> None:
        """Returns finished replies to their conversations."""
        for request_id, request in list(self.in_flight.items()):
            conversation = self._conversations[request.number]
            if conversation.sample is not None and conversation.sample.finish_reason is not None:
                del self.in_flight[request_id]
                reply = _reply(conversation, conversation.sample, self._engine, self._rendering)
                self._runner.answer(request.number, request.request, reply)
                conversation.sample = None

    def drop_stragglers(self, first: int) -> None:
        """Drops the groups that cannot be among the `first` to finish."""
        for group in stragglers(self._groups, first):
            dropped = self._groups.pop(group)
            for number in [number for number, one in enumerate(self._conversations) if one in dropped]:
                self.unfinished.discard(number)
                request = self._abort(number)
                if request is not None:
                    self._runner.answer(number, request.request, None)

    def _abort(self, number: int) -> ReplyRequest | None:
        """Aborts a conversation's request in flight, if any; returns it."""
        self._conversations[number].sample = None
        for request_id, request in self.in_flight.items():
            if request.number == number:
                del self.in_flight[request_id]
                self._engine.abort(request_id)
                return request
        return None

    def _prompt(self, conversation: _Conversation, request: ReplyRequest) -> list[int] | None:
        """The tokens of a request; None at the limit of turns or tokens."""
        transcript, name, turns = conversation.transcript, conversation.example.name, self._environment.turns
        # A conversation that abandons each of its requests would otherwise never end.
        if transcript.turns >= turns or conversation.requests > REQUESTS_PER_TURN * turns:
            return None
        try:
            prompt = transcript.prompt(request.messages, self._engine.max_positions)
        except TooLongError as error:
            if transcript.rows:
                return None
            raise UserError(f"example {name}: its first prompt has {error}; shorten it") from error
        except ChatTemplateError as error:
            raise UserError(f"example {name}: {error}") from error
        problem = unfit(prompt, self._engine, self._params.max_tokens)
        if problem and (not prompt or not transcript.rows):
            raise UserError(f"example {name}: its first {problem}")
        return None if problem else prompt

    def _reply_params(self, conversation: _Conversation) -> SamplingParams:
        turns = conversation.transcript.turns
        draws = np.random.default_rng([*self._seed, conversation.group, conversation.episode, turns])
        return replace(self._params, seed=int(draws.integers(2**62)))


def _open_runner(
    conversations: Sequence[_Conversation], seed: Sequence[int], environment: ConversationEnvironment, grader: Grader
) -> ConversationRunner | WorkerConversationRunner:
    if not isinstance(grader, GraderPool):
        return ConversationRunner(environment, [one.example for one in conversations], grader.config)
    seeds = [int(np.random.default_rng([*seed, one.group, one.episode]).integers(2**62)) for one in conversations]
    tasks = [worker_task(one.example, task_seed) for one, task_seed in zip(conversations, seeds)]
    return WorkerConversationRunner(tasks, grader)


def unfit(prompt: Sequence[int], engine: Sampler, max_new_tokens: int) -> str:
    """Why the engine cannot continue an example's prompt, as a phrase after "its"; empty if it can."""
    limit, total = engine.max_positions, len(prompt) + max_new_tokens
    both = f"prompt of {len(prompt)} tokens and max_new_tokens {max_new_tokens}"
    if not prompt:
        return "prompt is empty; give at least one token to continue"
    if total > limit:
        return f"{both} exceed the context of {limit}; shorten one of them"
    if total > (cache := engine.cache_tokens):
        return f"{both} do not fit in the cache of {cache} tokens; raise engine.cache_tokens, or shorten one of them"
    return ""


def _reply(conversation: _Conversation, sample: Sample, engine: Sampler, rendering: Rendering) -> Reply:
    completion = sample.completion()
    if completion.finish_reason == "error":
        raise UserError(
            f"example {conversation.example.name}: logits are not finite (NaN or infinite) with weights version "
            f"{engine.weights_version}; check the weights, or load those of an earlier checkpoint"
        )
    text = conversation.transcript.add(completion)
    parts = conversation.transcript.last_reply
    conversation.tool_calls += len(parts.calls)
    conversation.tokens += len(completion.token_ids)
    message = message_values(parts) if rendering.form.channels else {}
    tokens = conversation.prompt_tokens, len(completion.token_ids)
    return Reply(text, completion.finish_reason, parts.calls, *tokens, parts.reasoning, message, parts.content)


def _rollouts(
    conversation: _Conversation, environment: ConversationEnvironment, rendering: Rendering, version: int
) -> list[Rollout]:
    ended, transcript = conversation.ended, conversation.transcript
    assert ended is not None
    record = Conversation(
        ended.messages,
        ended.outcome,
        ended.over,
        transcript.turns,
        conversation.tool_calls,
        ended.seconds,
        ended.environment_seconds,
    )
    if not transcript.rows and not (ended.outcome and ended.outcome.cause):
        problem = call_problem(environment, conversation.example, "did not ask the model for any reply", "converse")
        record.outcome = failure(INVALID, problem)
    marked = environment.marks_reasoning
    return [
        Rollout(
            example=conversation.example,
            group=conversation.group,
            prompt_ids=row.prompt_ids,
            token_ids=row.token_ids,
            logprobs=row.logprobs,
            truncated_logprobs=row.truncated_logprobs,
            routes=row.routes,
            finish_reason=row.finish_reason,
            completion=rendering.with_marks(row.completion, row.parts) if marked else row.completion,
            **of_versions(row.versions, version),
            sampled=row.sampled,
            episode=conversation.episode,
            conversation=record,
        )
        for row in transcript.rows or [Row([])]
    ]
