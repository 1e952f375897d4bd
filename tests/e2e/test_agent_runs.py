"""Runs that train an agent with the `openai` package at a real engine, on the tokens that it sampled."""

import json
import shutil

import pytest

from tests.e2e import world

AGENTS = '''
"""Agents of the tests."""

import asyncio

import openai

openai.OpenAI(api_key="none")  # imports once what each conversation, a fork, would import


async def twice(prompt, client):
    """Ask, and ask again with the history; every other conversation also begins a second history."""
    async with openai.AsyncOpenAI() as model:
        ask, messages = model.chat.completions.create, [{"role": "user", "content": prompt}]
        reply = await ask(model=client.model, messages=messages, temperature=0.3)
        more = [*messages, reply.choices[0].message, {"role": "user", "content": "?"}]
        other = ask(model=client.model, messages=messages, stop=["a", "e"], max_tokens=6)
        replies = await asyncio.gather(ask(model=client.model, messages=more), other)
        if any(c.isdigit() for c in replies[0].choices[0].message.content):
            raise RuntimeError("a digit")
    return float(len(replies[0].choices[0].message.content))


def streams(prompt):
    """Read two turns as streams, and count the parts of their texts."""
    client, messages, parts = openai.OpenAI(), [{"role": "user", "content": prompt}], []
    for _ in range(2):
        text = ""
        for chunk in client.chat.completions.create(model="m", messages=messages, stream=True, stop="zz"):
            text += chunk.choices[0].delta.content or ""
            parts.append(bool(chunk.choices[0].delta.content))
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "?"}]
    return float(sum(parts))


def alone(prompt):
    return len(openai.OpenAI().responses.create(model="m", input=prompt).output_text) / 10
'''


@pytest.fixture(scope="module")
def talkative(tmp_path_factory):
    """A folder with the world's model, where a quarter of all tokens end a turn, and agents."""
    folder = tmp_path_factory.mktemp("talkative")
    shutil.copytree(world.folder() / "model", folder / "model")
    (folder / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [*range(10, 74), 257]}))
    (folder / "mine.py").write_text(AGENTS)
    return folder


def options(talkative, agent, *more):
    limits = ["rollout.max_prompt_length=40", "rollout.max_completion_length=24", "multi_turn.workers=1"]
    return [f"model.path={talkative}/model", f"multi_turn.agent={talkative}/mine.py:{agent}", *limits, *more]


def test_an_agent_is_trained_on_exactly_the_tokens_of_all_its_samples(talkative, tmp_path):
    words = options(talkative, "twice", "rewards.functions=[]", "algorithm.num_iterations=2", "debug.dump_steps=[2]")
    run = world.train(tmp_path, *words)
    assert run.code == 0, run.err
    for line in run.metrics:
        rows = [row for row in run.completions if row["step"] == line["step"]]
        assert 1 <= line["token_mult_prob_error"] < 1.0001
        failed = [row for row in rows if row["dialogue"]["ended"] == "failed"]
        assert line["multi_turn/failures"] == len(failed) > 0 and all(row["reward"] == 0 for row in failed)
        assert line["agents/branches/fork"] == len(rows) == sum(len(row["branches"]) for row in rows)
        assert line["agents/ignored/temperature"] == len(rows)
        assert line["rewards/twice/mean"] == pytest.approx(sum(row["reward"] for row in rows) / len(rows))
    code, said = world.audit(run.folder, "--step", 2)
    assert code == 0, said


def test_an_agents_turns_have_thinking_budgets(talkative, tmp_path):
    """The agent reads the forced text, in the stream too, and its history goes on behind the forced tokens."""
    shutil.copytree(talkative / "model", tmp_path / "model")
    words = [*options(talkative, "streams", *world.open_thoughts(tmp_path / "model")), "rewards.functions=[]"]
    run = world.train(tmp_path, *words, "algorithm.num_iterations=2", "debug.dump_steps=[2]")
    assert run.code == 0, run.err
    forced = []
    for line in run.metrics:
        rows = [row for row in run.completions if row["step"] == line["step"]]
        assert 1 <= line["token_mult_prob_error"] < 1.0001 and "agents/broken_streams" not in line
        for sample in (sample for row in rows for sample in (row, *row.get("branches", ()))):
            texts = [m["content"] for m in sample["dialogue"]["messages"] if m["role"] == "assistant"]
            assert sum("</think>" in text for text in texts) >= len(sample["forced_tokens"])
            assert all(stop - start == 1 for start, stop in sample["forced_tokens"])
            forced.append(len(sample["forced_tokens"]))
    assert sum(forced) > len(forced) / 3
    code, said = world.audit(run.folder, "--step", 2)
    assert code == 0, said


@pytest.mark.full
def test_turns_that_the_agent_reads_as_streams_are_trained_on_as_sampled(talkative, tmp_path):
    words = ["rewards.functions=[]", "algorithm.num_iterations=2", "debug.dump_steps=[2]", "rollout.temperature=1.0"]
    run = world.train(tmp_path, *options(talkative, "streams", *words))
    assert run.code == 0, run.err
    for line in run.metrics:
        rows = [row for row in run.completions if row["step"] == line["step"]]
        assert 1 <= line["token_mult_prob_error"] < 1.0001 and "agents/broken_streams" not in line
        assert not any("branches" in row for row in rows)  # the agent has the text exactly as it was sampled
    assert max(row["reward"] for row in run.completions) > 3  # texts come in parts
    assert {len(row["dialogue"]["turns"]) for row in run.completions} >= {2}
    code, said = world.audit(run.folder, "--step", 2)
    assert code == 0, said
