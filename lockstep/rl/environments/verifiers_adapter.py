"""Environments of the package `verifiers` (0.4 and later, its `verifiers.v1`): `verifiers:TASKSET`.

Tasks, tools, rewards and the environment's `run` are the package's. Its programs for agents (in a container or process,
with a server between them and the model) are not used: the chat with the model in training replaces the agent, with the
same messages and tools.
"""

from __future__ import annotations

import asyncio
import inspect
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from lockstep.errors import UserError
from lockstep.rl.conversations import Chat, ConversationEnvironment
from lockstep.rl.conversations.tools import schema_of
from lockstep.rl.environments.protocol import Environment, Example

MAX_TASKS, HELD_OUT = 10_000, 10
"""Number of tasks from a taskset, which can be endless; every tenth is for validation."""
MODEL_FIELDS = ("model", "client", "sampling")
"""Fields of an agent's config that would replace the model in training, or its sampling."""
PROGRAM_FIELDS = ("image", "agent_user", "skills", "artifacts")
"""Fields of a task that need a container or a program."""


class VerifiersTasks(ConversationEnvironment):
    """A taskset; `data` can be a TOML file with its settings.

    Rewards are those of its tasks, by name, already weighted. Their trace is complete, including the agent's limits and
    timeouts. A taskset that needs a container, a program, several agents or state shared with tools is refused when it
    is loaded.
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
        # Listed here, not at first use, so that forked processes of conversations share them.
        self._tasks: list[Any] = list(self._env.taskset.take(MAX_TASKS))
        self._agent_names = [name for name, value in config if isinstance(value, vf.AgentConfig)]
        self._refuse(vf)
        self._agent_config = getattr(self._env.config, self._agent_names[0])
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
        from lockstep.rl.environments.verifiers_agent import Agent

        name = self._agent_names[0]
        kind = type(self._tasks[index])
        agent = Agent(chat, name, self._agent_config, kind, self._toolsets, _tools, self.turns)
        async with asyncio.timeout(self._env.config.timeout.episode):
            await self._env.run(self._tasks[index], SimpleNamespace(**{name: agent}))
        if failed := next((i.failure for i in agent.interactions if i.failure), None):
            raise failed
        rewards = [pair for i in agent.interactions for pair in i.trace.rewards.items() if pair[1] is not None]
        if not rewards:
            raise ValueError(f"{self.taskset} returned no reward")
        return {name: float(reward.value) for name, reward in rewards}

    def _example(self, index: int) -> Example:
        task = self._tasks[index]
        name = f"{self.taskset}:{task.data.name or index}"
        return Example(task.data.prompt_text or name, id=name, metadata={"index": index})

    def _toolsets(self) -> list[Any]:
        """New toolsets, as conversations can change their state."""
        taskset = self._env.taskset
        return [*type(taskset).toolsets(taskset.config), *taskset.task_type().toolsets(taskset.config.task)]

    def _refuse(self, vf: Any) -> None:
        """Raises UserError for tasksets that only the package's programs can run."""
        from verifiers.v1.state import state_cls

        task_type, env = self._env.taskset.task_type(), type(self._env)
        tasks = list({type(task): task for task in self._tasks}.values())  # one of each class
        kinds = list(dict.fromkeys([task_type, *map(type, tasks)]))
        of_tasks, of_env = ("setup", "finalize", "stage_verifier"), ("setup", "finalize", "start", "stop")
        changed = [
            f"{base.__name__}.{name}"
            for base, derived, names in [*((vf.Task, kind, of_tasks) for kind in kinds), (vf.Env, env, of_env)]
            for name in names
            if getattr(derived, name) is not getattr(base, name)
        ]
        hooks = [fn for task in tasks for name in ("reward", "metric") for fn in task.hooks(name)]
        hooks += [judge.score for task in tasks for judge in task.plugged_judges()]
        stops = [fn for task in tasks for fn in task.hooks("stop")]
        roles = [getattr(self._env.config, name) for name in self._agent_names]
        model_fields = [name for role in roles for name in MODEL_FIELDS if getattr(role, name) is not None]
        programs = [name for task in self._tasks for name in PROGRAM_FIELDS if getattr(task.data, name)]
        problems = [
            (len(self._agent_names) != 1, f"it has the agents {', '.join(self._agent_names)} instead of one"),
            (any(kind.NEEDS_CONTAINER for kind in kinds), "its tasks need a container"),
            (bool(changed), f"it has its own {', '.join(dict.fromkeys(changed))}"),
            (len({kind.toolsets.__func__ for kind in kinds}) > 1, "not all of its tasks have the same tools"),
            (any(map(_needs_runtime, hooks)), "its rewards need a runtime"),
            (bool(model_fields), f"its agent has its own {', '.join(dict.fromkeys(model_fields))}"),
            (bool(programs), f"its tasks have {', '.join(dict.fromkeys(programs))}"),
            (any(_decorated(kind, "intercept") for kind in kinds), "it changes single requests"),
            (not all(map(_stops_by_trace, stops)), "it stops by single requests, not by its trace"),
            (any(state_cls(type(t)) is not vf.State for t in self._toolsets()), "its tools share state with it"),
        ]
        for applies, problem in problems:
            if applies:
                raise UserError(
                    f"verifiers:{self.taskset}: {problem}, which this adapter does not support; write its tasks as a "
                    "lockstep.rl.ConversationEnvironment"
                )


def verifiers_tasks(name: str) -> type[Environment]:
    """The class of a taskset, by the name of its package. Raises UserError if verifiers is not installed."""
    _verifiers()
    return type("VerifiersTasks", (VerifiersTasks,), {"taskset": name, "__module__": __name__})


def _tools(toolset: Any) -> list[Callable[..., Any]]:
    """A toolset's tools as functions, with the package's names for them."""
    from verifiers.v1.utils.decorators import discover_decorated

    return [_tool(toolset, method) for method in discover_decorated(toolset, "tool")]


def _tool(toolset: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    async def tool(**arguments: Any) -> Any:
        result = method(**arguments)
        return await result if inspect.isawaitable(result) else result

    schema = schema_of(method)
    prefix = f"{toolset.server_name}_" if toolset.server_name else ""
    name = prefix + (getattr(method, "tool_name", None) or method.__name__)
    tool.schema = {**schema, "function": {**schema["function"], "name": name}}  # type: ignore[attr-defined]
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
    except (TypeError, NameError):  # its annotations are missing or cannot be evaluated
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
