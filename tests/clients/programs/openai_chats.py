"""openai-python: a chat with tools, whole and streamed, and content that is parsed. Arguments: the URL."""

import json
import sys
from typing import Literal

import openai
from pydantic import BaseModel


class Weather(BaseModel):
    """The weather of a town."""

    town: Literal["Bergen", "Oslo"]
    days: Literal[1, 2]


client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "Is it raining in Bergen?"}]
asked = {"model": model, "tools": [openai.pydantic_function_tool(Weather)]}

first = client.chat.completions.create(messages=messages, **asked).choices[0].message
call = first.tool_calls[0]
messages += [first, {"role": "tool", "tool_call_id": call.id, "content": "It is raining."}]
second = client.chat.completions.create(messages=messages, **asked).choices[0].message

with client.chat.completions.stream(messages=messages, **asked) as stream:
    events = [event.type for event in stream]
    streamed = stream.get_final_completion().choices[0].message
parsed = client.chat.completions.parse(messages=messages, model=model, response_format=Weather)

print(
    json.dumps(
        {
            "call": call.function.name,
            "arguments": json.loads(call.function.arguments),
            "reasoning": first.reasoning_content,
            "answer": second.content,
            "events": sorted(set(events)),
            "streamed": streamed.tool_calls[0].function.parsed_arguments.model_dump(),
            "parsed": parsed.choices[0].message.parsed.model_dump(),
        }
    )
)
