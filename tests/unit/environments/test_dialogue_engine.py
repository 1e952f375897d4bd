"""Conversations with stand-in servers: real sockets, real workers, and the tokens of a loop that holds them in
lockstep."""

import asyncio
import threading
import time
from contextlib import closing
from dataclasses import replace

import psutil
import pytest

from megagrpo.config import MultiTurnSection
from megagrpo.data.packing.step_samples import StepSamples
from megagrpo.data.tokens.tokenizer import load_tokenizer
from megagrpo.data.tokens.turn_tokens import FollowUps
from megagrpo.engine.client import VllmEngine
from megagrpo.engine.http.protocol import EngineInterrupted, derive_seed
from megagrpo.environments.dialogues import Dialogues
from megagrpo.environments.episodes.conversation import Conversation
from megagrpo.environments.responders import Responders
from megagrpo.trainer.rollout.sample_metrics import rollout_metrics
from megagrpo.types import Prompt, SamplingParams, ScoredRollout
from tests.unit.data.test_tokenizer import chat_folder  # noqa: F401
from tests.unit.engine.stand_ins import StandIn
from tests.unit.environments.test_dialogues import HERMES

SAMPLING = SamplingParams(1.0, 400, (2,))
MINE = '''
import os
import time


def again(messages, turn, turns=3, folder="", slow="", **columns):
    """`turns` turns; the second one of the prompt `slow` waits."""
    if columns.get("name") == slow and turn == 2:
        open(os.path.join(folder, "asked"), "w").close()
        time.sleep(columns["seconds"])
    return [*messages, {"role": "user", "content": f"turn {turn} of {len(messages)} messages"}], turn == turns, turn / 8


class Board:
    """Writes the process of each episode to a file."""

    def __init__(self, folder):
        open(os.path.join(folder, str(os.getpid())), "w").close()

    def step(self, messages, turn):
        time.sleep(600)
'''


@pytest.fixture
def table(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    made = []

    def make(scheduler, **options):
        options = {"scheduler_args": {"folder": str(tmp_path)}, "workers": 2, "timeout": 60.0} | options
        made.append(Responders(MultiTurnSection(scheduler=f"{tmp_path}/mine.py:{scheduler}", **options), tmp_path))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def server():
    with closing(StandIn()) as server:
        server.reason = "stop"
        yield server


@pytest.fixture
def tokenizer(chat_folder):  # noqa: F811
    return load_tokenizer(chat_folder)


def engine_of(server, tokenizer, responders, **options):
    follow_ups = FollowUps(tokenizer, HERMES, [], users=True)
    dialogues = Dialogues(responders, tokenizer, follow_ups, 1000, chat_template=HERMES)
    return dialogues.wrap(VllmEngine([server.url], tokenizer.decode, **options))


def prompts_of(tokenizer, count, **columns):
    return [
        Prompt(i, tokenizer.render(f"Say {i}.", None, HERMES), f"Say {i}.", columns | {"name": str(i)}, position=i)
        for i in range(count)
    ]


def in_lockstep(engine, prompts, n, seed):
    """The rollouts of `n` conversations about each prompt, which all wait for each other after every turn."""
    table, decode = engine.responders, engine._tokenizer.decode
    conversations = [
        Conversation(prompt, i, 0, [{"role": "user", "content": prompt.messages}], 400)
        for prompt in prompts
        for i in range(n)
    ]
    while active := [c for c in conversations if not c.ended]:
        params = [replace(SAMPLING, max_tokens=c.room) for c in active]
        seeds = [derive_seed(seed, c.prompt.prompt_id, c.index, len(c.turns)) for c in active]
        turns = engine.engine.extend([c.prefix for c in active], params, seeds)
        for one, turn in zip(active, turns, strict=True):
            one.add_turn(turn, one.turn_text(turn, decode))
            messages, done, reward = asyncio.run(table.schedule(one))
            one.note(reward=reward)
            one.ended = "done" if done else ""
            if not done:
                one.following(messages, engine._follow_ups)()
    for one in conversations:
        asyncio.run(table.finish(one))
    rollouts = [one.rollout(decode) for one in conversations]
    return [rollouts[i : i + n] for i in range(0, len(rollouts), n)]


def test_conversations_are_those_of_a_loop_in_lockstep(server, tokenizer, table):
    engine, prompts = engine_of(server, tokenizer, table("again")), prompts_of(tokenizer, 3)
    expected = in_lockstep(engine, prompts, 2, 7)
    assert engine.generate(prompts, 2, SAMPLING, 7) == expected
    assert {len(rollout.dialogue.turns) for group in expected for rollout in group} == {3}
    few = engine_of(server, tokenizer, engine.responders, max_num_seqs=1)
    found = few.generate(prompts, 2, SAMPLING, 7)
    assert found == expected
    turns = [turn for group in found for rollout in group for turn in rollout.dialogue.turns]
    assert max(turn.queued for turn in turns) > 0 and all(turn.queued <= turn.generated for turn in turns)


def test_no_conversation_waits_for_another_one(server, tokenizer, table, tmp_path):
    engine = engine_of(server, tokenizer, table("again", scheduler_args={"folder": str(tmp_path), "slow": "1"}))
    groups = list(engine.groups(prompts_of(tokenizer, 4, seconds=4.0), 1, SAMPLING, 0))
    assert [index for index, _ in groups][-1] == 1 and len(groups) == 4
    slow, fast = groups[-1][1][0].dialogue.turns, groups[0][1][0].dialogue.turns
    assert slow[1].answered > 3.9 > max(turn.answered for turn in fast) and all(turn.generated > 0 for turn in slow)
    assert [turn.finish_reason for turn in slow] == ["stop"] * 3
    rollouts = [rollout for _, group in groups for rollout in group]
    metrics = rollout_metrics(StepSamples.of([ScoredRollout(rollout, {}, 0.0) for rollout in rollouts]))
    assert metrics["idle/tools"] > 0.5 and metrics["multi_turn/tool_seconds/max"] > 3.9
    assert sum(metrics[f"idle/{name}"] for name in ("tools", "slots", "generation")) == pytest.approx(1)


def wait_for(path):
    while not path.exists():
        time.sleep(0.02)


def test_a_conversation_that_waits_for_an_answer_is_cut_at_once_and_others_are_not(server, tokenizer, table, tmp_path):
    engine = engine_of(server, tokenizer, table("again", scheduler_args={"folder": str(tmp_path), "slow": "1"}))

    def cut():
        wait_for(tmp_path / "asked")
        engine.cut([1])

    thread, begun = threading.Thread(target=cut), time.monotonic()
    thread.start()
    groups = dict(engine.groups(prompts_of(tokenizer, 3, seconds=50.0), 1, SAMPLING, 0))
    thread.join()
    (one,) = groups[1]
    assert time.monotonic() - begun < 40 and [len(groups[i][0].dialogue.turns) for i in range(3)] == [3, 2, 3]
    assert (one.finish_reason, one.dialogue.ended) == ("length", "length") and one.written[-1]
    assert one.dialogue.rewards == {"turns": 1 / 8}
    again = dict(engine.groups(prompts_of(tokenizer, 3, seconds=0.0), 1, SAMPLING, 0))
    assert len(again[1][0].dialogue.turns) == 3  # a later call is not cut


def test_an_interrupt_ends_conversations_that_wait_and_their_episodes(server, tokenizer, table, tmp_path):
    engine = engine_of(server, tokenizer, table("Board"))

    def interrupt():
        while len([path for path in tmp_path.iterdir() if path.name.isdigit()]) < 4:
            time.sleep(0.02)
        engine.interrupt()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(EngineInterrupted):
        list(engine.groups(prompts_of(tokenizer, 4), 1, SAMPLING, 0))
    thread.join()
    episodes = [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]
    deadline = time.monotonic() + 20
    while any(map(psutil.pid_exists, episodes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(episodes) == 4 and not any(map(psutil.pid_exists, episodes))


def test_several_threads_may_generate_at_once(server, tokenizer, table):
    engine, prompts = engine_of(server, tokenizer, table("again")), prompts_of(tokenizer, 6)
    expected, found = engine.generate(prompts, 2, SAMPLING, 3), {}

    def generate(start):
        found[start] = engine.generate(prompts[start : start + 2], 2, SAMPLING, 3)

    threads = [threading.Thread(target=generate, args=(start,)) for start in (0, 2, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [*found[0], *found[2], *found[4]] == expected


def test_each_token_of_a_conversation_has_the_version_that_sampled_it(server, tokenizer, table):
    engine = engine_of(server, tokenizer, table("again"), in_flight="keep", any_version=True)
    engine.weight_version, server.version = 7, "7"

    def sync():
        while len(server.asked) < 2:
            time.sleep(0.005)
        server.version = "8"

    server.delay = 0.2
    thread = threading.Thread(target=sync)
    thread.start()
    ((rollout,),) = engine.generate(prompts_of(tokenizer, 1), 1, SAMPLING, 3)
    thread.join()
    versions = {rollout.token_versions[turn.start] for turn in rollout.dialogue.turns}
    second = rollout.dialogue.turns[1].start
    assert rollout.weight_version == 7 and rollout.later_versions == ((second, 8),) and versions == {7, 8}
