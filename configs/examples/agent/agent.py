"""A calculator agent as one finds it anywhere: it knows OpenAI's package, and nothing of the trainer."""

import json
import operator
import re
from pathlib import Path

from openai import OpenAI

PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
CALCULATOR = {"name": "calculator", "description": "Computes an arithmetic expression.", "parameters": PARAMETERS}
EXAMPLES = json.loads(Path(__file__).with_name("examples.json").read_text())


def calculator(expression):
    a, sign, b = re.fullmatch(r"(\d+) *([-+*]) *(\d+)", expression).groups()
    return {"+": operator.add, "-": operator.sub, "*": operator.mul}[sign](int(a), int(b))


def run(prompt, answer):
    client, messages = OpenAI(), [*EXAMPLES, {"role": "user", "content": prompt}]
    for _ in range(3):
        tools = [{"type": "function", "function": CALCULATOR}]
        reply = client.chat.completions.create(model="gpt-5-mini", messages=messages, tools=tools).choices[0].message
        messages.append(reply)
        if not reply.tool_calls:
            return float(re.findall(r"\d+", reply.content or "")[-1:] == [answer])
        for call in reply.tool_calls:
            try:
                result = calculator(**json.loads(call.function.arguments))
            except Exception as error:
                result = f"error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
    return 0.0
