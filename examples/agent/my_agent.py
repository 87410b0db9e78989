"""A tool-calling agent with the openai client. It contains nothing specific to training."""

import asyncio
import json
import os
import re

import openai

EXPRESSION = {"type": "string", "description": "for example 12*34"}
PARAMETERS = {
    "type": "object",
    "properties": {"expression": EXPRESSION},
    "required": ["expression"],
}
CALCULATOR = {
    "name": "calculator",
    "description": "Works out a product.",
    "parameters": PARAMETERS,
}
TOOLS = [{"type": "function", "function": CALCULATOR}]


def calculate(name, arguments):
    """Return the result of a tool call: the product of two numbers, or `Error`."""
    found = re.fullmatch(r"(\d+)\*(\d+)", str(json.loads(arguments).get("expression")))
    return str(int(found[1]) * int(found[2])) if found and name == "calculator" else "Error"


async def answer(client, question):
    """Return the model's answer after at most three requests."""
    messages = [{"role": "user", "content": question}]
    for _ in range(3):
        reply = await client.chat.completions.create(model="gpt-5-mini", messages=messages, tools=TOOLS, temperature=0.2)
        message = reply.choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = calculate(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


if __name__ == "__main__":
    with open(os.environ["AGENT_ROW"]) as file:
        question = json.load(file)["prompt"][-1]["content"]
    with open("answer.txt", "w") as file:
        file.write(asyncio.run(answer(openai.AsyncOpenAI(), question)) or "")
