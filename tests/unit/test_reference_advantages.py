"""Advantages equal what the reference systems' own code computed (tests/vectors)."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from megagrpo.algorithms.advantages import group_advantages, normalized_sum_advantages
from megagrpo.algorithms.correction import correction_weights
from megagrpo.algorithms.sequences import Sequences

VECTORS = Path(__file__).parents[1] / "vectors"
TRL = json.loads((VECTORS / "trl_advantage.json").read_text())["cases"]
SWIFT = json.loads((VECTORS / "swift_advantage.json").read_text())["cases"]
OUR_NAMES = {"reinforce_plus_plus": "reinforce_plus_plus_baseline"}  # ms-swift's centres on the group


def table(rows, generations):
    """[P, G, F], NaN where a function could not score."""
    filled = [[math.nan if value is None else value for value in row] for row in rows]
    return torch.tensor(filled, dtype=torch.float64).view(-1, generations, len(rows[0]))


def summed(rewards, weights):
    """Weighted sum over functions, NaN when none could score."""
    total = (rewards * torch.tensor(weights)).nansum(-1)
    return torch.where(rewards.isnan().all(-1), math.nan, total)


@pytest.mark.parametrize("case", TRL, ids=lambda c: c["name"])
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


def _comparable(case):
    """Ours differs by intent where ms-swift normalises each function with an epsilon of 1e-8 (gdpo; ours is TRL's 1e-4), puts the KL into
    the reward, or gives its reinforce_plus_plus a scale that makes it grpo."""
    scale = case.get("scale_rewards")
    return scale not in (None, "gdpo") and (case["advantage_estimator"] != "reinforce_plus_plus" or scale == "batch")


@pytest.mark.parametrize("case", [c for c in SWIFT if _comparable(c)], ids=lambda c: c["name"])
def test_ms_swift(case):
    rewards = summed(table(case["rewards_per_func"], case["num_generations"]), case["reward_weights"])
    estimator, scale = case["advantage_estimator"], case["scale_rewards"]
    found = group_advantages(rewards, scale, OUR_NAMES.get(estimator, estimator))
    torch.testing.assert_close(found.flatten(), torch.tensor(case["advantages"], dtype=torch.float64), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", [c for c in TRL if c["name"].startswith("vllm_is/")], ids=lambda c: c["name"])
def test_correction_weights_equal_trls(case):
    inputs = case["inputs"]
    lengths = [len(ids) for ids in inputs["completion_ids"]]
    old, sampled = (
        torch.cat([torch.tensor([float(x) for x in row[:n]], dtype=torch.float64) for row, n in zip(inputs[name], lengths, strict=True)])
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


def test_rloo_is_the_reward_minus_the_mean_of_the_others():
    rewards = torch.tensor([[1.0, 0.2, 0.5, math.nan], [3.0, 3.0, 3.0, 3.0]])
    found = group_advantages(rewards, "none", "rloo")
    expected = torch.tensor([[1 - 0.35, 0.2 - 0.75, 0.5 - 0.6, 0.0], [0.0] * 4], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_reinforce_plus_plus_compares_with_the_whole_batch():
    rewards = torch.tensor([[1.0, 1.0], [0.0, 0.5]])
    std = rewards.std().double()
    torch.testing.assert_close(
        group_advantages(rewards, "group", "reinforce_plus_plus"), (rewards.double() - 0.625) / (std + 1e-4), rtol=1e-6, atol=1e-6
    )
