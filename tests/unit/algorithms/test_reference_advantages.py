"""Advantages equal the results of the reference systems' own code (tests/vectors)."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from megagrpo.algorithms.advantages import group_advantages, normalized_sum_advantages, reward_statistics
from megagrpo.algorithms.correction import correction_metrics, correction_weights
from megagrpo.algorithms.losses import mismatch_metrics
from megagrpo.algorithms.sequences import Sequences
from tests.unit.for_each import for_each

VECTORS = Path(__file__).parents[2] / "vectors"
TRL = json.loads((VECTORS / "trl_advantage.json").read_text())["cases"]
SWIFT = json.loads((VECTORS / "swift_advantage.json").read_text())["cases"]


def table(rows, generations):
    """[P, G, F], NaN where a function returned no score."""
    filled = [[math.nan if value is None else value for value in row] for row in rows]
    return torch.tensor(filled, dtype=torch.float64).view(-1, generations, len(rows[0]))


def summed(rewards, weights):
    """Weighted sum over functions, NaN when no function returned a score."""
    total = (rewards * torch.tensor(weights)).nansum(-1)
    return torch.where(rewards.isnan().all(-1), math.nan, total)


# Our metric is the share of groups without any advantage. TRL's does not count a group with one scored response, and
# covers the batch where TRL divides by the batch.
FRACTION_DIFFERS = ["one_scorable_in_group/group"]


@for_each("case", TRL)
def test_trl(case):
    inputs = case["inputs"]
    rewards = table(inputs["rewards_per_func"], inputs["num_generations"])
    weights = inputs["reward_weights"] or [1.0] * rewards.shape[-1]
    if inputs["multi_objective_aggregation"] == "normalize_then_sum":
        found = normalized_sum_advantages(rewards, torch.tensor(weights))
    else:
        found = group_advantages(summed(rewards, weights), inputs["scale_rewards"])
    expected = torch.tensor(case["advantages"], dtype=torch.float64)
    torch.testing.assert_close(found.flatten(), expected, rtol=1e-5, atol=1e-6)
    statistics, metrics = reward_statistics(summed(rewards, weights)), case["metrics"]
    assert statistics["reward"] == pytest.approx(metrics["reward"])
    assert statistics["reward_std_batch"] == pytest.approx(metrics["reward_std"])
    counted = statistics["frac_reward_zero_std"] == pytest.approx(metrics["frac_reward_zero_std"])
    assert counted == (case["name"] not in FRACTION_DIFFERS)


# Cases that ours computes differently, with the reason; docs/losses.md documents them. Each of these cases must differ.
SWIFT_DIFFERS = {
    "R1/grpo/gdpo": "it adds 1e-8 to the standard deviations of gdpo, ours is TRL's 1e-4",
    "R1/rloo/gdpo": "the same; and ours refuses rloo with gdpo, which overrides it there",
    "R2/grpo/kl_in_reward": "a response that no function could score counts as 0 there, and ours leaves it out as TRL "
    "does",
    "R2/reinforce_plus_plus/kl_in_reward": "the same",
}


@for_each("case", SWIFT)
def test_ms_swift(case):
    rewards = summed(table(case["rewards_per_func"], case["num_generations"]), case["reward_weights"])
    expected = torch.tensor(case["advantages"], dtype=torch.float64)
    found = _of_ms_swift(case, rewards)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6) == (case["name"] not in SWIFT_DIFFERS)
    torch.testing.assert_close(_of_ms_swift(case, rewards.nan_to_num(nan=0.0)), expected, rtol=1e-3, atol=1e-6)


def _of_ms_swift(case, rewards):
    """Our advantages [N] with the equivalent configuration."""
    estimator, scale = case["advantage_estimator"], case.get("scale_rewards")
    if kl := case.get("kl_values"):
        rewards = rewards - case["beta"] * torch.tensor(kl, dtype=torch.float64).view_as(rewards)
        scale = {"grpo": "group", "reinforce_plus_plus": "batch"}[estimator]
    if scale == "gdpo":
        of_functions = table(case["rewards_per_func"], case["num_generations"])
        return normalized_sum_advantages(of_functions, torch.tensor(case["reward_weights"])).flatten()
    # it subtracts the group mean; with another scale than the batch it equals grpo
    if estimator == "reinforce_plus_plus":
        estimator = "reinforce_plus_plus_baseline" if scale == "batch" else "grpo"
    return group_advantages(rewards, scale, estimator).flatten()


@pytest.mark.parametrize("case", [c for c in TRL if c["name"].startswith("vllm_is/")], ids=lambda c: c["name"])
def test_correction_weights_equal_trls(case):
    inputs = case["inputs"]
    lengths = [len(ids) for ids in inputs["completion_ids"]]
    old, sampled = (
        torch.cat(
            [
                torch.tensor([float(x) for x in row[:n]], dtype=torch.float64)
                for row, n in zip(inputs[name], lengths, strict=True)
            ]
        )
        for name in ("old_per_token_logps", "sampling_per_token_logps")
    )
    ends = [ids[-1] in (inputs["eos_token_id"], inputs["pad_token_id"]) for ids in inputs["completion_ids"]]
    kept = [ended or not inputs["mask_truncated_completions"] for ended in ends]
    mask = torch.cat([torch.full((n,), keep) for n, keep in zip(lengths, kept, strict=True)])
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    sequences = Sequences.of(cu_seqlens, mask)
    weights, _ = correction_weights(
        old, sampled, sequences, inputs["vllm_importance_sampling_mode"], inputs["clip_min"], inputs["clip_max"]
    )
    expected = torch.tensor(case["importance_sampling_ratio"], dtype=torch.float64)
    for row, (start, stop), keep in zip(expected, itertools.pairwise(cu_seqlens), kept, strict=True):
        if keep:
            theirs = row.expand(stop - start) if row.numel() == 1 else row[: stop - start]
            torch.testing.assert_close(weights[start:stop], theirs, rtol=1e-5, atol=1e-6)
    difference = mismatch_metrics(old, sampled.nan_to_num(nan=0.0), mask & ~sampled.isnan())
    found = difference | correction_metrics(weights, sequences, inputs["vllm_importance_sampling_mode"])
    for name, expected in case["metrics"].items():
        if name.startswith("sampling/"):
            assert found[name].value.item() == pytest.approx(expected, rel=1e-6), name


def test_rloo_is_the_reward_minus_the_mean_of_the_others():
    rewards = torch.tensor([[1.0, 0.2, 0.5, math.nan], [3.0, 3.0, 3.0, 3.0]])
    found = group_advantages(rewards, "none", "rloo")
    expected = torch.tensor([[1 - 0.35, 0.2 - 0.75, 0.5 - 0.6, 0.0], [0.0] * 4], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_reinforce_plus_plus_compares_with_the_whole_batch():
    rewards = torch.tensor([[1.0, 1.0], [0.0, 0.5]])
    std = rewards.std().double()
    torch.testing.assert_close(
        group_advantages(rewards, "group", "reinforce_plus_plus"),
        (rewards.double() - 0.625) / (std + 1e-4),
        rtol=1e-6,
        atol=1e-6,
    )
