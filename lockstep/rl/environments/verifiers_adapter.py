"""Environments of the package `verifiers` (0.4 and later, its `verifiers.v1`): `verifiers:TASKSET`.

The tasks, their tools, rewards and the environment's own `run` are the package's. What it would start for an agent (a
program in a container or process, and a server between it and the model) is not used: the agent is replaced by the chat
with the model in training, which sees the same messages and tools.
"""

from __future__ import annotations

import asyncio
import inspect
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from lockstep.errors import UserError
from lockstep.rl.conversations import Chat, ConversationEnvironment
from lockstep.rl.conversations.tools import schema_of
from lockstep.rl.environments.protocol import Environment, Example

MOST_TASKS, HELD_OUT = 10_000, 10
"""Number of tasks taken from a taskset, which can be endless; every tenth is for validation."""
NOT_ITS_OWN = ("model", "client", "sampling")
"""Fields of an agent's config that would have it played by another model than the one in training, or otherwise."""
FOR_PROGRAMS = ("image", "agent_user", "skills", "artifacts")
"""Fields of a task that need a container, or a program in it."""


class VerifiersTasks(ConversationEnvironment):
    """A taskset; `data` can be a TOML file with its settings.

    Rewards are those of its tasks, by name, already weighted; their trace has what happened, up to the agent's own
    limits and timeouts. A taskset that needs a container, a program, several agents or state shared with tools is
    rejected when it is loaded.
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
        # Taken here, not at first use: conversations' processes are forked from the one that has them.
        self._tasks: list[Any] = list(self._env.taskset.take(MOST_TASKS))
        self._seats = [name for name, value in config if isinstance(value, vf.AgentConfig)]
        self._refuse(vf)
        self._agent_config = getattr(self._env.config, self._seats[0])
        self.turns = self._agent_config.max_turns or self.turns  # type: ignore[misc]
        shown = [tool for toolset in self._toolsets() for tool in _tools(toolset)]
        self.tools: Sequence[Callable[..., Any]] = tuple(shown)  # type: ignore[misc]

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
        from lockstep.rl.environments.verifiers_agent import Agent, Agents

        name = self._seats[0]
        kind = type(self._tasks[index])
        agent = Agent(chat, name, self._agent_config, kind, self._toolsets, _tools, self.turns)
        async with asyncio.timeout(self._env.config.timeout.episode):
            await self._env.run(self._tasks[index], Agents({name: agent}))
        if failed := next((one.failure for one in agent.interactions if one.failure), None):
            raise failed
        rewards = [pair for one in agent.interactions for pair in one.trace.rewards.items() if pair[1] is not None]
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
        tasks = list({type(task): task for task in self._tasks}.values())  # one of each class
        kinds = list(dict.fromkeys([kind, *map(type, tasks)]))
        of_tasks, of_env = ("setup", "finalize", "stage_verifier"), ("setup", "finalize", "start", "stop")
        changed = [
            f"{base.__name__}.{name}"
            for base, own, names in [*((vf.Task, own, of_tasks) for own in kinds), (vf.Env, env, of_env)]
            for name in names
            if getattr(own, name) is not getattr(base, name)
        ]
        hooks = [fn for task in tasks for name in ("reward", "metric") for fn in task.hooks(name)]
        hooks += [judge.score for task in tasks for judge in task.plugged_judges()]
        stops = [fn for task in tasks for fn in task.hooks("stop")]
        roles = [getattr(self._env.config, name) for name in self._seats]
        its_own = [name for role in roles for name in NOT_ITS_OWN if getattr(role, name) is not None]
        programs = [name for task in self._tasks for name in FOR_PROGRAMS if getattr(task.data, name)]
        problems = [
            (len(self._seats) != 1, f"it has the agents {', '.join(self._seats)} instead of one"),
            (any(own.NEEDS_CONTAINER for own in kinds), "its tasks need a container"),
            (bool(changed), f"it has its own {', '.join(dict.fromkeys(changed))}"),
            (len({own.toolsets.__func__ for own in kinds}) > 1, "not all of its tasks have the same tools"),
            (any(map(_needs_runtime, hooks)), "its rewards need a runtime"),
            (bool(its_own), f"its agent has its own {', '.join(dict.fromkeys(its_own))}"),
            (bool(programs), f"its tasks have {', '.join(dict.fromkeys(programs))}"),
            (any(_decorated(own, "intercept") for own in kinds), "it changes single requests"),
            (not all(map(_stops_by_trace, stops)), "it stops by single requests, not by its trace"),
            (any(state_cls(type(t)) is not vf.State for t in self._toolsets()), "its tools share state with it"),
        ]
        for wrong, problem in problems:
            if wrong:
                raise UserError(
                    f"verifiers:{self.taskset}: {problem}, which this adapter does not support; write its tasks as a "
                    "lockstep.rl.ConversationEnvironment"
                )


def verifiers_tasks(name: str) -> type[Environment]:
    """The class of a taskset, by the name of its package. Raises UserError if verifiers is not installed."""
    _verifiers()
    return type("VerifiersTasks", (VerifiersTasks,), {"taskset": name, "__module__": __name__})


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


def _stops_by_trace(function: Callable[..., Any]) -> bool:
    import verifiers.v1 as vf
    from verifiers.v1.session import hook_boundary

    try:
        return hook_boundary(function, allow_trace=True) is vf.Trace
    except (TypeError, NameError):  # its annotations say nothing, or cannot be read
        return False


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
