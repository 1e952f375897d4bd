"""Agents of frameworks from PyPI, unmodified, at the address: what they send back is continued or counted."""

import pytest

from megagrpo.data.tokens.tokenizer import load_tokenizer
from tests.unit.data.test_tokenizer import chat_folder  # noqa: F401
from tests.unit.environments.test_agents import Policy, conversed

from megagrpo.config import MultiTurnSection  # isort: skip
from megagrpo.environments.responders import Responders  # isort: skip

OPENAI_AGENTS = '''
import agents


@agents.function_tool
def add(a: int, b: int) -> str:
    """Adds.

    Args:
        a: One number.
        b: Another.
    """
    return str(a + b)


async def run(prompt, client):
    helper = agents.Agent(name="Helper", instructions="Use the tool.", tools=[add], model=client.model)
    result = await agents.Runner.run(helper, prompt)
    result = await agents.Runner.run(helper, [*result.to_input_list(), {"role": "user", "content": "Sure?"}])
    return float("12" in result.final_output)


async def chats(prompt, client):
    agents.set_default_openai_api("chat_completions")
    return await run(prompt, client)


async def streams(prompt, client):
    helper = agents.Agent(name="Helper", instructions="Use the tool.", tools=[add], model=client.model)
    result = agents.Runner.run_streamed(helper, prompt)
    async for _ in result.stream_events():
        pass
    return float("12" in result.final_output)
'''
SMOLAGENTS = '''
import smolagents


@smolagents.tool
def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: One number.
        b: Another.
    """
    return a + b


def run(prompt, client, **options):
    model = smolagents.OpenAIServerModel(client.model, api_base=client.base_url, api_key=client.api_key)
    agent = smolagents.ToolCallingAgent([add], model, max_steps=4, verbosity_level=0, **options)
    return float(agent.run(prompt) == "12")


def streams(prompt, client):
    return run(prompt, client, stream_outputs=True)
'''
SAYS = ['<tool_call>\n{"name": "add", "arguments": {"a": 5, "b": 7}}\n</tool_call>', "It is 12.", "Yes, 12."]


@pytest.fixture(scope="module")
def tokenizer(chat_folder):  # noqa: F811
    return load_tokenizer(chat_folder)


def trained(tmp_path, text, name, policy, **seat):
    (tmp_path / "framework.py").write_text(text)
    section = MultiTurnSection(agent=f"{tmp_path}/framework.py:{name}", workers=1)
    with Responders(section) as agents:
        (rollout,) = conversed(agents, lambda: policy.seat("5 + 7?", **seat))
        return rollout, rollout.dialogue.counts


@pytest.mark.parametrize(("name", "turns"), [("run", 3), ("chats", 3), ("streams", 2)])
def test_an_agent_of_openai_agents_is_one_sample(tokenizer, tmp_path, name, turns):
    pytest.importorskip("agents", reason="openai-agents is not installed (pip install openai-agents)")
    rollout, counts = trained(tmp_path, OPENAI_AGENTS, name, Policy(tokenizer, SAYS))
    assert rollout.dialogue.ended == "done" and rollout.dialogue.rewards == {name: 1.0}
    assert not rollout.branches and len(rollout.dialogue.turns) == turns and counts == {}
    results = [m["content"] for m in rollout.dialogue.messages if m["role"] == "tool"]
    assert results == ["12"] and rollout.prompt.messages[0] == {"role": "system", "content": "Use the tool."}


@pytest.mark.parametrize("name", ["run", pytest.param("streams", marks=pytest.mark.full)])
def test_an_agent_of_smolagents_rewrites_its_history_into_a_sample_per_step(tokenizer, tmp_path, name):
    pytest.importorskip("smolagents", reason="smolagents is not installed (pip install smolagents)")
    final = '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "12"}}\n</tool_call>'
    rollout, counts = trained(
        tmp_path, SMOLAGENTS, name, Policy(tokenizer, [SAYS[0], final]), max_length=40_000, max_response=9000
    )
    assert rollout.dialogue.ended == "done" and rollout.dialogue.rewards == {name: 1.0}
    assert [sample.text for sample in (*rollout.branches, rollout)] == [SAYS[0], final]
    assert counts["agents/branches/edited"] == 1, counts
