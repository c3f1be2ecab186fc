"""pydantic-ai: an agent with a tool, with an output type in three ways, and streamed. Arguments: the URL,
and "scripted" if the model is."""

import json
import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.exceptions import ModelContextWindowExceededError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Report(BaseModel):
    """What there is to say."""

    town: Literal["Bergen", "Oslo"]
    wet: bool = False


def weather(town: str) -> str:
    """The weather of a town."""
    return f"It is raining in {town}."


model = OpenAIChatModel("small", provider=OpenAIProvider(base_url=f"{sys.argv[1]}/v1", api_key="none"))
settings = {"max_tokens": 400, "seed": 1}
task = "Is it raining in Bergen?"
found = {}
if sys.argv[2] == "scripted":
    for way in (ToolOutput, NativeOutput, PromptedOutput):
        agent = Agent(model, tools=[weather], output_type=way(Report), system_prompt="Be brief.", instructions="Look.")
        found[way.__name__] = agent.run_sync(task).output.model_dump()
    agent = Agent(model, tools=[weather], system_prompt="Be brief.")
    with agent.run_stream_sync(task) as stream:
        found["parts"] = list(stream.stream_text(delta=True, debounce_by=None))
        found["usage"] = stream.usage.output_tokens
    try:
        agent.run_sync("word " * 40000)
    except ModelContextWindowExceededError as error:
        found["refused"] = type(error).__name__
else:
    for way in (ToolOutput, NativeOutput):
        agent = Agent(model, output_type=way(Report, strict=True), model_settings=settings)
        found[way.__name__] = agent.run_sync(task).output.model_dump()
print(json.dumps(found))
