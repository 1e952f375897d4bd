"""Turns of agents on stand-in servers with real sockets: the seconds that they wait for slots."""

from contextlib import closing

import pytest

from megagrpo.config import MultiTurnSection
from megagrpo.data.step_samples import StepSamples
from megagrpo.data.tokenizer import load_tokenizer
from megagrpo.engine.client import VllmEngine
from megagrpo.environments.dialogues import DialogueEngine, Dialogues
from megagrpo.environments.responders import Responders
from megagrpo.trainer.rollout.sample_metrics import rollout_metrics
from megagrpo.types import Prompt, SamplingParams, ScoredRollout
from tests.unit.data.test_tokenizer import chat_folder  # noqa: F401
from tests.unit.engine.stand_ins import StandIn
from tests.unit.environments.test_trajectories import HERMES

AGENT = '''
"""Asks once, then for two answers at once."""

import asyncio

import openai


async def run(prompt):
    messages = [{"role": "user", "content": prompt}]
    async with openai.AsyncOpenAI() as model:
        reply = await model.chat.completions.create(model="m", messages=messages)
        messages += [reply.choices[0].message]
        more = [[*messages, {"role": "user", "content": word}] for word in ("one", "two")]
        await asyncio.gather(*[model.chat.completions.create(model="m", messages=one) for one in more])
    return 1.0
'''


@pytest.fixture
def agent(tmp_path):
    (tmp_path / "mine.py").write_text(AGENT)
    with Responders(MultiTurnSection(agent=f"{tmp_path}/mine.py:run", workers=1), tmp_path) as responders:
        yield responders


@pytest.mark.parametrize(("slots", "waits"), [(1, True), (64, False)])
def test_a_turn_that_waits_for_a_slot_is_not_counted_as_generation(agent, chat_folder, slots, waits):  # noqa: F811
    tokenizer = load_tokenizer(chat_folder)
    with closing(StandIn(delay=0.25)) as server:
        server.reason = "stop"
        inner = VllmEngine([server.url], tokenizer.decode, max_num_seqs=slots)
        engine = DialogueEngine(inner, Dialogues(agent, tokenizer, None, 1000, 500, chat_template=HERMES))
        groups = list(engine.groups([Prompt(5, (1,), "hi")], 3, SamplingParams(1.0, 400, (2,)), 3))
    rollouts = [rollout for _, group in groups for rollout in group]
    turns = [turn for whole in rollouts for one in (whole, *whole.branches) for turn in one.dialogue.turns]
    assert len(turns) == 9 and all(turn.generated - turn.queued >= 0.25 for turn in turns)
    assert (max(turn.queued for turn in turns) > 0.2) == waits
    assert all(turn.began > 1.7e9 for turn in turns)
    metrics = rollout_metrics(StepSamples.of([ScoredRollout(rollout, {"run": 1.0}, 1.0) for rollout in rollouts]))
    assert (metrics["idle/slots"] > 0.2) == waits, metrics
