"""Every option of a run has its documented effect on the run's files; the expected numbers are naive formulas."""

import math
import statistics

import pytest
import torch

from tests.e2e import world


@pytest.fixture(scope="module")
def plain():
    """Two steps with the default options."""
    return world.plain()


def succeeded(run):
    assert run.code == 0, run.err
    return run


def texts(run):
    return [row["completion"] for row in run.completions]


def largest_difference(one, other):
    """The largest difference between the newest checkpoints of two runs, relative to the largest weight of each
    tensor."""
    first, second = world.plain_tensors(one.newest), world.plain_tensors(other.newest)
    weights = [name for name in first if not name.startswith("optimizer") and first[name].is_floating_point()]
    assert len(weights) > 10
    return max(((first[name] - second[name]).abs().max() / first[name].abs().max()).item() for name in weights)


def test_a_run_learns(tmp_path):
    run = succeeded(world.train(tmp_path, "run.max_steps=12", "rollout.num_generations=8", "train.learning_rate=3e-3"))
    rewards = [line["reward"] for line in run.metrics]
    assert statistics.fmean(rewards[-3:]) > statistics.fmean(rewards[:3]) + 0.25


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8"])
def test_a_run_learns_in_fp8_which_vllm_does_not_compute_in(tmp_path, recipe):
    learning = ("run.max_steps=12", "rollout.num_generations=8", "train.learning_rate=3e-3")
    run = succeeded(world.train(tmp_path, *learning, f"model.fp8_recipe={recipe}", "model.bf16_layers=[-1]"))
    rewards = [line["reward"] for line in run.metrics]
    assert statistics.fmean(rewards[-3:]) > statistics.fmean(rewards[:3]) + 0.25
    assert 1 + 1e-5 < run.metrics[0]["token_mult_prob_error"] < 1.1 and all(
        line["train/skipped_steps"] == 0 for line in run.metrics
    )


@pytest.mark.full
def test_a_deterministic_run_is_the_same_run(plain, tmp_path):
    run = succeeded(world.train(tmp_path, "run.deterministic=true"))
    assert texts(run) == texts(plain) and largest_difference(run, plain) < 1e-5


@pytest.mark.full
def test_a_seed_repeats_itself_and_another_one_differs(plain, tmp_path):
    again, other = succeeded(world.train(tmp_path / "again")), succeeded(world.train(tmp_path / "other", "run.seed=7"))
    assert texts(again) == texts(plain) and largest_difference(again, plain) == 0
    assert not set(texts(other)) & set(texts(plain))
    assert [row["prompt_id"] for row in other.completions] != [row["prompt_id"] for row in plain.completions]


def test_weights_sent_straight_to_the_workers_make_the_same_run(plain, tmp_path):
    run = succeeded(
        world.train(tmp_path, "rollout.weight_sync_transport=p2p", "rollout.weight_sync_bucket_megabytes=0.1")
    )
    assert "weight sync: p2p (set by rollout.weight_sync_transport)" in run.out
    assert "weight sync: shared_memory (single host)" in plain.out
    assert texts(run) == texts(plain) and largest_difference(run, plain) == 0


@pytest.mark.parametrize(
    ("precision", "dtype", "limit"),
    [("bf16", "bfloat16", 1.02), pytest.param("fp16", "float16", 1.003, marks=pytest.mark.full)],
)
def test_a_run_in_16_bits_keeps_float32_masters_and_stays_near_its_engine(precision, dtype, limit, plain, tmp_path):
    run = succeeded(world.train(tmp_path, f"model.precision={precision}"))
    assert f"in {dtype} on" in run.out and "in float32 on" in plain.out
    assert all(1.00001 < line["token_mult_prob_error"] < limit for line in run.metrics)
    assert all(line["token_mult_prob_error"] < 1.0001 for line in plain.metrics)
    tensors = world.plain_tensors(run.newest).items()
    kept = {tensor.dtype for name, tensor in tensors if name.startswith("optimizer") and tensor.numel() > 100}
    assert kept == {torch.float32}


@pytest.mark.full
def test_without_shuffling_prompts_come_in_the_order_of_the_data_set(tmp_path):
    run = succeeded(
        world.train(tmp_path, "data.shuffle=false", "rollout.prompts_per_step=20", "rollout.num_generations=2")
    )
    drawn = [row["prompt_id"] for row in run.completions][::2]
    assert drawn == [position % 24 for position in range(40)]  # the second epoch begins within the second step


@pytest.mark.full
def test_the_second_iteration_on_a_batch_clips(plain, tmp_path):
    narrow = ["algorithm.epsilon=1e-4", "run.max_steps=1"]
    one = succeeded(world.train(tmp_path / "one", *narrow))
    two = succeeded(world.train(tmp_path / "two", *narrow, "algorithm.num_iterations=2"))
    assert texts(one) == texts(two)
    assert one.metrics[0]["clip_ratio/region_mean"] == 0 and two.metrics[0]["clip_ratio/region_mean"] > 0.2
    assert one.metrics[0]["time/logprobs"] < two.metrics[0]["time/logprobs"]
    assert largest_difference(one, two) > 0


@pytest.mark.full
@pytest.mark.parametrize("estimator", ["k3", "full_reverse"])
def test_the_kl_to_the_reference_is_zero_until_the_policy_moves(estimator, plain, tmp_path):
    run = succeeded(
        world.train(tmp_path, "algorithm.beta=0.5", f"algorithm.kl_estimator={estimator}", "run.max_steps=3")
    )
    first, second, third = (line["kl"] for line in run.metrics)
    assert abs(first) < 1e-6 < second < third
    assert "kl" not in plain.metrics[0] and "  kl " in run.out and "  kl " not in plain.out


@pytest.mark.full
def test_evaluation_comes_first_last_and_every_so_many_steps(tmp_path):
    held_out = [f"data.eval.source={world.folder()}/eval.jsonl", "evaluation.steps=2", "run.max_steps=3"]
    run = succeeded(world.train(tmp_path, *held_out, "evaluation.temperature=1", "evaluation.num_generations=2"))
    evaluations = [line for line in run.lines if "eval/reward" in line]
    assert [line["step"] for line in evaluations] == [0, 2, 3]
    assert {row["step"] for row in run.completions} == {1, 2, 3}  # rows of training only


@pytest.mark.full
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_are_scaled_as_asked(scale, tmp_path):
    run = succeeded(world.train(tmp_path, f"algorithm.scale_rewards={scale}", "run.max_steps=1"))
    rewards = [row["reward"] for row in run.completions]
    groups = [rewards[i : i + 4] for i in range(0, len(rewards), 4)]
    deviation = {
        "group": statistics.stdev,
        "batch": lambda group: statistics.stdev(rewards),
        "none": lambda group: 1 - 1e-4,
    }[scale]
    expected = [(r - statistics.fmean(group)) / (deviation(group) + 1e-4) for group in groups for r in group]
    assert [row["advantage"] for row in run.completions] == pytest.approx(expected)


@pytest.mark.full
def test_leaving_out_samples_without_advantage_changes_no_weight(tmp_path):
    seldom = f"rewards.functions=[{{function: {world.folder()}/rewards.py:seldom}}]"
    runs = [
        succeeded(world.train(tmp_path / skip, seldom, f"algorithm.skip_zero_advantage={skip}"))
        for skip in ("true", "false")
    ]
    assert texts(runs[0]) == texts(runs[1]) and 0 < runs[0].metrics[0]["frac_reward_zero_std"] < 1
    assert largest_difference(*runs) < 1e-5
    assert runs[0].metrics[0]["loss"] == pytest.approx(runs[1].metrics[0]["loss"], abs=1e-6)


@pytest.mark.full
@pytest.mark.parametrize(
    "option", ["model.recompute=full", "train.max_tokens_per_micro_batch=60", "train.distributed_optimizer=false"]
)
def test_what_saves_memory_changes_no_weight(option, plain, tmp_path):
    run = succeeded(world.train(tmp_path, option))
    assert texts(run) == texts(plain)
    assert largest_difference(run, plain) < 1e-4


@pytest.mark.full
@pytest.mark.parametrize(
    "more", [["run.save_steps=1", "run.async_save=true"], ["lora.rank=2", "rollout.weight_sync_transport=p2p"]]
)
def test_a_policy_that_leaves_its_device_while_servers_generate_makes_the_same_run(more, tmp_path):
    stays, leaves = (
        succeeded(world.train(tmp_path / on, *more, f"train.offload={on}", "algorithm.beta=0.1"))
        for on in ("false", "true")
    )
    assert texts(leaves) == texts(stays) and largest_difference(leaves, stays) == 0
    assert [line["grad_norm"] for line in leaves.metrics] == [line["grad_norm"] for line in stays.metrics]


@pytest.mark.full
@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_the_learning_rate_follows_its_schedule(shape, tmp_path):
    steps, warmup, peak, end = 5, 2, 1e-3, 1e-4
    schedule = [f"train.lr_scheduler_type={shape}", f"train.warmup_steps={warmup}", f"train.min_learning_rate={end}"]
    run = succeeded(world.train(tmp_path, *schedule, f"run.max_steps={steps}", "rollout.prompts_per_step=1"))
    expected = []
    for step in range(1, steps + 1):
        done = (step - warmup) / (steps + 1 - warmup)
        fraction = {"linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[shape]
        expected.append(peak * step / warmup if step <= warmup else end + (peak - end) * fraction)
    assert [line["learning_rate"] for line in run.metrics] == pytest.approx(expected)


@pytest.mark.full
def test_loggers_and_samples_can_be_turned_off_and_on(plain, tmp_path):
    assert not (plain.folder / "tensorboard").exists() and not (plain.folder / "wandb").exists()
    assert "response" not in plain.out
    pytest.importorskip("wandb")
    run = succeeded(
        world.train(tmp_path, "run.trackers=[wandb]", "run.wandb.mode=offline", "run.log_completions_steps=1")
    )
    assert len(list((run.folder / "wandb").glob("offline-run-*/*.wandb"))) == 1
    assert run.out.count("    prompt    ") == 2 and [line["reward"] for line in run.metrics] == [
        line["reward"] for line in plain.metrics
    ]


def test_a_mismatch_above_the_threshold_is_said_and_counted(plain, tmp_path):
    """At a threshold of 1 the rounding of the two systems masks tokens; the default allows it."""
    run = succeeded(world.train(tmp_path, "rollout.mismatch_threshold=1"))
    warnings = [line for line in run.out.splitlines() if "above rollout.mismatch_threshold 1:" in line]
    errors = [line["token_mult_prob_error"] for line in run.metrics]
    for step, (error, line) in enumerate(zip(errors, warnings, strict=True), 1):
        assert line.startswith(f"warning: step {step}: token_mult_prob_error {error:.6g} is above")
    assert [line["mismatch/alarms"] for line in run.metrics] == [1, 2] and min(errors) > 1
    assert [line["mismatch/alarms"] for line in plain.metrics] == [0, 0] and "mismatch" not in plain.out
    assert texts(run) == texts(plain)


def test_temperature_belongs_to_both_sides(tmp_path):
    run = succeeded(world.train(tmp_path, "rollout.temperature=0.5"))
    assert all(line["token_mult_prob_error"] == pytest.approx(1, abs=1e-3) for line in run.metrics)
    assert torch.tensor([line["entropy"] for line in run.metrics]).lt(5).all()  # near log(258) = 5.55 at temperature 1
