"""litellm, under both of its names for such servers: a chat with tools, whole and streamed. Arguments: the URL."""

import json
import sys

import litellm
from pydantic import BaseModel

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a town.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}


class Report(BaseModel):
    town: str
    wet: bool


def chat(model):
    asked = {"model": model, "api_base": f"{sys.argv[1]}/v1", "api_key": "none", "num_retries": 0}
    messages = [{"role": "user", "content": "Is it raining in Bergen?"}]
    first = litellm.completion(messages=messages, tools=[WEATHER], tool_choice="auto", **asked).choices[0].message
    call = first.tool_calls[0]
    messages += [first.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "It is raining."}]
    second = litellm.completion(messages=messages, tools=[WEATHER], **asked).choices[0].message
    chunks = list(
        litellm.completion(
            messages=messages, tools=[WEATHER], stream=True, stream_options={"include_usage": True}, **asked
        )
    )
    whole = litellm.stream_chunk_builder(chunks, messages=messages)
    parsed = litellm.completion(messages=messages, response_format=Report, **asked).choices[0].message.content
    try:
        litellm.completion(messages=[{"role": "user", "content": "word " * 40000}], **asked)
    except litellm.ContextWindowExceededError as error:
        refused = [error.message]
    try:
        litellm.completion(messages=messages, max_tokens=10**6, **asked)
    except litellm.ContextWindowExceededError as error:
        refused.append(error.message)
    return {
        "refused": refused,
        "arguments": json.loads(call.function.arguments),
        "reasoning": first.reasoning_content,
        "answer": second.content,
        "streamed": json.loads(whole.choices[0].message.tool_calls[0].function.arguments),
        "streamed_reasoning": whole.choices[0].message.reasoning_content,
        "usage": whole.usage.completion_tokens,
        "parsed": Report.model_validate_json(parsed).model_dump(),
    }


print(json.dumps([chat(f"{name}/small") for name in ("openai", "hosted_vllm")]))
