"""The agent of a `verifiers` environment, whose replies are those of the model in training.

The package's trace records the interaction, with the package's classes where it has them: the message graph, calls with
token counts, the agent's limits and timeouts, the stop condition, errors and times.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import verifiers.v1 as vf
from verifiers.v1 import graph
from verifiers.v1.agent import Segment, resolve_rollout_timeouts
from verifiers.v1.dialects import parse_message
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.errors import TaskError, boundary
from verifiers.v1.session import RolloutLimits, RolloutSession
from verifiers.v1.state import state_cls
from verifiers.v1.types import FinishReason, Response, Usage

from lockstep.data.chat import ChatTemplateError
from lockstep.data.messages import plain
from lockstep.errors import UserError
from lockstep.rl.conversations import Chat, ConversationOver, Reply
from lockstep.rl.conversations.reasoning import reasoning_text
from lockstep.rl.conversations.tools import answer_calls

LIMITS = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens")
"""Fields of an agent's config that are checked before each reply."""


@dataclass
class Agent:
    """An agent whose replies come from the chat."""

    chat: Chat
    name: str
    config: Any
    kind: type
    """The class of its tasks."""
    toolsets: Callable[[], Sequence[Any]]
    """Creates a conversation's toolsets."""
    tools_of: Callable[[Any], Sequence[Callable[..., Any]]]
    """A toolset's functions, with their schemas."""
    turns: int
    """The maximum number of replies in the chat."""
    interactions: list[Interaction] = field(default_factory=list)

    async def run(self, task: Any, **options: Any) -> Any:
        """One segment: the task's prompt, tools, and the reply that ends it. Returns the trace, scored."""
        if task.data.prompt is None:
            raise ValueError("the task has no prompt, and `run` no user to open the conversation; use `interaction`")
        async with self.interaction(task, **options) as interaction:
            await interaction.turn()
            if interaction.ok:
                interaction.trace.stop("agent_completed")
        return interaction.trace

    @asynccontextmanager
    async def interaction(
        self, task: Any, *, on_trace: Callable[[Any], None] | None = None, **options: Any
    ) -> AsyncIterator[Interaction]:
        """An interaction with the caller as the user; scored on exit."""
        if other := [name for name, value in options.items() if value]:
            raise UserError(
                f"a verifiers environment that runs its agent with {', '.join(other)} cannot be trained here"
            )
        if type(task) is not self.kind:
            raise UserError(
                f"a verifiers environment that runs its agent on a {type(task).__name__}, not on the "
                f"{self.kind.__name__} of its taskset, cannot be trained here"
            )
        if self.interactions:
            raise UserError("a verifiers environment that runs its agent twice in an episode cannot be trained here")
        interaction = Interaction(self, task)
        self.interactions.append(interaction)
        if on_trace is not None:
            on_trace(interaction.trace)
        await interaction.open()
        try:
            yield interaction
        except Exception as error:
            interaction.fail(error)
            raise
        finally:
            await interaction.close()


class Interaction:
    """The part of the package's Interaction that `run` can use here: `turn`, `trace` and `close`."""

    def __init__(self, agent: Agent, task: Any):
        self._agent, self._task = agent, task
        trace_task = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        agent_info = vf.AgentInfo(config=agent.config, name=agent.name)
        self.trace: Any = vf.Trace(task=trace_task, state=state_cls(type(task))(), agent=agent_info)
        self.failure: Exception | None = None
        """The last exception, in the episode or from a reward."""
        limits = RolloutLimits(**{name: getattr(agent.config, name) for name in LIMITS})
        stops = list(task.hooks("stop"))
        self._session = RolloutSession(ctx=None, trace=self.trace, trace_stops=stops, limits=limits)  # type: ignore[arg-type]
        self._timeouts = resolve_rollout_timeouts(agent.config.timeout, task)
        self._seconds = self._timeouts.agent
        """Left of the agent's timeout."""
        self._messages: list[Any] = []
        """The conversation. Messages after the last reply are not in the trace yet."""
        self._tools: list[Callable[..., Any]] = []
        self._started = self._over = self._closed = False

    @property
    def ok(self) -> bool:
        """Whether the interaction can continue: it neither failed nor was stopped."""
        return self.failure is None and self.trace.stop_condition is None

    def fail(self, error: Exception) -> None:
        self.failure = error
        self.trace.record_error(error)

    async def open(self) -> None:
        """Sets the task's tools up."""
        timing = self.trace.timing
        timing.boot.start = timing.boot.end = timing.setup.start = time.time()
        try:
            async with asyncio.timeout(self._timeouts.setup) as timeout:
                for toolset in self._agent.toolsets():
                    await toolset.setup()
                    await toolset.setup_task(self._task.data)
                    self._tools += self._agent.tools_of(toolset)
        except TimeoutError:
            if not timeout.expired():
                raise
            self.trace.record_timeout("setup")
        timing.setup.end = timing.agent.start = time.time()

    async def turn(self, message: Any = None) -> Segment:
        """Adds a user message (none if the task begins with a prompt); returns replies of the model and its tools."""
        data = self._task.data
        prompted = not self._started and data.prompt is not None
        if self._closed or self._over:
            raise RuntimeError("the exchange is over; read interaction.trace")
        if (message is None) != prompted:
            raise ValueError("a task with a prompt opens the exchange with turn(); every other turn needs a message")
        messages = data.prompt if prompted else message
        if not self._started and data.system_prompt:
            messages = [vf.SystemMessage(content=data.system_prompt), *_typed(messages)]
        self._started = True
        nodes, turns = len(self.trace.nodes), self.trace.num_turns
        if self.ok:
            await self._step(_typed(messages))
        # Replies before a limit still count; only the next turn reports the end.
        if self.trace.num_turns > turns:
            new = [node for node in self.trace.nodes[nodes:] if node.sampled or node.message.role == "tool"]
            return Segment(messages=[node.message for node in new])
        self._over = True
        return Segment(messages=[], terminated=True)

    async def close(self) -> Any:
        """Ends the interaction and scores it; the trace records exceptions of rewards."""
        if self._closed:
            return self.trace
        self._closed = True
        if self.ok:
            self.trace.stop("user_closed")
        timing = self.trace.timing
        timing.agent.end = timing.finalize.start = timing.finalize.end = time.time()
        if self.failure is None:
            timing.scoring.start = time.time()
            try:
                async with asyncio.timeout(self._timeouts.scoring) as timeout, boundary(TaskError, "scoring"):
                    await self._task.score(self.trace)
            except TimeoutError:
                assert timeout.expired()
                self.trace.record_timeout("scoring")
            except Exception as error:
                self.fail(error)
            timing.scoring.end = time.time()
        self.trace.is_completed = True
        self.trace.ok = self.failure is None
        self.trace.split_agent_time()
        return self.trace

    async def _step(self, messages: Sequence[Any]) -> None:
        """Samples replies and runs tools, until a reply calls none or the interaction is stopped."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._seconds) as timeout:
                for message in messages:
                    self._add(message)
                while await self._session.refused() is None and (reply := await self._reply()).tool_calls:
                    await self._call_tools(reply)
        except ConversationOver:
            turns = self.trace.num_turns >= self._agent.turns
            self.trace.stop("max_turns" if turns else "max_total_tokens")
        except TimeoutError:
            if not timeout.expired():
                raise
            self.trace.record_timeout("agent")
        if self._seconds is not None:
            self._seconds = max(0.0, self._seconds + began - time.monotonic())

    def _add(self, message: Any) -> None:
        """Adds a message that the model has not written."""
        try:
            self._agent.chat.messages.append(plain(message_to_wire(message)))
        except ChatTemplateError as error:
            raise UserError(f"{self._task.data.name or 'a task'}: {error}; only text can be trained on") from error
        self._messages.append(message)

    async def _reply(self) -> Reply:
        began = time.time()
        tools = [_tool_definition(tool) for tool in self._tools]
        turn = graph.prepare_turn(self.trace, self._messages, tools)
        reply = await self._agent.chat.reply()
        # A reply written by hand has no tokens: its words are counted instead.
        words = sum(_words(m.get("content")) for m in self._agent.chat.messages[:-1])
        usage = Usage(
            prompt_tokens=words if reply.prompt_tokens is None else reply.prompt_tokens,
            completion_tokens=_words(reply.text) if reply.completion_tokens is None else reply.completion_tokens,
        )
        message = self._assistant(reply)
        truncated = reply.finish_reason == "length"
        reason: FinishReason = "length" if truncated else "tool_calls" if reply.tool_calls else "stop"
        model = self._agent.config.model or "policy"
        answer = Response(id="", created=int(began), model=model, message=message, finish_reason=reason, usage=usage)
        node = turn.commit(answer)
        self._messages = [*self._messages, message]
        span = vf.TimeSpan(start=began, end=time.time())
        self.trace.calls.append(vf.ModelCall(node=node, model=model, finish_reason=reason, usage=usage, time=span))
        return reply

    def _assistant(self, reply: Reply) -> Any:
        calls = [
            vf.ToolCall(
                id=f"{self.trace.num_turns}-{number}", name=call.name or "?", arguments=json.dumps(dict(call.arguments))
            )
            for number, call in enumerate(reply.tool_calls)
        ]
        # A reply written by hand has its reasoning and calls in its text.
        content = reply.spoken.partition("<tool_call>")[0] if calls and reply.content is None else reply.spoken
        reasoning = reply.reasoning or (reasoning_text(reply.text).strip() if reply.content is None else "")
        return vf.AssistantMessage(
            content=content.strip() or None, reasoning_content=reasoning or None, tool_calls=calls or None
        )

    async def _call_tools(self, reply: Reply) -> None:
        chat = self._agent.chat
        before = len(chat.messages)
        await answer_calls(chat, reply, self._tools)
        for call, answer in zip(self._messages[-1].tool_calls, chat.messages[before:]):
            self._messages.append(vf.ToolMessage(tool_call_id=call.id, content=answer["content"], name=call.name))


def _typed(messages: Any) -> list[Any]:
    """Messages of the package's types, from a text, or from messages of these types or as dicts."""
    if isinstance(messages, str):
        return [vf.UserMessage(content=messages)]
    return [parse_message(message) if isinstance(message, dict) else message for message in messages]


def _tool_definition(tool: Callable[..., Any]) -> Any:
    function = tool.schema["function"]  # type: ignore[attr-defined]
    return vf.Tool(name=function["name"], description=function["description"], parameters=function["parameters"])


def _words(content: Any) -> int:
    return len(str(content or "").split())
