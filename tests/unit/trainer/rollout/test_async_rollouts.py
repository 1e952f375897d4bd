"""The pool between a trainer that takes groups in prompt order and an engine that finishes them in any order."""

import base64
import json
import random
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from megagrpo.config import ConfigError, load_config
from megagrpo.data.images.prompt_images import ImageReader, image_columns
from megagrpo.engine.http.protocol import EngineError, EngineInterrupted, EngineStarved
from megagrpo.records.rows.packed_groups import packed, unpacked
from megagrpo.row_image import RowImage
from megagrpo.trainer.rollout.async_rollouts import AsyncPool
from megagrpo.types import Dialogue, Prompt, Rollout, SamplingParams, Turn
from tests.distributed.tiny_vision import image, write_model
from tests.unit.config.test_placement import QUICKSTART
from tests.unit.waiting import wait_until

SAMPLING = SamplingParams(1.0, 8)
WANTED = 4  # prompts per step

FORCED = ((1, 2),)  # of a thought that the engine ended


class Engine:
    """Finishes the groups of a call one by one, after seeded times; groups in flight during a sync continue with the
    next version."""

    def __init__(self, seed=0, seconds=0.004):
        self.random, self.seconds, self.weight_version = random.Random(seed), seconds, 1
        self.begun, self.held_up, self.error, self.slow, self.cuts = [], {}, None, threading.Event(), []
        self.stop = threading.Event()

    def groups(self, prompts, n, sampling, seed, on_begun):
        if self.error:
            raise self.error
        begun = self.weight_version
        self.begun += [(prompt.position, begun) for prompt in prompts]
        for k, i in enumerate(self.random.sample(range(len(prompts)), len(prompts))):
            if k == len(prompts) - 1:
                on_begun()
            if self.stop.wait(self.random.random() * self.seconds):
                raise EngineInterrupted("generation was interrupted")
            if self.held_up.get(prompts[i].position) == "slow":
                self.slow.wait(10)
                self.held_up.pop(prompts[i].position)
            held_up = self.held_up.pop(prompts[i].position, begun)
            version = begun if held_up == "branch" else held_up
            later = ((1, self.weight_version),) if self.weight_version > version else ()
            rollout = Rollout(
                prompts[i],
                (1, 2),
                (-1.0, -1.0),
                "stop",
                version,
                "",
                later_versions=later,
                stop_string="end",
                forced=FORCED,
            )
            if held_up == "branch":
                rollout = replace(rollout, branches=(replace(rollout, weight_version=-1),))
            yield i, [rollout] * n

    def cut(self, places):
        self.cuts.append(sorted(places))
        self.slow.set()

    def interrupt(self):
        self.stop.set()


class Rewards:
    """Records the groups to score, and their step."""

    def __init__(self):
        self.begun = []

    def begin(self, step, task=""):
        self.begun.append(Scoring(step))
        return self.begun[-1]


class Scoring:
    def __init__(self, step):
        self.step, self.group, self.dropped = step, None, False

    def add(self, place, group):
        self.group = group

    def drop(self):
        self.dropped = True


def prompts(start, stop):
    return [Prompt(place % 7, (1,), "", position=place) for place in range(start, stop)]


def take(pool, wanted, step=0):
    groups = {group.index: group.rollouts for group in pool.groups(wanted, 2, SAMPLING, step, step)}
    return [groups[index] for index in range(len(wanted))]


def train(pool, engine, steps, max_staleness, pace=0.004):
    """The prompt indices that each step trains on, and the age of the oldest token."""
    trained, ages, pauses = [], [], random.Random(5)
    for step in range(steps):
        asked, end = pool.asked, min(steps, step + 1 + max_staleness) * WANTED
        pool.ask([p for p in prompts(step * WANTED, end) if p.position not in asked], 2, SAMPLING, step, step)
        groups = take(pool, prompts(step * WANTED, (step + 1) * WANTED), step)
        trained.append([rollout.prompt.position for group in groups for rollout in group[:1]])
        ages += [engine.weight_version - rollout.weight_version for group in groups for rollout in group]
        time.sleep(pauses.random() * pace)
        engine.weight_version += 1
    return trained, ages


@pytest.mark.parametrize("max_staleness", [1, 2, 3])
@pytest.mark.parametrize("pace", [0.0, 0.02], ids=["fast trainer", "slow trainer"])
def test_every_group_is_trained_on_once_in_order_and_none_is_too_old(max_staleness, pace):
    engine = Engine(seed=max_staleness)
    with AsyncPool(engine, Rewards(), max_staleness) as pool:
        trained, ages = train(pool, engine, 12, max_staleness, pace)
        assert pool.asked == set()
    assert trained == [list(range(step * WANTED, (step + 1) * WANTED)) for step in range(12)]
    assert [place for place, _ in sorted(engine.begun)] == list(range(12 * WANTED))
    assert max(ages) == max_staleness and pool.counters() == {"async/dropped": 0.0, "async/cut": 0.0}


def test_no_group_is_begun_earlier_than_the_bound_allows():
    engine = Engine()
    with AsyncPool(engine, Rewards(), 2) as pool:
        train(pool, engine, 6, 2, pace=0.03)
    late = [version - max(1, place // WANTED - 1) for place, version in engine.begun]
    assert min(late) == 0 and engine.begun == sorted(engine.begun)


def test_what_is_asked_for_later_does_not_go_before():
    engine = Engine()
    engine.held_up = {0: "slow", 1: "slow"}
    with AsyncPool(engine, Rewards(), 3) as pool:
        for first in range(0, 12, 4):
            pool.ask(prompts(first, first + 4), 2, SAMPLING, 0, 0)
        time.sleep(0.05)
        assert [place for place, _ in engine.begun] == [0, 1, 2, 3]
        engine.slow.set()
        take(pool, prompts(0, 12))
        assert [place for place, _ in engine.begun] == list(range(12))


def test_groups_are_scored_from_when_they_are_finished_each_for_its_step():
    rewards = Rewards()
    with AsyncPool(Engine(), rewards, 1) as pool:
        for step in range(2):
            pool.ask(prompts(step * 4, step * 4 + 4), 2, SAMPLING, 0, step)
        wait_until(lambda: len(rewards.begun) == 8)
        assert {s.group[0].prompt.position: s.step for s in rewards.begun} == {place: place // 4 for place in range(8)}
        handed = sorted(pool.groups(prompts(0, 8), 2, SAMPLING, 0, 0), key=lambda group: group.index)
        assert [group.scoring for group in handed] == sorted(rewards.begun, key=lambda s: s.group[0].prompt.position)
    assert not any(scoring.dropped for scoring in rewards.begun)


def test_a_group_that_was_held_up_too_long_is_generated_again_and_counted():
    engine, rewards = Engine(), Rewards()
    engine.held_up = {9: -1, 13: "branch", 17: -1}
    with AsyncPool(engine, rewards, 1) as pool:
        trained, ages = train(pool, engine, 6, 1)
    assert [place for step in trained for place in step] == list(range(6 * WANTED)) and max(ages) <= 1
    assert sorted(place for place, _ in engine.begun if place in (9, 13, 17)) == [9, 9, 13, 13, 17, 17]
    assert [pool.counters()["async/dropped"] for _ in range(2)] == [3.0, 0.0]
    assert (
        sorted(s.group[0].prompt.position for s in rewards.begun if s.dropped) == [9, 13, 17]
        and len(rewards.begun) == 6 * WANTED + 3
    )


def test_what_was_asked_for_and_passed_over_is_forgotten():
    engine, rewards = Engine(), Rewards()
    with AsyncPool(engine, rewards, 2) as pool:
        pool.ask(prompts(0, 8), 2, SAMPLING, 0, 0)
        take(pool, prompts(0, 2) + prompts(6, 8))
        wait_until(lambda: not pool.asked)
        assert pool.counters()["async/dropped"] == 4.0
    assert [s.group[0].prompt.position in range(2, 6) for s in rewards.begun] == [s.dropped for s in rewards.begun]


def test_what_a_step_waits_for_too_long_is_cut_and_the_rest_is_left_alone():
    engine = Engine()
    engine.held_up = {2: "slow"}
    with AsyncPool(engine, Rewards(), 1, straggler_seconds=0.1) as pool:
        for mine in (prompts(0, 2) + prompts(3, 8), prompts(2, 3)):
            pool.ask(mine, 2, SAMPLING, 0, 0)
        take(pool, prompts(0, 4))
        assert engine.cuts == [[2]] and pool.counters() == {"async/dropped": 0.0, "async/cut": 1.0}


def test_a_resumed_pool_hands_out_what_was_finished_and_asks_for_the_rest():
    engine = Engine()
    with AsyncPool(engine, Rewards(), 1) as pool:
        pool.ask(prompts(0, 6), 2, SAMPLING, 0, 0)
        before = take(pool, prompts(0, 4))
        wait_until(lambda: len(pool.state_dict()) == 2)
        saved = json.loads(json.dumps(pool.state_dict()))
    assert before and [group["place"] for group in saved] == [4, 5]
    engine = Engine()
    engine.weight_version = 2  # the first sync of the resumed run
    with AsyncPool(engine, rewards := Rewards(), 1) as pool:
        pool.load_state_dict(saved)
        groups = take(pool, prompts(4, 8), 3)
    assert [place for place, _ in sorted(engine.begun)] == [6, 7]
    assert (
        groups[0]
        == [Rollout(prompts(4, 5)[0], (1, 2), (-1.0, -1.0), "stop", 2, "", stop_string="end", forced=FORCED)] * 2
    )
    assert [scoring.step for scoring in rewards.begun] == [3] * 4


@pytest.mark.parametrize("changed", [dict(prompt_id=6), dict(rollouts=[])], ids=["other data", "other group size"])
def test_groups_in_a_checkpoint_for_another_prompt_are_generated_again(changed):
    engine = Engine()
    with AsyncPool(engine, Rewards(), 1) as pool:
        pool.load_state_dict(
            [{"place": 0} | packed([Rollout(prompts(0, 1)[0], (5,), (-1.0,), "stop", 1, "")] * 2) | changed]
        )
        assert take(pool, prompts(0, 1))[0][0].response_ids.tolist() == [1, 2]


def test_the_version_of_each_token_is_known():
    rollout = Rollout(prompts(0, 1)[0], (1, 2, 3, 4), (0.0,) * 4, "stop", 5, "", later_versions=((1, 6), (3, 8)))
    assert rollout.token_versions.tolist() == [5, 6, 6, 8]
    (back,) = unpacked(json.loads(json.dumps(packed([rollout]))), rollout.prompt, later=1)
    assert back == replace(rollout, weight_version=6, later_versions=((1, 7), (3, 9)))


def test_a_checkpoint_keeps_conversations():
    prompt = replace(prompts(0, 1)[0], token_ids=(1, 2, 9), messages="hi Go!", columns={"answer": "4"})
    turns = Turn(0, 1, 0.5, ("f", "g"), 1, 1, "stop", 1.5, 0.25), Turn(2, 3, finish_reason="length")
    messages = (
        {"role": "assistant", "content": "a"},
        {"role": "tool", "content": "b"},
        {"role": "assistant", "content": ""},
    )
    dialogue = Dialogue([True, False, True], messages, turns, "failed", {"turns": 0.5, "Board": None}, "died", 2)
    rollout = Rollout(prompt, (7, 8, 2), (-0.1, 0.0, -0.2), "length", 5, "a", dialogue, later_versions=((2, 6),))
    (back,) = unpacked(
        json.loads(json.dumps(packed([rollout]))), replace(prompts(0, 1)[0], columns=prompt.columns), later=1
    )
    assert back == replace(rollout, weight_version=6, later_versions=((2, 7),))
    assert [vars(turn) for turn in back.dialogue.turns] == [vars(turn) for turn in turns]  # with their seconds


def test_a_checkpoint_leaves_images_to_the_data_set(tmp_path):
    """A group has no pixels in the checkpoint, and the images of its prompt when it is restored."""
    write_model(tmp_path)
    reader, picture = ImageReader(tmp_path, 69, 2), image(84, 56, 1)
    ids, inputs = reader.placed([5, 69, 7], [picture])
    columns = image_columns({"image": picture}, [RowImage(picture)])
    prompt = replace(prompts(0, 1)[0], token_ids=ids, inputs=inputs, columns=columns)
    dialogue = Dialogue([True], ({"role": "assistant", "content": "a"},), (Turn(0, 1),), "done")
    longer = replace(prompt, token_ids=(*ids, 9), messages="with the text of reset")
    group = Rollout(prompt, (7,), (-0.1,), "stop", 5, "a"), Rollout(longer, (7,), (-0.1,), "stop", 5, "a", dialogue)
    text = json.dumps(packed(group))
    assert len(text) < 1500
    (_, again), images = reader.placed([5, 69, 7], [picture]), image_columns({"image": picture}, [RowImage(picture)])
    back = unpacked(json.loads(text), replace(prompt, inputs=again, columns=images))
    assert all(rollout.prompt.inputs is again and rollout.prompt.columns is images for rollout in back)
    assert [rollout.prompt.token_ids for rollout in back] == [ids, (*ids, 9)]


def test_a_checkpoint_keeps_the_samples_of_a_branched_trajectory():
    def sample(number: int, **more) -> Rollout:
        messages = [{"role": "user", "content": f"context {number}"}]
        asked = replace(prompts(0, 1)[0], token_ids=(1, number), messages=messages, opened="<think>" * (number % 2))
        dialogue = Dialogue([True, number == 3], ({"role": "assistant", "content": "x"},), (Turn(0, 1),), "done")
        return Rollout(asked, (5, number), (-1.0, -0.5), "stop", number, "x", dialogue, **more)

    whole = sample(9, branches=(sample(3), sample(4)))
    (back,) = unpacked(json.loads(json.dumps(packed([whole]))), prompts(0, 1)[0], later=1)
    newer = [replace(branch, weight_version=branch.weight_version + 1) for branch in whole.branches]
    assert back == replace(whole, weight_version=10, branches=tuple(newer))


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
def test_a_checkpoint_keeps_the_routes_of_a_group(dtype):
    routes = np.arange(3 * 4 * 2, dtype=dtype).reshape(3, 4, 2)
    rollout = Rollout(prompts(0, 1)[0], (1, 2, 3), (-0.1,) * 3, "stop", 5, "", routes=routes)
    (back,) = unpacked(json.loads(json.dumps(packed([rollout]))), rollout.prompt, later=1)
    assert back == replace(rollout, weight_version=6) and back.routes.dtype == dtype
    assert "routes" not in packed([replace(rollout, routes=None)])["rollouts"][0]


def test_groups_of_an_older_checkpoint_have_log_probs_in_float64():
    rollout = Rollout(prompts(0, 1)[0], (1, 2, 3), (-0.1, -1.5, -0.25), "stop", 5, "")
    saved = packed([rollout])
    saved["rollouts"][0]["rollout_logprobs"] = base64.b64encode(
        rollout.rollout_logprobs.astype("f8").tobytes()
    ).decode()
    assert unpacked(saved, rollout.prompt, later=1) == [replace(rollout, weight_version=6)]


def test_prompts_that_were_not_requested_ahead_are_generated_at_once():
    engine = Engine()
    with AsyncPool(engine, Rewards(), 1) as pool:
        groups = take(pool, prompts(0, 3))
        assert [group[0].prompt.position for group in groups] == [0, 1, 2] and take(pool, []) == []


def test_what_fails_in_the_background_is_raised_where_its_groups_are_wanted():
    engine = Engine()
    engine.error = EngineError("no server is left")
    with AsyncPool(engine, Rewards(), 1) as pool:
        pool.ask(prompts(0, 4), 2, SAMPLING, 0, 0)
        with pytest.raises(EngineError, match="no server is left"):
            take(pool, prompts(0, 4))


def test_after_a_failure_that_was_mended_what_is_missing_is_asked_for_again():
    engine = Engine()
    with AsyncPool(engine, Rewards(), 1) as pool:
        pool.ask(prompts(0, 2), 2, SAMPLING, 0, 0)
        wait_until(lambda: len(pool.state_dict()) == 2)
        engine.error = EngineStarved("no server has the current weights")
        pool.ask(prompts(2, 4), 2, SAMPLING, 0, 0)
        with pytest.raises(EngineStarved):
            take(pool, prompts(0, 4))
        engine.error = None
        groups = take(pool, prompts(0, 4))
    assert [group[0].prompt.position for group in groups] == [0, 1, 2, 3] and [place for place, _ in engine.begun] == [
        0,
        1,
        2,
        3,
    ]


def test_an_interrupted_engine_ends_the_wait_and_no_thread_is_left():
    engine = Engine(seconds=60)
    with AsyncPool(engine, Rewards(), 1) as pool:
        pool.ask(prompts(0, 8), 2, SAMPLING, 0, 0)
        threading.Timer(0.05, engine.interrupt).start()
        with pytest.raises(EngineInterrupted):
            take(pool, prompts(0, 4))
    assert not [thread for thread in threading.enumerate() if thread.name == "pool"]


def test_idle_is_the_time_in_which_nothing_is_under_way():
    engine = Engine(seconds=0.0)
    with AsyncPool(engine, Rewards(), 1) as pool:
        take(pool, prompts(0, 4))
        pool.measured()
        time.sleep(0.5)
        assert pool.measured() == pytest.approx(
            {"idle/servers": 1.0, "async/in_flight": 0.0, "async/waiting": 0.0}, abs=0.05
        )
        engine.seconds = 60
        pool.ask(prompts(4, 8), 2, SAMPLING, 0, 0)
        time.sleep(0.5)
        assert pool.measured() == pytest.approx(
            {"idle/servers": 0.0, "async/in_flight": 4.0, "async/waiting": 0.0}, abs=0.05
        )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["rollout.placement=auto"],
            "rollout.max_staleness: 1 requires servers that .* auto shares .* set placement to dedicated",
        ),
        (
            ["algorithm.importance_correction=off"],
            "rollout.max_staleness: 1 trains on .*importance_correction is off; .* to token_tr",
        ),
        (
            ["lora.rank=8", "lora.sync=adapter"],
            "rollout.in_flight: keep continues .* a request keeps its adapter; choose wait .* or resume",
        ),
        (
            ["rollout.max_staleness=0", "rollout.in_flight=resume"],
            "rollout.in_flight: resume only applies with rollout.max_staleness > 0",
        ),
        (
            ["rollout.max_staleness=0", "rollout.straggler_seconds=9"],
            "rollout.straggler_seconds: 9.0 only applies with rollout.max_staleness > 0",
        ),
    ],
)
def test_what_does_not_go_with_running_ahead_is_refused(overrides, message):
    ahead = ["rollout.max_staleness=1", "rollout.placement=dedicated", "algorithm.importance_correction=token_truncate"]
    load_config(QUICKSTART, ahead)
    with pytest.raises(ConfigError, match=message):
        load_config(QUICKSTART, [*ahead, *overrides])
