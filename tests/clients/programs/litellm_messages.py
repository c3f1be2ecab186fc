"""litellm in Anthropic's form, which asks `/v1/responses`: a call and its result, whole and streamed. Arguments: the
URL."""

import asyncio
import json
import sys

import litellm

TOOL = {
    "name": "weather",
    "description": "The weather of a town.",
    "input_schema": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
}
QUESTION = {"role": "user", "content": "Is it raining in Bergen?"}


async def ask(messages, **more):
    asked = {"model": "openai/small", "api_base": f"{sys.argv[1]}/v1", "api_key": "none", "max_tokens": 200}
    return await litellm.anthropic.messages.acreate(
        **asked, system="Be short.", messages=messages, tools=[TOOL], **more
    )


async def main():
    first = await ask([QUESTION])
    (call,) = [part for part in first["content"] if part["type"] == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "It is raining."}
    answered = [QUESTION, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    second = await ask(answered)
    frames = [frame async for frame in await ask([QUESTION], stream=True)]
    text = "".join(frame.decode() if isinstance(frame, bytes) else frame for frame in frames)
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    found = {
        "input": call["input"],
        "stop_reasons": [first["stop_reason"], second["stop_reason"]],
        "answer": [part["text"] for part in second["content"] if part["type"] == "text"],
        "tokens": second["usage"]["output_tokens"],
        "streamed": json.loads("".join(delta.get("partial_json", "") for delta in deltas)),
        "ends": [event["delta"]["stop_reason"] for event in events if event["type"] == "message_delta"],
    }
    print(json.dumps(found))


asyncio.run(main())
