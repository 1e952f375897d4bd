"""Every option of the algorithm has an effect, and contradicting options are refused by name."""

from pathlib import Path
from typing import get_args

import pytest
import torch

from megagrpo.algorithms.advantages import group_advantages
from megagrpo.algorithms.correction import correction_weights
from megagrpo.algorithms.entropy import adapt_bonus, bonus_coefficient
from megagrpo.algorithms.losses import make_loss
from megagrpo.algorithms.reductions import denominator
from megagrpo.algorithms.sequences import Sequences
from megagrpo.config import AlgorithmSection, RunConfig
from megagrpo.config.rules.algorithm_rules import advantage_problems, loss_problems
from megagrpo.data.packing.sample_packing import PackingRules, pack
from megagrpo.proof.verify.shrink import random_samples
from megagrpo.train_types import LossInputs, TrainState
from tests.unit.for_each import for_each

REFUSED = {
    "algorithm.delta: 2 has no effect with loss_type sapo": dict(loss_type="sapo", delta=2.0),
    "algorithm.epsilon_high: loss_type cispo needs it as largest weight": dict(loss_type="cispo"),
    "algorithm.importance_sampling_level: sequence is not supported: loss_type gmpo has its own": dict(
        loss_type="gmpo", importance_sampling_level="sequence"
    ),
    "algorithm.importance_sampling_level: sequence_token is not supported: loss_type vespo has its own": dict(
        loss_type="vespo", importance_sampling_level="sequence_token"
    ),
    "algorithm.entropy_coef_min: 2.0 is above": dict(use_adaptive_entropy=True, entropy_coef_min=2.0),
    "algorithm.importance_correction: sequence_mask counts token weights twice": dict(
        loss_type="vespo", importance_correction="sequence_mask"
    ),
    "algorithm.importance_correction: token_mask needs": dict(
        importance_correction="token_mask", importance_correction_max=None
    ),
    "algorithm.importance_correction_min: 3.0 is not below": dict(
        importance_correction="token_mask", importance_correction_min=3.0
    ),
    "algorithm.scale_rewards: group, but advantage_estimator reinforce_plus_plus divides": dict(
        advantage_estimator="reinforce_plus_plus"
    ),
    "algorithm.scale_rewards: group, but advantage_estimator reinforce_plus_plus_baseline divides": dict(
        advantage_estimator="reinforce_plus_plus_baseline"
    ),
    "algorithm.multi_objective_aggregation: normalize_then_sum normalizes": dict(
        multi_objective_aggregation="normalize_then_sum", scale_rewards="batch"
    ),
}


@for_each("beginning", REFUSED)
def test_options_that_contradict_each_other_are_refused(beginning):
    section = AlgorithmSection(**REFUSED[beginning])
    (problem,) = [*loss_problems(section), *advantage_problems(section)]
    assert str(problem).startswith(beginning)


def of_the_loss(**algorithm):
    """(loss, gradient [T]) of a batch for which the policy differs a lot from the one that sampled."""
    base = {
        "model": {"path": "x"},
        "data": {"train": {"source": "x"}},
        "rewards": {"functions": [{"function": "exact_number"}]},
    }
    config = RunConfig.model_validate(base | {"algorithm": algorithm})
    batch = pack(random_samples(), PackingRules(max_tokens=1000))
    (rows,) = batch.micro_batches
    place = torch.arange(rows.num_tokens)
    old = rows.rollout_logprobs + 0.2 * torch.cos(3.0 * place)
    policy = (old + 1.5 * torch.sin(1.0 * place) - 0.3).requires_grad_()
    entropy = 1 + torch.sin(2.0 * place)
    rows = rows.with_terms(old_logprobs=old, ref_logprobs=old - 0.3 if config.algorithm.beta else None)
    divisor = denominator(batch, config.algorithm.loss.average, config.rollout.max_completion_length)
    loss = make_loss(config.algorithm)(LossInputs(policy, entropy, rows)).numerator / divisor
    return loss.item(), torch.autograd.grad(loss, policy)[0]


# Each option with the settings that it requires, and another value.
CHANGED = {
    "loss_type": ({}, "grpo"),
    "beta": ({}, 0.1),
    "kl_estimator": (dict(beta=0.1), "k2"),
    "use_bias_correction_kl": (dict(beta=0.1), True),
    "epsilon": ({}, 0.1),
    "epsilon_high": ({}, 0.4),
    "delta": ({}, 1.5),
    "importance_sampling_level": ({}, "sequence"),
    "sapo_temperature_pos": (dict(loss_type="sapo"), 2.0),
    "sapo_temperature_neg": (dict(loss_type="sapo"), 2.0),
    "vespo_k_pos": (dict(loss_type="vespo"), 1.0),
    "vespo_lambda_pos": (dict(loss_type="vespo"), 1.0),
    "vespo_k_neg": (dict(loss_type="vespo"), 1.0),
    "vespo_lambda_neg": (dict(loss_type="vespo"), 1.0),
    "fipo_decay_rate": (dict(loss_type="fipo"), 1.0),
    "fipo_clip_range": (dict(loss_type="fipo"), 0.5),
    "fipo_clip_high_only": (dict(loss_type="fipo"), False),
    "fipo_safety_threshold": (dict(loss_type="fipo"), 1.5),
    "off_policy_mask_threshold": ({}, 0.0),
    "importance_correction": ({}, "token_truncate"),
    "importance_correction_min": (dict(importance_correction="token_mask"), 0.9),
    "importance_correction_max": (dict(importance_correction="token_mask"), 1.1),
}


@for_each("option", CHANGED)
def test_an_option_of_the_loss_changes_it(option):
    needed, other = CHANGED[option]
    (loss, gradient), (changed, another) = of_the_loss(**needed), of_the_loss(**needed | {option: other})
    assert loss != changed and (gradient - another).abs().max() > 1e-4 * gradient.abs().max()


def test_every_correction_is_another():
    modes = [*get_args(AlgorithmSection.model_fields["importance_correction"].annotation)]
    sequences = Sequences.of(torch.tensor([0, 2, 4]), torch.ones(4, dtype=torch.bool))
    log_ratios = torch.tensor([0.3, -0.1, 0.02, 0.03])
    found = [
        correction_weights(log_ratios, torch.zeros(4), sequences, mode, 0.9, 1.1)[0] for mode in modes if mode != "off"
    ]
    assert len({tuple(weights.tolist()) for weights in [*found, torch.ones(4)]}) == len(modes) == 8


def test_every_estimator_and_scale_is_another():
    rewards = torch.tensor([[1.0, 0.2, 0.5], [3.0, 2.0, 0.0]])
    pairs = [(scale, estimator) for estimator in ("grpo", "rloo") for scale in ("group", "batch", "none")]
    pairs += [("batch", "reinforce_plus_plus"), ("batch", "reinforce_plus_plus_baseline")]
    assert len({tuple(group_advantages(rewards, *pair).flatten().round(decimals=6).tolist()) for pair in pairs}) == len(
        pairs
    )


ADAPTIVE = {"entropy_target": 0.05, "entropy_coef_delta": 0.1, "entropy_coef_min": 0.304, "entropy_coef_max": 0.2}


@pytest.mark.parametrize("option", ADAPTIVE)
def test_an_option_of_the_adaptive_bonus_changes_its_weight(option):
    def weights(**changed):
        algorithm, state, found = (
            AlgorithmSection(**dict(use_adaptive_entropy=True, entropy_coef=0.3) | changed),
            TrainState(),
            [],
        )
        for entropy in (0.1, 0.1, 0.5, 0.5, 0.1):
            adapt_bonus(state, {"entropy": entropy}, algorithm)
            found.append((state.entropy_coef, bonus_coefficient(state, algorithm)))
        return found

    assert weights(**{option: ADAPTIVE[option]}) != weights()


# The tests of the other options.
ELSEWHERE = {
    "top_entropy_quantile": "unit/algorithms/test_entropy.py",
    "entropy_coef": "unit/algorithms/test_entropy.py",
    "use_adaptive_entropy": "e2e/test_adaptive_entropy.py",
    "loss_args": "unit/algorithms/test_reference_losses.py",
    "loss_average": "unit/algorithms/test_custom_loss.py",
    "router_aux_loss_coef": "distributed/test_router_balance.py",
    "moe_router_bias_update_rate": "distributed/test_router_bias.py",
    "num_iterations": "e2e/test_options.py",
    "multi_objective_aggregation": "unit/algorithms/test_reference_advantages.py",
    "advantage_by": "unit/algorithms/test_turn_advantages.py",
    "token_advantage_weight": "unit/algorithms/test_token_advantages.py",
    "turn_advantage_weight": "unit/algorithms/test_turn_advantages.py",
    "turn_discount": "unit/algorithms/test_turn_advantages.py",
    "advantage_estimator": "unit/algorithms/test_reference_advantages.py",
    "scale_rewards": "e2e/test_options.py",
    "skip_zero_advantage": "unit/config/test_config.py",
    "mask_truncated_completions": "unit/algorithms/test_truncated_completions.py",
    "kl_in_reward": "unit/algorithms/test_kl_in_reward.py",
    "sync_ref_model": "e2e/test_reference_options.py",
    "ref_model_mixup_alpha": "e2e/test_reference_options.py",
    "ref_model_sync_steps": "e2e/test_reference_options.py",
    "critic": "distributed/test_critic.py",
    "teacher": "distributed/test_dump_losses.py",
    "steps_per_generation": "e2e/test_reference_options.py",
    "loss_share_of_tasks": "e2e/test_tasks.py",
    "dynamic_sample": "e2e/test_sampling.py",
    "max_resample_times": "e2e/test_sampling.py",
    "dynamic_sample_fallback": "e2e/test_sampling.py",
}


def test_no_option_is_left_without_a_test():
    assert {*CHANGED, *ADAPTIVE, *ELSEWHERE} == set(AlgorithmSection.model_fields)
    for option, file in ELSEWHERE.items():
        assert option in (Path(__file__).parents[2] / file).read_text(), option
