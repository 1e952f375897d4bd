"""One policy proposes an addition, and solves it: two conversations, each with a reward of its own."""

import re

from openai import AsyncOpenAI


async def propose_and_solve(prompt):
    async with AsyncOpenAI() as client:

        async def ask(role, messages, **options):
            reply = await client.chat.completions.create(model=f"policy:{role}", messages=messages, **options)
            return reply.choices[0].message.content.strip()

        written = await ask("proposer", prompt, stop=["?"]) + "?"
        problem = re.fullmatch(r"What is (\d+) \+ (\d+)\?", written)
        if not problem:
            return {"proposer": 0.0}
        a, b = map(int, problem.groups())
        answer = re.findall(r"\d+", await ask("solver", [{"role": "user", "content": written}]))
        is_hard = 10 <= min(a, b) and max(a, b) < 100 and a != b
        return {"proposer": 1.0 if is_hard else 0.2, "solver": float(answer[-1:] == [str(a + b)])}
