"""langchain-openai: tools, structured output in three ways, and LangGraph's agent. Arguments: the URL, and
"scripted" if the model is."""

import json
import sys
import warnings
from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langchain_openai.chat_models.base import OpenAIContextOverflowError
from langgraph.prebuilt import create_react_agent
from pydantic import BaseModel

warnings.simplefilter("ignore")  # LangGraph's agent is to move to another package


class Report(BaseModel):
    """What there is to say."""

    town: Literal["Bergen", "Oslo"]
    wet: bool


@tool
def weather(town: str) -> str:
    """The weather of a town."""
    return f"It is raining in {town}."


model = ChatOpenAI(model="small", base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0, max_tokens=400, seed=1)
task = "Is it raining in Bergen?"
ways = {
    "json_schema": {"method": "json_schema", "strict": True},
    "function_calling": {"method": "function_calling", "tool_choice": "required"},
    "json_mode": {"method": "json_mode"},
}
found = {}
if sys.argv[2] == "scripted":
    tools = model.bind_tools([weather], strict=True)
    found["call"] = tools.invoke(task).tool_calls[0]["args"]
    chunks = list(tools.stream(task))
    found["chunks"] = len(chunks)
    found["streamed"] = sum(chunks[1:], chunks[0]).tool_calls[0]["args"]
    agent = create_react_agent(model, [weather], prompt="Be brief.")
    found["messages"] = [m.content for m in agent.invoke({"messages": [("user", task)]})["messages"]]
    formatted = create_react_agent(model, [weather], response_format=Report)
    try:
        model.invoke("word " * 40000)
    except OpenAIContextOverflowError as error:
        found["refused"] = error.message
    found["formatted"] = formatted.invoke({"messages": [("user", task)]})["structured_response"].model_dump()
else:
    del ways["json_mode"]  # any object would do
for name, way in ways.items():
    found[name] = model.with_structured_output(Report, **way).invoke(task).model_dump()
print(json.dumps(found))
