"""litellm: calls of a model that says nothing of use, forced into form. Arguments: the URL."""

import json
import sys

import litellm

PARAMETERS = {
    "type": "object",
    "properties": {"town": {"enum": ["Bergen", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["town", "days"],
    "additionalProperties": False,
}
tool = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
found = []
for name in ("openai", "hosted_vllm"):
    reply = litellm.completion(
        model=f"{name}/small",
        api_base=f"{sys.argv[1]}/v1",
        api_key="none",
        messages=[{"role": "user", "content": "Is it raining?"}],
        tools=[tool],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        parallel_tool_calls=False,
        max_tokens=300,
        seed=1,
    )
    found.append(json.loads(reply.choices[0].message.tool_calls[0].function.arguments))
print(json.dumps(found))
