"""Runs with conversations ahead of training, on real vLLM servers."""

import os
import signal

import pytest

from megagrpo.records.checkpoints.run_files import checkpoints
from tests.e2e import world
from tests.e2e.test_async_runs import AHEAD, GROUP, GROUPS, STILL
from tests.e2e.test_dialogue_runs import options, talkative, untimed  # noqa: F401
from tests.e2e.test_replayed_dialogues import check
from tests.e2e.test_replayed_dialogues import options as replaying
from tests.e2e.test_replayed_dialogues import talkative as mixture  # noqa: F401


def responses(run):
    """What a run was trained on: (step, prompt, messages, reward, advantage) of each response."""
    names = "step", "prompt_id", "prompt", "completion", "dialogue", "rewards", "reward", "advantage"
    return [[row[name] for name in names] for row in untimed(run)]


@pytest.fixture(scope="module")
def synchronous(talkative, tmp_path_factory):  # noqa: F811
    run = world.train(tmp_path_factory.mktemp("still"), *options(talkative, "Board", "run.max_steps=9", *STILL))
    assert run.code == 0, run.err
    return responses(run)


def test_a_policy_that_stands_still_gets_the_very_conversations_of_a_synchronous_run(
    talkative,  # noqa: F811
    tmp_path,
):
    plain = world.train(tmp_path / "synchronous", *options(talkative, "Board", "run.max_steps=3", *STILL))
    held_out = f"data.eval.source={world.folder()}/eval.jsonl"
    run = world.train(tmp_path, *options(talkative, "Board", "run.max_steps=3", *STILL, *AHEAD, held_out))
    assert run.code == 0, run.err
    assert responses(run) == responses(plain) and len(responses(run)) == 3 * GROUPS * GROUP
    stale = [line["staleness/max"] for line in run.metrics if "reward" in line]
    assert stale[0] == 0 and set(stale) == {0.0, 1.0}  # an episode may start after the sync
    assert any("eval/multi_turn/mean_turns" in line for line in run.lines)


@pytest.mark.full
@pytest.mark.parametrize("moves", [False, True], ids=["still", "moving"])
def test_each_conversation_is_trained_on_once_through_a_kill(talkative, moves, tmp_path, synchronous):  # noqa: F811
    words = [*(() if moves else STILL), *AHEAD, "run.save_steps=1", "run.save_total_limit=1", "run.async_save=true"]
    words = options(talkative, "Board", *words)
    with world.running(tmp_path, "run.max_steps=1000", *words) as trainer:
        world.wait_for(lambda: world.steps_done(tmp_path) >= 3, "third step")
        os.kill(trainer.pid, signal.SIGKILL)
        trainer.wait()
    saved = int(checkpoints(tmp_path / "run" / "checkpoints")[-1].name.removeprefix("step_"))
    steps = min(saved + 3, 9)
    run = world.train(tmp_path, f"run.max_steps={steps}", *words, "--resume")
    assert run.code == 0 and f"after step {saved}" in run.out, run.err
    expected = synchronous[: steps * GROUPS * GROUP]
    assert [row[:2] for row in responses(run)] == [row[:2] for row in expected]
    assert (responses(run) == expected) != moves
    assert all(line["staleness/max"] <= 1 for line in run.metrics)


@pytest.mark.parametrize(
    "in_flight", ["keep", *(pytest.param(way, marks=pytest.mark.full) for way in ("resume", "wait"))]
)
def test_conversations_under_way_live_through_a_sync(talkative, tmp_path, in_flight):  # noqa: F811
    one_by_one = ("rollout.max_num_seqs=1", f"rollout.in_flight={in_flight}")  # generation outlasts training
    run = world.train(tmp_path, *options(talkative, "again", *AHEAD, *one_by_one, *STILL, "run.max_steps=3"))
    assert run.code == 0, run.err
    spanning = [row for row in run.completions if "later_versions" in row]
    assert spanning
    for row in spanning:
        versions = [row["weight_version"], *(version for _, version in row["later_versions"])]
        starts, turns = [start for start, _ in row["later_versions"]], row["dialogue"]["turns"]
        assert versions == sorted(set(versions)) and starts == sorted(starts)
        assert row["step"] - 1 <= versions[0] and versions[-1] <= row["step"]
        assert all(any(turn["start"] <= start < turn["stop"] for turn in turns) for start in starts)
        if in_flight == "wait":  # a turn has one version
            assert set(starts) <= {turn["start"] for turn in turns}
    assert all(line["staleness/max"] <= 1 and line["token_mult_prob_error"] < 1.001 for line in run.metrics)


@pytest.mark.full
def test_conversations_that_a_step_waits_for_too_long_are_cut(talkative, tmp_path):  # noqa: F811
    slow = f"multi_turn.scheduler_args={{folder: {tmp_path}}}", "rollout.straggler_seconds=0.5", "run.max_steps=1"
    run = world.train(tmp_path, *options(talkative, "slow", *AHEAD, *slow))
    assert run.code == 0 and run.metrics[0]["async/cut"] > 0, run.err
    cut = [row for row in run.completions if row["dialogue"]["ended"] == "length" and row["num_tokens"] < 27]
    assert cut and all(row["num_tokens"] > 0 and row["finish_reason"] == "length" for row in cut)


@pytest.mark.full
def test_routes_are_replayed_across_turns_and_versions(mixture, tmp_path):  # noqa: F811
    run = world.train(tmp_path, *replaying(mixture, "again", *AHEAD, *STILL, "debug.dump_steps=[2]"))
    assert run.code == 0, run.err
    check(run, 2)
