"""What a task's rewards read from their trace, against the package's own environment with the same replies.

There, its rollout, its server between program and model and its client are real; only the program is a loop in this
process, instead of a script that would have to be installed.
"""

import asyncio
import json
import sys
from dataclasses import asdict

import pytest

from lockstep.data.replies import QWEN3, parse_calls
from lockstep.errors import UserError
from lockstep.rl.conversations import Chat, Reply
from lockstep.rl.environments.loading import load_environment
from lockstep.rl.grading.exchange import reply_from
from lockstep.rl.rollouts.prompts import examples_of
from tests.rl.conversations.scripted import call, converse

PLAIN_LOOP = """
import json, httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness, HarnessConfig
from verifiers.v1.runtimes import ProgramResult

TOOL = {"type": "function", "function": %s}

class Loop(Harness[HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
    NEEDS_CONTAINER = EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        messages += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt)
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}, timeout=10) as client:
            while True:
                body = {"model": "policy", "messages": messages, "tools": [TOOL]}
                answer = await client.post(f"{endpoint}/chat/completions", json=body)
                if answer.status_code != 200:
                    return ProgramResult(1, "", answer.text)
                message = answer.json()["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    return ProgramResult(0, "", "")
                for one in message["tool_calls"]:
                    total = str(sum(json.loads(one["function"]["arguments"]).values()))
                    messages.append({"role": "tool", "tool_call_id": one["id"], "name": "adder_add", "content": total})

__all__ = ["Loop"]
"""
TASKS = """
import time
import verifiers.v1 as vf

SEEN = []

class State(vf.State):
    note: str = "none"

class Adder(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    def add(self, a: int, b: int) -> int:
        "Adds."
        return a + b

class Sum(vf.Task[vf.TaskData, State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.ToolsetConfig())] if TOOLS else []
    @vf.stop
    async def said_stop(self, trace: vf.Trace) -> bool:
        return "STOP" in trace.last_reply
    @vf.reward
    async def seen(self, trace) -> float:
        SEEN.append(trace.model_copy(deep=True))
        return 1.0 + float(trace.state.note == "none")
    BROKEN

class Config(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(runtime={"type": "subprocess"}, LIMITS)

class Env(vf.Env[Config]):
    async def run(self, task, agents):
        RUN

class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        for n in range(10):
            yield Sum(vf.TaskData(prompt=PROMPT, system_prompt=SYSTEM, name=f"n{n}"), self.config.task)

__all__ = ["Sums", "Env"]
"""
RUN = "await agents.player.run(task)"
TALK = """
        async with agents.player.interaction(task) as one:
            segment = await one.turn()
            while not segment.terminated and one.trace.num_turns < 3:
                segment = await one.turn([{"role": "user", "content": f"so {segment.last_reply}"}])"""
PLAIN = {"TOOLS": "False", "LIMITS": "", "RUN": RUN, "PROMPT": "'what is 1 and 2'", "SYSTEM": "None", "BROKEN": ""}


class Script:
    """Replies in order, as workers send them, with counts of tokens."""

    def __init__(self, *replies):
        self.left = [reply if isinstance(reply, Reply) else Reply(reply) for reply in replies]
        self.asked = 0

    def next(self):
        reply = self.left.pop(0)
        calls = parse_calls(reply.text, QWEN3)
        self.asked += 20
        sent = Reply(reply.text, reply.finish_reason, calls, self.asked, 7 + len(reply.text.split()))
        return reply_from(json.loads(json.dumps(asdict(sent))))

    async def __call__(self, messages):
        return self.next()


def seen_by_the_reward():
    """The trace of the last conversation."""
    return sys.modules["traced_tasks"].SEEN.pop()


def ours(environment, example, *replies):
    asyncio.run(environment.converse(example, Chat(Script(*replies))))
    return seen_by_the_reward()


def completion(reply, left):
    """What a server answers on the wire."""
    calls = [
        {"id": f"{left}-{i}", "type": "function",
         "function": {"name": c.name, "arguments": json.dumps(c.arguments)}}
        for i, c in enumerate(reply.tool_calls)
    ]  # fmt: skip
    content = reply.text.partition("<tool_call>")[0].strip() if calls else reply.text
    message = {"role": "assistant", "content": content or None, **({"tool_calls": calls} if calls else {})}
    reason = "tool_calls" if calls and reply.finish_reason == "stop" else reply.finish_reason
    counts = {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.completion_tokens}
    usage = counts | {"total_tokens": sum(counts.values())}
    choice = {"index": 0, "message": message, "finish_reason": reason}
    answer = {"id": "x", "object": "chat.completion", "created": 1, "model": "policy", "choices": [choice]}
    return answer | {"usage": usage}


async def episode_of(script):
    import verifiers.v1 as vf
    from aiohttp import web
    from verifiers.v1.clients import EvalClientConfig, ModelContext
    from verifiers.v1.types import SamplingConfig

    async def complete(request):
        return web.json_response(completion(script.next(), len(script.left)))

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    settings = {"taskset": {"id": "traced_tasks"}, "player": {"harness": {"id": "plain_loop"}}}
    env = vf.load_environment(vf.resolve_env_config(settings))
    client = EvalClientConfig(base_url=f"http://127.0.0.1:{port}/v1", api_key_var="NO_KEY")
    async with env.serving():
        slot = env.slots(next(iter(env.taskset)))[0]
        context = ModelContext(model="policy", client=client, sampling=SamplingConfig())
        episode = await env.run_slot(slot, context)
    await runner.cleanup()
    return episode


def theirs(*replies):
    episode = asyncio.run(episode_of(Script(*replies)))
    assert not episode.errors
    return seen_by_the_reward()


READ = (
    "stop_condition", "is_completed", "ok", "has_error", "is_timeout", "is_truncated", "num_turns", "num_branches",
    "num_input_tokens", "num_output_tokens", "num_total_tokens", "usage", "last_reply", "root_reply", "transcript",
    "last_error", "errors", "extra_usage", "info", "metrics", "reward",
)  # fmt: skip


def told(trace):
    """What a reward can read of a trace, but for ids, times and the tools, which the loop here describes itself."""
    found = {name: getattr(trace, name) for name in READ}
    found["messages"] = [
        m.model_dump(exclude={"tool_calls": {"__all__": {"id"}}, "tool_call_id": True}) for m in trace.messages
    ]
    found["nodes"] = [(n.parent, n.sampled, n.token_ids) for n in trace.nodes]
    found["calls"] = [(c.node, c.finish_reason, c.usage, c.model, c.error) for c in trace.calls]
    found["task"] = trace.task.model_dump()
    found["agent"] = (trace.agent.name, trace.agent.trainable, trace.agent.config.max_turns)
    found["tools"] = [tool.name for tool in trace.tools]
    found["branch"] = [(b.num_total_tokens, b.num_output_tokens, b.usage, len(b.calls)) for b in trace.branches]
    ids = [c.id for m in trace.assistant_messages for c in m.tool_calls or []]
    found["answered"] = [ids.index(m.tool_call_id) for m in trace.tool_messages]
    timing = trace.timing
    spans = (timing.boot, timing.setup, timing.agent, timing.finalize)
    found["timing"] = [0 < timing.start <= span.start <= span.end for span in spans] + [timing.scoring.start > 0]
    return found


ADD = "I add. " + call("adder_add", a=1, b=2)
CASES = {
    "an answer": ({}, ["it is 3"]),
    "truncated": ({}, [Reply("once upon a", "length")]),
    "a system prompt": ({"SYSTEM": "'be short'"}, ["3"]),
    "messages": ({"PROMPT": "[vf.SystemMessage(content='be short'), vf.UserMessage(content='hi'), "
                  "vf.AssistantMessage(content='yes'), vf.UserMessage(content='1 and 2')]"}, ["3"]),
    "tools": ({"TOOLS": "True"}, [ADD, "so it is 3"]),
    "most turns": ({"TOOLS": "True", "LIMITS": "max_turns=2"}, [ADD, ADD, "never said"]),
    "most input": ({"TOOLS": "True", "LIMITS": "max_input_tokens=20"}, [ADD, "never said"]),
    "most of both": ({"TOOLS": "True", "LIMITS": "max_total_tokens=50"}, [ADD, ADD, "never said"]),
    "the user": ({"RUN": TALK}, ["one", "two", "three"]),
    "the user, to a limit": ({"RUN": TALK, "LIMITS": "max_turns=2"}, ["one", "two", "three"]),
    "a stop of its own": ({"RUN": TALK}, ["one", "two STOP", "three"]),
}  # fmt: skip


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Writes the package with these changes, as it would be installed; returns its environment and first example."""
    pytest.importorskip("verifiers.v1")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("NO_KEY", "none")
    schema = {"name": "adder_add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
    (tmp_path / "plain_loop.py").write_text(PLAIN_LOOP % json.dumps(schema))

    def load(changes):
        source = TASKS
        for old, new in (PLAIN | changes).items():
            source = source.replace(old, new)
        (tmp_path / "traced_tasks.py").write_text(source)
        monkeypatch.delitem(sys.modules, "traced_tasks", raising=False)
        environment = load_environment("verifiers:traced_tasks")
        return environment, examples_of(environment, "train")[0]

    return load


@pytest.mark.parametrize("case", CASES)
def test_a_trace_has_what_the_package_records(load, case):
    changes, replies = CASES[case]
    found = told(ours(*load(changes), *replies))
    load(changes | {"TOOLS": "False"})
    right = told(theirs(*replies))
    if "TOOLS" not in changes:
        found["tools"] = right["tools"] = None
    assert found == right


def test_the_limits_of_the_run_are_in_the_trace(load):
    environment, example = load({"TOOLS": "True"})
    for said, reason in (([ADD], "max_total_tokens"), ([ADD] * environment.turns, "max_turns")):
        converse(environment, example, *said)
        trace = seen_by_the_reward()
        assert trace.stop_condition == reason and trace.is_truncated and trace.num_turns == len(said)
        assert len(trace.tool_messages) == len(said) - 1, "the last results were not seen by any reply"


def test_an_agent_that_takes_too_long_is_stopped_as_timed_out(load):
    environment, example = load({"LIMITS": "max_turns=30, timeout={'rollout': 0.05}"})
    assert environment.turns == 30

    async def model(messages):
        await asyncio.sleep(30)

    asyncio.run(environment.converse(example, Chat(model)))
    trace = seen_by_the_reward()
    assert trace.is_timeout and trace.stop_condition == "agent_timeout" and trace.num_turns == 0


def test_what_a_reward_raises_is_in_the_trace_and_fails_the_conversation(load):
    broken = "@vf.reward\n    async def broken(self, trace) -> float: return 1 / 0"
    run = "self.trace = await agents.player.run(task); assert self.trace.last_error.type == 'TaskError'"
    environment, example = load({"BROKEN": broken, "RUN": run})
    with pytest.raises(Exception, match="division by zero"):
        converse(environment, example, "3")
    trace = environment._env.trace
    assert trace.stop_condition == "agent_completed" and not trace.ok and trace.has_error


OTHER = "class Other(Sum):\n    async def setup(self, trace, runtime): pass\n\n"
WITHOUT_TOOLS = "class Other(Sum):\n    toolsets = classmethod(lambda kind, config: [])\n\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({'__all__ = ["Sums", "Env"]': ""}, "cannot be loaded .*defines no `__all__`"),
        ({"player: vf": "other: vf.AgentConfig = vf.AgentConfig()\n    player: vf"}, "the agents other, player"),
        ({"BROKEN": "NEEDS_CONTAINER = True"}, "need a container"),
        (
            {"BROKEN": "@vf.reward\n    async def of(self, trace, runtime) -> float: return 0.0"},
            "rewards need a runtime",
        ),
        ({"LIMITS": "sampling={'temperature': 0.2}"}, "its agent has its own sampling"),
        ({"SYSTEM": "None, image='python:3.12'"}, "its tasks have image"),
        ({"BROKEN": "@vf.stop\n    async def of(self, request: vf.Request) -> bool: return False"}, "single requests"),
        ({"RUN": "await agents.player.run(task, runtime=self)"}, "runs its agent with runtime"),
        ({"RUN": "await agents.player.run(vf.Task(task.data))"}, "runs its agent on a Task, not on the Sum"),
        ({"class Sums": OTHER + "class Sums", "yield Sum(": "yield Other("}, "its own Task.setup"),
        ({"class Sums": WITHOUT_TOOLS + "class Sums", "yield Sum(": "yield Other("}, "the same tools"),
        ({"PROMPT": "[vf.UserMessage(content=[{'type': 'image_url', 'image_url': {'url': 'a'}}])]"}, "only text"),
    ],
)
def test_what_happens_otherwise_here_is_refused(load, changes, message):
    with pytest.raises(UserError, match=message):
        converse(*load(changes), "3")
