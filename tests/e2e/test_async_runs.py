"""Whole runs with generation ahead of training, on real vLLM servers."""

import json
import os
import signal

import pytest

from megagrpo.records.checkpoints.run_files import checkpoints
from tests.e2e import world

AHEAD = ("rollout.max_staleness=1", "algorithm.importance_correction=token_truncate")
STILL = ("train.learning_rate=1e-30",)  # weights stay constant
SLOW = ("rollout.max_completion_length=40", "rollout.max_num_seqs=4")  # one group after another
GROUPS, GROUP = 4, 4  # groups per step, responses per group


def texts(run):
    return [
        (row["step"], row["prompt_id"], row["completion"], row["reward"], row["advantage"]) for row in run.completions
    ]


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory):
    """Every response of a synchronous run of twelve steps, and the gradient norm of each step."""
    run = world.train(tmp_path_factory.mktemp("synchronous"), "run.max_steps=12", *STILL)
    assert run.code == 0 and not any(
        name.startswith(("staleness/", "async/")) for line in run.metrics for name in line
    ), run.err
    return texts(run), [line["grad_norm"] for line in run.metrics]


def test_a_policy_that_stands_still_gets_the_very_responses_of_a_synchronous_run(tmp_path):
    plain = world.train(tmp_path / "synchronous", "run.max_steps=4", *STILL)
    assert not any(name.startswith(("staleness/", "async/")) for line in plain.metrics for name in line)
    run = world.train(tmp_path, "run.max_steps=4", *STILL, *AHEAD)
    assert run.code == 0, run.err
    assert texts(run) == texts(plain) and len(texts(run)) == 4 * GROUPS * GROUP
    assert [line["grad_norm"] for line in run.metrics] == pytest.approx(
        [line["grad_norm"] for line in plain.metrics], rel=1e-4
    )
    assert [line["staleness/max"] for line in run.metrics] == [0.0, 1.0, 1.0, 1.0]
    assert [line["async/waiting"] + line["async/in_flight"] for line in run.metrics] == [4.0, 4.0, 4.0, 0.0]


@pytest.mark.full
def test_a_run_that_is_stopped_and_resumed_loses_no_prompt_and_repeats_none(tmp_path, synchronous):
    with world.running(tmp_path, "run.max_steps=11", *STILL, *AHEAD) as trainer:
        world.wait_for(lambda: world.steps_done(tmp_path) >= 2, "second step")
        os.kill(trainer.pid, signal.SIGTERM)
        stopped = trainer.wait()
    assert stopped.code == 128 + signal.SIGTERM, stopped.err
    saved = json.loads((stopped.newest / "megagrpo.json").read_text())["state"]
    assert saved["cursor"] == saved["step"] * GROUPS and saved["step"] < 11
    assert {group["place"] // GROUPS for group in saved["ahead"]} <= {saved["step"], saved["step"] + 1}
    run = world.train(tmp_path, f"run.max_steps={saved['step'] + 1}", *STILL, *AHEAD, "run.resume=true")
    assert run.code == 0 and texts(run) == synchronous[0][: (saved["step"] + 1) * GROUPS * GROUP], run.err


@pytest.mark.full
@pytest.mark.parametrize("moves", [False, True], ids=["still", "moving"])
def test_a_run_that_is_killed_and_resumed_trains_on_every_prompt_once(moves, tmp_path, synchronous):
    words = [*(() if moves else STILL), *AHEAD, "run.save_steps=1", "run.save_total_limit=1", "run.async_save=true"]
    with world.running(tmp_path, "run.max_steps=1000", *words) as trainer:
        world.wait_for(lambda: world.steps_done(tmp_path) >= 3, "third step")
        os.kill(trainer.pid, signal.SIGKILL)
        trainer.wait()
    saved = int(checkpoints(tmp_path / "run" / "checkpoints")[-1].name.removeprefix("step_"))
    steps = saved + 3
    run = world.train(tmp_path, f"run.max_steps={steps}", *words, "--resume")
    assert run.code == 0 and f"after step {saved}" in run.out, run.err
    assert [line["step"] for line in run.metrics] == list(range(1, steps + 1))
    expected = synchronous[0][: steps * GROUPS * GROUP]
    assert [row[:2] for row in texts(run)] == [row[:2] for row in expected] and (texts(run) == expected) != moves
    assert all(line["staleness/max"] <= 1 for line in run.metrics)


@pytest.mark.full
def test_what_is_generated_ahead_is_scored_while_the_step_before_trains(tmp_path):
    (tmp_path / "stamp.py").write_text(
        "import time\n\ndef stamp(completions, **_):\n    return [time.time() for _ in completions]\n"
    )
    run = world.train(
        tmp_path, *AHEAD, *STILL, "run.max_steps=4", f"rewards.functions.0.function={tmp_path}/stamp.py:stamp"
    )
    assert run.code == 0, run.err
    ended = {line["step"]: line["wall_time"] for line in run.metrics}
    scored = {step: [row["rewards"]["stamp"] for row in run.completions if row["step"] == step] for step in ended}
    assert any(min(scored[step]) < ended[step - 1] - 0.05 for step in (2, 3, 4)), (ended, scored)
    assert all(max(scored[step]) < ended[step] for step in ended)


@pytest.mark.parametrize(
    "in_flight", ["keep", *(pytest.param(way, marks=pytest.mark.full) for way in ("resume", "wait"))]
)
def test_responses_under_way_live_through_a_sync(tmp_path, in_flight):
    # generation outlasts the training of a step
    one_by_one = ("rollout.max_completion_length=40", "rollout.max_num_seqs=1")
    run = world.train(tmp_path, *AHEAD, *one_by_one, *STILL, "run.max_steps=3", f"rollout.in_flight={in_flight}")
    assert run.code == 0, run.err
    spanning = [row for row in run.completions if "later_versions" in row]
    assert bool(spanning) == (in_flight != "wait")
    for row in spanning:
        versions = [row["weight_version"], *(version for _, version in row["later_versions"])]
        assert versions == sorted(set(versions)) and row["num_tokens"] > row["later_versions"][-1][0] > 0
        assert row["step"] - 1 <= versions[0] and versions[-1] <= row["step"]
    assert all(line["staleness/max"] <= 1 and line["token_mult_prob_error"] < 1.001 for line in run.metrics)


@pytest.mark.full
def test_responses_that_a_step_waits_for_too_long_are_cut(tmp_path):
    run = world.train(tmp_path, *AHEAD, *SLOW, "run.max_steps=2", "rollout.straggler_seconds=0.03")
    assert run.code == 0 and run.metrics[0]["async/cut"] > 0, run.err
    cut = [row for row in run.completions if row["finish_reason"] == "length" and row["num_tokens"] < 40]
    assert cut and all(row["num_tokens"] > 0 for row in run.completions)
    for line in run.metrics:  # servers work while a step waits; the time before the first step does not count
        assert line["idle/servers"] <= 1 - line["time/generate"] / line["time/step"] + 0.02


@pytest.mark.full
def test_a_server_that_is_killed_while_it_generates_ahead_costs_no_response(tmp_path, synchronous):
    more = (*STILL, *AHEAD, "rollout.placement=dedicated", "run.max_steps=8")
    with world.running(tmp_path, *more, launched=True) as trainer:
        world.wait_for(lambda: world.steps_done(tmp_path) >= 2, "second step")
        for pid in world.family(trainer.pid):
            if "vllm_main.py" in (words := open(f"/proc/{pid}/cmdline").read()) and "supervisor.py" not in words:
                os.kill(pid, signal.SIGKILL)
        run = trainer.wait(seconds=240)
    assert run.code == 0 and "restarting it, 1 of 3 times" in run.out, run.err
    assert texts(run) == synchronous[0][: 8 * GROUPS * GROUP]


@pytest.mark.full
def test_two_replicas_share_what_is_asked_for_ahead(tmp_path, synchronous):
    run = world.finish(world.start(tmp_path, "run.max_steps=4", *STILL, *AHEAD, NPROC="2"), tmp_path)
    assert run.code == 0 and "dp 2" in run.out, run.err
    assert texts(run) == synchronous[0][: 4 * GROUPS * GROUP]
    assert [line["staleness/max"] for line in run.metrics] == [0.0, 1.0, 1.0, 1.0]


@pytest.mark.full
def test_groups_that_replace_others_are_those_that_come_next(tmp_path):
    seldom = f"rewards.functions.0.function={world.folder()}/rewards.py:seldom"
    run = world.train(
        tmp_path, "run.max_steps=5", *AHEAD, "rollout.max_staleness=2", "algorithm.dynamic_sample=true", seldom
    )
    assert run.code == 0, run.err
    drawn = sum(line["dynamic_sample/groups_drawn"] for line in run.metrics)
    assert json.loads((run.newest / "megagrpo.json").read_text())["state"]["cursor"] == drawn > 5 * GROUPS
    assert all(line["staleness/max"] <= 2 for line in run.metrics) and not any(
        line["async/dropped"] for line in run.metrics
    )
