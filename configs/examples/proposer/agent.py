"""One policy proposes an addition, and solves it: two conversations, each with a reward of its own."""

import re

from openai import AsyncOpenAI


async def propose_and_solve(prompt, smallest):
    async with AsyncOpenAI() as client:

        async def ask(role, content):
            messages = [{"role": "user", "content": content}]
            reply = await client.chat.completions.create(model=f"policy:{role}", messages=messages)
            return reply.choices[0].message.content

        problem = re.match(r"What is (\d+) \+ (\d+)\?$", (await ask("proposer", prompt)).strip())
        if not problem:
            return {"proposer": 0.0}
        a, b = map(int, problem.groups())
        answer = re.findall(r"\d+", await ask("solver", problem[0]))
        is_new = int(smallest) <= min(a, b) and max(a, b) < 100 and a != b and problem[0] not in prompt
        return {"proposer": 1.0 if is_new else 0.2, "solver": float(answer[-1:] == [str(a + b)])}
