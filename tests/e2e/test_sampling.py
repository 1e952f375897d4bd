"""The prompts and responses that a run trains on, read from the files that it leaves."""

import json
import statistics

import pytest
from ranks import run_ranks

from megagrpo.__main__ import main
from tests.e2e import world

MEASURED = (*world.MEASURED, "packing/")
ENGINE = ("token_mult_prob_error", "gen_kl_error", "policy_kl_error", "js_divergence_error", "sampling/")
DYNAMIC = ["algorithm.dynamic_sample=true", "rollout.prompts_per_step=3"]


def seldom():
    return f"rewards.functions=[{{function: {world.folder()}/rewards.py:seldom}}]"


def succeeded(run):
    assert run.code == 0, run.err
    return run


def groups(run, step, size=4):
    rewards = [row["reward"] for row in run.completions if row["step"] == step]
    return [rewards[i : i + size] for i in range(0, len(rewards), size)]


@pytest.fixture(scope="module")
def dynamic(tmp_path_factory):
    """Four steps with dynamic sampling."""
    output = tmp_path_factory.mktemp("dynamic")
    return succeeded(world.train(output, seldom(), *DYNAMIC, "run.max_steps=4", "debug.dump_steps=[2]"))


def told(run):
    """metrics.jsonl without metrics that depend on the clock, the layout, or the batch that vLLM decodes."""

    def same(name):
        return not name.startswith(MEASURED + ENGINE) and not name.endswith("/seconds")

    return [{name: value for name, value in line.items() if same(name)} for line in run.lines]


def test_dynamic_sampling_fills_every_step_with_groups_that_teach(dynamic):
    for line in dynamic.metrics:
        trained = groups(dynamic, line["step"])
        assert len(trained) == 3 and all(len(set(group)) > 1 for group in trained)
        assert line["frac_reward_zero_std"] == 0 and line["dynamic_sample/groups_kept"] == 3
        assert line["dynamic_sample/groups_drawn"] > 3 or line["dynamic_sample/rounds"] == 0
    assert sum(line["dynamic_sample/rounds"] for line in dynamic.metrics) > 0
    cursor = json.loads((dynamic.newest / "megagrpo.json").read_text())["state"]["cursor"]
    assert cursor == sum(line["dynamic_sample/groups_drawn"] for line in dynamic.metrics)
    code, said = world.audit(dynamic.folder, "--step", 2)
    assert code == 0, said


@pytest.mark.full
def test_a_resumed_run_in_another_layout_draws_the_same(dynamic, tmp_path):
    succeeded(world.train(tmp_path, seldom(), *DYNAMIC))
    codes = run_ranks(main, 2, ["train", *world.arguments(tmp_path, seldom(), *DYNAMIC, "run.max_steps=4", "--resume")])
    parts = world.Run(max(codes), "", "", tmp_path / "run")
    assert parts.code == 0
    for name in ("prompt_id", "completion", "reward"):
        assert [row[name] for row in parts.completions] == [row[name] for row in dynamic.completions]
    for found, expected in zip(told(parts), told(dynamic), strict=True):
        found["weight_version"] -= found["step"] > 2
        assert found.keys() == expected.keys()
        assert [found[name] for name in found] == pytest.approx([expected[name] for name in found], rel=2e-4, abs=2e-4)


@pytest.mark.full
def test_a_step_that_cannot_be_filled_says_so_and_trains_on_what_there_is(tmp_path):
    hard = f"rewards.functions=[{{function: {world.folder()}/rewards.py:never}}]"
    run = succeeded(
        world.train(
            tmp_path, hard, "algorithm.dynamic_sample=true", "algorithm.max_resample_times=1", "run.max_steps=1"
        )
    )
    assert "warning: step 1: 0 of 4 groups differ in reward after 1 rounds of dynamic sampling" in run.out
    assert (
        run.metrics[0]["dynamic_sample/groups_drawn"] == 8
        and len(run.completions) == 16
        and run.metrics[0]["grad_norm"] == 0
    )
    some = succeeded(
        world.train(
            tmp_path / "some",
            seldom(),
            *(
                "algorithm.dynamic_sample=true",
                "algorithm.max_resample_times=1",
                "algorithm.dynamic_sample_fallback=partial",
            ),
            *(
                "rollout.prompts_per_step=8",
                "run.max_steps=1",
                "rollout.num_generations=2",
                "algorithm.loss_type=dr_grpo",
            ),
            "debug.dump_steps=[1]",
        )
    )
    kept = int(some.metrics[0]["dynamic_sample/groups_kept"])
    assert 0 < kept < 8 and len(some.completions) == 2 * kept and some.metrics[0]["frac_reward_zero_std"] == 0
    dump = json.loads((some.folder / "dumps" / "step_000001" / "step.json").read_text())
    assert dump["updates"][0]["denominator"] == 2 * kept * 12  # the groups trained on, not the groups requested
    code, said = world.audit(some.folder, "--step", 1)
    assert code == 0, said


@pytest.mark.full
def test_a_curriculum_rests_what_is_always_or_never_passed_and_remembers_it(tmp_path):
    options = [
        "data.curriculum=[0.1,0.9]",
        "rollout.prompts_per_step=12",
        "data.train.size=12",
        "data.curriculum_pass_reward=0.5",
    ]
    options += ["rollout.num_generations=2", "train.learning_rate=1e-9"]
    whole = succeeded(world.train(tmp_path / "whole", *options, "run.max_steps=3"))
    first = {}
    for row in whole.completions[:24]:
        first.setdefault(row["prompt_id"], []).append(row["reward"] >= 0.5)
    mixed = {prompt for prompt, passed in first.items() if len(set(passed)) == 2}
    assert 0 < len(mixed) < 12 and {row["prompt_id"] for row in whole.completions[24:36]} <= mixed
    assert whole.metrics[0]["curriculum/resting"] == 12 - len(mixed)
    assert whole.metrics[0]["curriculum/pass_rate"] == pytest.approx(
        statistics.fmean(statistics.fmean(p) for p in first.values())
    )
    succeeded(world.train(tmp_path / "parts", *options, "run.max_steps=1"))
    parts = succeeded(world.train(tmp_path / "parts", *options, "run.max_steps=3", "--resume"))
    assert [row["prompt_id"] for row in parts.completions] == [row["prompt_id"] for row in whole.completions]
