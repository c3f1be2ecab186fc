"""smolagents: an agent that calls tools, whole and streamed, and one that writes code in JSON. Arguments: the URL."""

import json
import sys

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool


@tool
def weather(town: str) -> str:
    """The weather of a town.

    Args:
        town: its name
    """
    return f"It is raining in {town}."


model = OpenAIModel(
    "small", api_base=f"{sys.argv[1]}/v1", api_key="none", client_kwargs={"max_retries": 0}, retry=False
)
task = "Is it raining in Bergen?"
found = {}
for name, streamed in (("whole", False), ("streamed", True)):
    agent = ToolCallingAgent([weather], model, max_steps=3, stream_outputs=streamed)
    found[name] = agent.run(task)
    found[f"{name}_observations"] = [step.observations for step in agent.memory.steps[1:]]
coder = CodeAgent([weather], model, max_steps=3, use_structured_outputs_internally=True)
found["coder"] = coder.run(task)
print()
print(json.dumps(found))
