"""openai-agents, which asks `/v1/responses`: an agent with a tool, whole and streamed, and one with a type of output.
Arguments: the URL."""

import asyncio
import json
import sys

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from openai.types.shared import Reasoning
from pydantic import BaseModel

QUESTION = "Is it raining in Bergen?"
asked = []


@function_tool
def weather(town: str, days: int = 1) -> str:
    """The weather of a town."""
    asked.append([town, days])
    return "It is raining."


class Report(BaseModel):
    town: str
    wet: bool


async def main():
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
    model = OpenAIResponsesModel(model="small", openai_client=client)
    options = {"instructions": "Be short.", "model": model, "tools": [weather]}
    agent = Agent("weather", **options)
    whole = await Runner.run(agent, QUESTION)
    again = await Runner.run(agent, [*whole.to_input_list(), {"role": "user", "content": "Sure?"}])
    by_id = await Runner.run(agent, "Sure?", previous_response_id=whole.last_response_id)
    stream = Runner.run_streamed(agent, QUESTION)
    events = [event.data.type async for event in stream.stream_events() if event.type == "raw_response_event"]
    settings = ModelSettings(reasoning=Reasoning(effort="none"), top_logprobs=2, tool_choice="required")
    typed = await Runner.run(Agent("report", output_type=Report, model_settings=settings, **options), QUESTION)
    found = {
        "asked": asked,
        "answers": [whole.final_output, again.final_output, by_id.final_output, stream.final_output],
        "events": events,
        "typed": typed.final_output.model_dump(),
        "tokens": whole.context_wrapper.usage.output_tokens,
    }
    print(json.dumps(found))


asyncio.run(main())
