"""Environments of the package `verifiers` (0.4 and later, its `verifiers.v1`): `verifiers:TASKSET`.

The tasks, their tools, rewards and the environment's own `run` are the package's. What it would start for an agent (a
program in a container or process, and a server between it and the model) is not used: the agent is replaced by the chat
with the model in training, which sees the same messages and tools.
"""

from __future__ import annotations

import inspect
import json
import tomllib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

from lockstep.errors import UserError
from lockstep.rl.conversations import Chat, ConversationEnvironment, ConversationOver, Reply
from lockstep.rl.conversations.tools import answer_calls, schema_of
from lockstep.rl.environment import Environment, Example

MOST_TASKS, HELD_OUT = 10_000, 10
"""Number of tasks taken from a taskset, which can be endless; every tenth is for validation."""


class VerifiersTasks(ConversationEnvironment):
    """A taskset; `data` can be a TOML file with its settings.

    Rewards are those of its tasks, by name, already weighted. A taskset that needs a container, a program, several
    agents or state shared with tools is rejected when it is loaded.
    """

    taskset: ClassVar[str] = ""
    in_workers = True  # tasks are other people's code

    def __init__(self, data: str = ""):
        super().__init__(data)
        vf = _verifiers()
        try:
            config = vf.resolve_env_config({"taskset": {"id": self.taskset, **_settings(data)}})
            self._env = vf.load_environment(config)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise UserError(
                f"verifiers:{self.taskset}: cannot be loaded ({' '.join(str(error).split())}); give the name of an "
                "installed package that exports a Taskset, and its settings, if it has any, as --data FILE.toml"
            ) from error
        self._seats = [name for name, value in config if isinstance(value, vf.AgentConfig)]
        self._refuse(vf)
        shown = [tool for toolset in self._toolsets() for tool in _tools(toolset)]
        self.tools: Sequence[Callable[..., Any]] = tuple(shown)  # type: ignore[misc]
        # Taken here, not at first use: conversations' processes are forked from the one that has them.
        self._tasks: list[Any] = list(self._env.taskset.take(MOST_TASKS))

    def examples(self, split: str) -> Iterator[Example]:
        for index in range(len(self._tasks)):
            if (index % HELD_OUT == HELD_OUT - 1) == (split == "validation"):
                yield self._example(index)

    async def converse(self, example: Example, chat: Chat) -> dict[str, float]:
        index = example.metadata["index"]
        if index >= len(self._tasks) or self._example(index) != example:
            raise ValueError(
                f"{self.taskset} yields different tasks each time it is loaded, and every worker loads it; set a seed "
                'in its settings, or set rewards.isolate = "never"'
            )
        task = self._tasks[index]
        toolsets = self._toolsets()
        for toolset in toolsets:
            await toolset.setup()
            await toolset.setup_task(task.data)
        tools = [tool for toolset in toolsets for tool in _tools(toolset)]
        traces: list[Any] = []
        seat = _Seat(chat, tools, getattr(self._env.config, self._seats[0]), traces)
        await self._env.run(task, _Seats({self._seats[0]: seat}))
        rewards = [pair for trace in traces for pair in trace.rewards.items() if pair[1] is not None]
        if not rewards:
            raise ValueError(f"{self.taskset} returned no reward")
        return {name: float(reward.value) for name, reward in rewards}

    def _example(self, index: int) -> Example:
        task = self._tasks[index]
        name = f"{self.taskset}:{task.data.name or index}"
        return Example(task.data.prompt_text or name, id=name, metadata={"index": index})

    def _toolsets(self) -> list[Any]:
        """New toolsets, as they can hold state that a conversation changes."""
        taskset = self._env.taskset
        return [*type(taskset).toolsets(taskset.config), *taskset.task_type().toolsets(taskset.config.task)]

    def _refuse(self, vf: Any) -> None:
        """Raises UserError for tasksets that only the package's own programs could run."""
        from verifiers.v1.state import state_cls

        kind, env = self._env.taskset.task_type(), type(self._env)
        changed = [
            f"{base.__name__}.{name}"
            for base, own, names in (
                (vf.Task, kind, ("setup", "finalize", "stage_verifier")),
                (vf.Env, env, ("setup", "finalize", "start", "stop")),
            )
            for name in names
            if getattr(own, name) is not getattr(base, name)
        ]
        hooks = [fn for name in ("reward", "metric") for fn in _decorated(kind, name)]
        problems = [
            (len(self._seats) != 1, f"it has the agents {', '.join(self._seats)} instead of one"),
            (kind.NEEDS_CONTAINER, "its tasks need a container"),
            (bool(changed), f"it has its own {', '.join(changed)}"),
            (any(map(_needs_runtime, hooks)), "its rewards need a runtime"),
            (bool(_decorated(kind, "stop") or _decorated(kind, "intercept")), "it stops or changes single requests"),
            (any(state_cls(type(t)) is not vf.State for t in self._toolsets()), "its tools share state with it"),
        ]
        for wrong, problem in problems:
            if wrong:
                raise UserError(
                    f"verifiers:{self.taskset}: {problem}, which this adapter does not support; write its tasks as a "
                    "lockstep.rl.ConversationEnvironment"
                )


class _Seats:
    """The agents of an environment, which its `run` looks up by name."""

    def __init__(self, seats: dict[str, _Seat]):
        self.__dict__.update(seats)


class _Seat:
    """An agent whose replies come from the chat."""

    def __init__(self, chat: Chat, tools: Sequence[Callable[..., Any]], config: Any, traces: list[Any]):
        self.chat, self.tools, self.config, self.traces = chat, tools, config, traces

    async def run(self, task: Any, **_: Any) -> Any:
        """One segment: the task's prompt, tools, and the reply that ends it. Returns the trace, scored."""
        async with self.interaction(task) as interaction:
            await interaction.turn()
        return interaction.trace

    @asynccontextmanager
    async def interaction(self, task: Any, **_: Any) -> AsyncIterator[_Interaction]:
        """An exchange with the caller as the user; scored when it is left."""
        if self.traces:
            raise UserError("a verifiers environment that runs its agent twice in an episode cannot be trained here")
        held = _Interaction(self, task)
        self.traces.append(held.trace)
        yield held
        await task.score(held.trace)


class _Interaction:
    """The part of the package's Interaction that `run` can use here: `turn` and `trace`."""

    def __init__(self, seat: _Seat, task: Any):
        vf = _verifiers()
        self.seat, self.task, self.started, self.over = seat, task, False, False
        described = vf.TraceTask(type=type(task).__name__, data=task.data)
        self.trace = vf.Trace(task=described, agent=vf.AgentInfo(config=seat.config))

    async def turn(self, message: Any = None) -> Any:
        """A user message (none if the task starts with a prompt), and the model's reply to it."""
        vf, chat = _verifiers(), self.seat.chat
        if self.over:
            return vf_segment([], terminated=True)
        if not self.started:
            self.started = True
            if self.task.data.system_prompt:
                self._say(vf.SystemMessage(content=self.task.data.system_prompt))
            message = self.task.data.prompt if self.task.data.prompt is not None else message
        for one in [vf.UserMessage(content=message)] if isinstance(message, str) else message or []:
            self._say(one if not isinstance(one, dict) else vf.UserMessage(content=one["content"]))
        begin = len(self.trace.nodes)
        try:
            reply = await self._reply()
            while reply.tool_calls:
                before = len(chat.messages)
                await answer_calls(chat, reply, self.seat.tools)
                for number, answer in enumerate(chat.messages[before:]):
                    call = f"{len(self.trace.nodes) - number - 1}-{number}"
                    self._keep(vf.ToolMessage(tool_call_id=call, content=answer["content"]))
                reply = await self._reply()
        except ConversationOver:
            self.trace.stop("max_turns")
            self.over = True
        # What was said before the limit is still an answer; only the next turn reports the end.
        said = [node.message for node in self.trace.nodes[begin:]]
        return vf_segment(said, terminated=not said)

    async def _reply(self) -> Reply:
        vf = _verifiers()
        reply = await self.seat.chat.reply()
        reasoning, closed, said = reply.text.partition("</think>")
        text = said if closed else reply.text
        calls = [
            vf.ToolCall(
                id=f"{len(self.trace.nodes)}-{number}", name=c.name or "?", arguments=json.dumps(dict(c.arguments))
            )
            for number, c in enumerate(reply.tool_calls)
        ]
        content = text.partition("<tool_call>")[0].strip() if calls else text.strip()
        thought = reasoning.removeprefix("<think>").strip() if closed else reply.reasoning or None
        message = vf.AssistantMessage(content=content, reasoning_content=thought, tool_calls=calls or None)
        self._keep(message, sampled=True)
        return reply

    def _say(self, message: Any) -> None:
        from verifiers.v1.types import content_text

        self.seat.chat.add(content_text(message.content), role=message.role)
        self._keep(message)

    def _keep(self, message: Any, sampled: bool = False) -> None:
        nodes = self.trace.nodes
        parent = len(nodes) - 1 if nodes else None
        nodes.append(_verifiers().MessageNode(parent=parent, message=message, sampled=sampled))


def verifiers_tasks(name: str) -> type[Environment]:
    """The class of a taskset, by the name of its package. Raises UserError if verifiers is not installed."""
    _verifiers()
    return type("VerifiersTasks", (VerifiersTasks,), {"taskset": name, "__module__": __name__})


def vf_segment(messages: list[Any], terminated: bool = False) -> Any:
    """The result of a turn: the messages of the model and of its tools."""
    from verifiers.v1.agent import Segment

    return Segment(messages=messages, terminated=terminated)


def _tools(toolset: Any) -> list[Callable[..., Any]]:
    """Its tools as functions, named as the package names them."""
    from verifiers.v1.utils.decorators import discover_decorated

    return [_tool(toolset, method) for method in discover_decorated(toolset, "tool")]


def _tool(toolset: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    async def tool(**arguments: Any) -> Any:
        result = method(**arguments)
        return await result if inspect.isawaitable(result) else result

    described = schema_of(method)
    prefix = f"{toolset.server_name}_" if toolset.server_name else ""
    name = prefix + (getattr(method, "tool_name", None) or method.__name__)
    tool.schema = {**described, "function": {**described["function"], "name": name}}  # type: ignore[attr-defined]
    return tool


def _decorated(kind: type, name: str) -> list[Callable[..., Any]]:
    return [fn for k in kind.__mro__ for fn in vars(k).values() if callable(fn) and hasattr(fn, name)]


def _needs_runtime(function: Callable[..., Any]) -> bool:
    parameter = inspect.signature(function).parameters.get("runtime")
    return parameter is not None and parameter.default is parameter.empty


def _settings(data: str) -> dict[str, Any]:
    if not data:
        return {}
    try:
        return tomllib.loads(Path(data).read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{data}: cannot be read as TOML ({error}); give --data a file with the taskset's settings"
        ) from error


def _verifiers() -> Any:
    try:
        import verifiers.v1 as vf
    except ImportError as error:
        raise UserError("verifiers 0.4 is not installed; pip install 'verifiers>=0.4,<0.5'") from error
    return vf
