"""openai-python: calls and content of a model that says nothing of use, forced into form. Arguments: the URL."""

import json
import sys
from typing import Literal

import openai
from pydantic import BaseModel


class Weather(BaseModel):
    """The weather of a town."""

    town: Literal["Bergen", "Oslo"]
    wet: bool


class Report(BaseModel):
    weather: list[Weather]
    sure: bool


client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
asked = {"model": "small", "messages": [{"role": "user", "content": "Is it raining?"}], "max_tokens": 400, "seed": 1}
tools = {"tools": [openai.pydantic_function_tool(Weather)], "tool_choice": "required", "parallel_tool_calls": False}
called = client.chat.completions.parse(**asked, **tools, logprobs=True).choices[0]
with client.chat.completions.stream(**asked, **tools, stream_options={"include_usage": True}) as stream:
    for _ in stream:
        pass
    streamed = stream.get_final_completion()
report = client.chat.completions.parse(**asked, response_format=Report).choices[0].message.parsed
picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
unsupported = {
    "custom tools": {"tools": [{"type": "custom", "custom": {"name": "shell"}}]},
    "pictures": {"messages": [{"role": "user", "content": [picture]}]},
    "effort": {"reasoning_effort": "low"},
    "sound": {"modalities": ["text", "audio"], "audio": {"format": "wav", "voice": "alloy"}},
    "web search": {"web_search_options": {}},
    "prediction": {"prediction": {"type": "content", "content": "x"}},
}
refused = {}
for name, fields in unsupported.items():
    try:
        client.chat.completions.create(**asked | fields)
    except openai.BadRequestError as error:
        refused[name] = error.body["message"]

print(
    json.dumps(
        {
            "finish_reasons": [called.finish_reason, streamed.choices[0].finish_reason],
            "call": called.message.tool_calls[0].function.parsed_arguments.model_dump(),
            "tokens": len(called.logprobs.content),
            "streamed": streamed.choices[0].message.tool_calls[0].function.parsed_arguments.model_dump(),
            "usage": streamed.usage.completion_tokens,
            "report": report.model_dump(),
            "refused": refused,
        }
    )
)
