"""inspect-ai: small evaluations with its tool loop, its agent, a schema and log-probabilities. Arguments: the URL."""

import json
import sys

from inspect_ai import Task, eval
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, ResponseSchema, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool
from inspect_ai.util import json_schema
from pydantic import BaseModel

WAYS = {False: "whole", True: "streamed"}


class Report(BaseModel):
    town: str
    wet: bool


@tool
def weather():
    async def execute(town: str) -> str:
        """The weather of a town.

        Args:
            town: its name
        """
        return f"It is raining in {town}."

    return execute


def reasoning_of(messages):
    parts = [part for message in messages if isinstance(message.content, list) for part in message.content]
    return [part.reasoning for part in parts if part.type == "reasoning"]


samples = [Sample(f"Is it raining in {town}?", target=town) for town in ("Bergen", "Oslo")]
schema = ResponseSchema(name="report", json_schema=json_schema(Report), strict=True)
tasks = {
    "tools": Task(samples, solver=[use_tools(weather()), generate()], scorer=includes()),
    "agent": Task(samples, solver=react(tools=[weather()]), scorer=includes()),
    "schema": Task(samples[:1], scorer=includes(), config=GenerateConfig(response_schema=schema)),
    "logprobs": Task(samples[:1], scorer=includes(), config=GenerateConfig(logprobs=True, top_logprobs=2)),
}
found = {}
too_long = Task([Sample("word " * 40000, target="x")], scorer=includes())
for stream in (False, True):
    model = get_model("openai-api/here/small", base_url=f"{sys.argv[1]}/v1", api_key="none", stream=stream)
    (log,) = eval(too_long, model=model, max_retries=0, display="none", log_dir="logs")
    found[f"too long {WAYS[stream]}"] = log.samples[0].output.stop_reason
    for name, task in tasks.items():
        (log,) = eval(task, model=model, max_samples=1, max_retries=0, display="none", log_dir="logs")
        assert log.status == "success", log.error
        last = [sample.output.choices[0] for sample in log.samples]
        found[f"{name} {WAYS[stream]}"] = {
            "accuracy": log.results.scores[0].metrics["accuracy"].value,
            "answers": [choice.message.text for choice in last],
            "reasoned": [reasoning_of(sample.messages) for sample in log.samples],
            "logprobs": [len(choice.logprobs.content) if choice.logprobs else 0 for choice in last],
        }
print(json.dumps(found))
