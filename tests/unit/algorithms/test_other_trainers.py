"""What docs/coming_from_{verl,nemo_rl,openrlhf}.md say of formulas: each trainer's own formula, written down here,
beside ours. For a critic: numbers that other trainers' code has computed."""

import pytest
import torch

from megagrpo.algorithms.advantages import group_advantages
from megagrpo.algorithms.correction import correction_weights
from megagrpo.algorithms.gae import estimates, make_value_loss, mean_and_scale
from megagrpo.algorithms.kl import ESTIMATORS
from megagrpo.algorithms.policy_losses import Tokens, cispo, clipped, importance_ratio
from megagrpo.algorithms.sequences import Sequences
from megagrpo.config import AlgorithmSection
from megagrpo.data.packing.sample_packing import build_micro_batch
from megagrpo.train_types import LossInputs, TrainSample

LENGTHS = (5, 3, 8)


def batch(seed=0):
    """Log-probs (policy, old, engine) [T] float64 of three sequences, their borders and advantages [T] of both
    signs."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(LENGTHS)
    old = -2 * torch.rand(total, generator=generator, dtype=torch.float64)
    policy = (old + torch.randn(total, generator=generator, dtype=torch.float64)).requires_grad_()
    engine = old + 0.7 * torch.randn(total, generator=generator, dtype=torch.float64)
    sequences = Sequences.of(torch.tensor([0, 5, 8, 16]), torch.ones(total, dtype=torch.bool))
    advantages = sequences.spread(torch.tensor([1.3, -0.6, -0.9], dtype=torch.float64))
    return policy, old, engine, advantages, sequences


def tokens(level="token"):
    policy, old, _, advantages, sequences = batch()
    return Tokens(policy, old, importance_ratio(policy, old, sequences, level), advantages, sequences)


def same(ours, theirs, leaf):
    """Both values, and the gradients of their sums."""
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours.sum(), leaf)[0], torch.autograd.grad(theirs.sum(), leaf)[0])


def test_the_dual_clip_of_verl_nemo_rl_and_openrlhf_is_delta():
    for c in (1.5, 3.0):
        t = tokens()
        ratio = (t.logprobs - t.old_logprobs).exp()
        surrogate = torch.minimum(ratio * t.advantages, ratio.clamp(0.8, 1.2) * t.advantages)
        theirs = -torch.where(t.advantages < 0, torch.maximum(surrogate, c * t.advantages), surrogate)
        assert bool(((ratio > c) & (t.advantages < 0)).any())
        same(clipped(t, AlgorithmSection(delta=c)), theirs, t.logprobs)
    assert not torch.equal(clipped(t, AlgorithmSection()), clipped(t, AlgorithmSection(delta=3.0)))


def test_cispo_of_verl_and_nemo_rl_is_ours_where_the_ratio_is_above_their_lower_bound():
    t = tokens()
    theirs = -t.ratio.detach().clamp(0.8, 1.2) * t.advantages * t.logprobs
    ours = cispo(t, AlgorithmSection(loss_type="cispo", epsilon_high=1.2))
    above = t.ratio >= 0.8
    torch.testing.assert_close(ours[above], theirs[above])
    assert bool((ours[~above] != theirs[~above]).all()) and bool((~above).any())


def test_gspo_of_verl_is_sequence_token_and_that_of_openrlhf_sequence():
    policy, old, _, _, sequences = batch()
    mean = sequences.spread(sequences.means(policy - old))
    same(importance_ratio(policy, old, sequences, "sequence"), mean.exp(), policy)
    policy, old, _, _, sequences = batch()
    mean = sequences.spread(sequences.means(policy - old)).detach()
    same(importance_ratio(policy, old, sequences, "sequence_token"), (policy - policy.detach() + mean).exp(), policy)


def test_k3_of_verl_nemo_rl_and_openrlhf_is_low_var():
    log_ratio = torch.tensor(
        [-30.0, -15.0, -5.0, -2.0, -0.1, 0.0, 0.3, 4.0, 9.0, 25.0], dtype=torch.float64, requires_grad=True
    )
    ours = ESTIMATORS["low_var"](log_ratio, torch.zeros_like(log_ratio))
    bounded = (-log_ratio).clamp(-20, 20)
    same(ours, (bounded.exp() - bounded - 1).clamp(-10, 10), log_ratio)
    ours = ESTIMATORS["low_var"](log_ratio, torch.zeros_like(log_ratio))
    bounded = log_ratio.clamp(min=-10)
    same(ours, ((-bounded).exp() - 1 + bounded).clamp(-10, 10), log_ratio)
    assert bool((ESTIMATORS["k3"](log_ratio, torch.zeros_like(log_ratio)) > 10).any())


def test_bands_of_the_correction_cut_or_drop_as_the_rows_say():
    _, old, engine, _, sequences = batch()
    ratio = (old - engine).exp()
    inside = (ratio >= 0.5) & (ratio <= 1.5)
    assert bool(inside.any()) and bool((~inside).any())

    def ours(mode, low, high):
        return correction_weights(old, engine, sequences, mode, low, high)[0]

    torch.testing.assert_close(ours("token_truncate", None, 1.5), ratio.clamp(max=1.5))  # verl's token, NeMo-RL's tis
    torch.testing.assert_close(ours("token_truncate", 0.5, 1.5), ratio.clamp(0.5, 1.5))  # OpenRLHF's clip
    # two bounds, icepop, mask
    torch.testing.assert_close(ours("token_mask", 0.5, 1.5), torch.where(inside, ratio, 0.0))
    product = sequences.spread(sequences.sums(old - engine)).exp()
    torch.testing.assert_close(ours("sequence_truncate", None, 1.5), product.clamp(max=1.5))  # verl's sequence


def test_rloo_of_verl_and_openrlhf_is_ours_without_a_scale():
    rewards = torch.tensor([[1.0, 0.0, 0.5, 0.0], [0.2, 0.2, 0.9, 1.0]], dtype=torch.float64)
    others = (rewards.sum(1, keepdim=True) - rewards) / 3
    torch.testing.assert_close(group_advantages(rewards, "none", "rloo"), rewards - others)
    assert not torch.allclose(group_advantages(rewards, "group", "rloo"), rewards - others)


def test_the_default_advantage_of_nemo_rl_also_leaves_the_response_out_of_the_deviation():
    rewards = torch.tensor([[1.0, 0.0, 0.5, 0.25]], dtype=torch.float64)
    rest = torch.stack([torch.cat([rewards[0, :i], rewards[0, i + 1 :]]) for i in range(4)])
    theirs = (rewards[0] - rest.mean(1)) / (rest.std(1) + 1e-6)
    ours = group_advantages(rewards, "group", "rloo")[0]
    torch.testing.assert_close(ours * (rewards.std() + 1e-4), rewards[0] - rest.mean(1))
    assert not torch.allclose(ours, theirs, rtol=0.05)


def test_group_advantages_of_verl_and_openrlhf_differ_by_what_is_added_to_the_deviation():
    rewards = torch.tensor([[1.0, 0.0, 0.5, 0.25]], dtype=torch.float64)
    centred = rewards - rewards.mean()
    torch.testing.assert_close(group_advantages(rewards, "group"), centred / (rewards.std() + 1e-4))
    for epsilon in (1e-6, 1e-9):
        assert not torch.equal(group_advantages(rewards, "group"), centred / (rewards.std() + epsilon))


def test_reinforce_of_openrlhf_weighs_responses_by_their_tokens():
    rewards, lengths = torch.tensor([[1.0, 0.0, 0.5, 0.25]], dtype=torch.float64), torch.tensor([1, 9, 2, 4])
    per_token = rewards[0].repeat_interleave(lengths)
    theirs = (rewards[0] - per_token.mean()) / per_token.std(correction=0)
    ours = group_advantages(rewards, "group", "reinforce_plus_plus")[0]
    torch.testing.assert_close(ours, (rewards[0] - rewards.mean()) / (rewards.std() + 1e-4))
    assert not torch.allclose(ours, theirs, rtol=0.05)


# Of three programs on two responses, the first with two tokens of an environment in the middle, whose values are noise.
# GAE (gamma 0.97, lambda 0.9, and both 1) with its returns, and the value loss: `verl==0.9.1`,
# `core_algos.compute_gae_advantage_return` without its whitening and `compute_value_loss`. Whitening:
# `openrlhf==0.11.2`, end of `compute_advantages_and_returns`. The lambda of a length: AReaL's
# `vapo_length_adaptive_gae`, into verl's GAE. Each was run once on these numbers, in float64.
WRITTEN = [[1, 1, 0, 0, 1, 1], [1, 1, 1]]
VALUES = [[0.3, -0.2, 7.0, 9.0, 0.5, 0.1], [0.4, 0.25, -0.6]]
EARNED = [[-0.05, 0.1, 0, 0, 0.02, 1.0], [0, -0.1, 0.5]]
MOVED = [0.35, 0.4, 0.45, 0.9, 0.1, 0.26, -0.1]  # values after the step
VERL = {  # (gamma, lambda): advantages, returns
    (0.97, 0.9): (
        [0.4482143483, 1.1365571, 0.4027, 0.9, -0.1327941, 0.0283, 1.1],
        [0.7482143483, 0.9365571, 0.9027, 1.0, 0.2672059, 0.2783, 0.5],
    ),
    (1.0, 1.0): ([0.77, 1.32, 0.52, 0.9, 0.0, 0.15, 1.1], [1.07, 1.12, 1.02, 1.0, 0.4, 0.4, 0.5]),
}
ADAPTED = [-0.1325, 0.835, 0.07, 0.9, -0.3444444401, -0.5833333552, 1.1]  # alpha 0.5, gamma 1
WHITENED = [-0.2271011294, 1.2407698073, -0.324159156, 0.7363186583, -1.4660847798, -1.1225562878, 1.1628126529]
VALUE_LOSS, CLIPPED = 0.18349599012480103, 3 / 7
SLOPES = [-0.0568877640, 0, -0.0646714286, 0, -0.0238865571, -0.0026142857, 0]  # of the loss by each value


def of_peers(**critic):
    samples = [
        TrainSample(torch.arange(len(w) + 1), torch.tensor([0, *w]).bool(), torch.zeros(len(w) + 1), 0.0, i)
        for i, w in enumerate(WRITTEN)
    ]
    m = build_micro_batch(samples)
    rows = [torch.tensor([x for row in of for x in [*row, 50.0]]) for of in (EARNED, VALUES)]
    return m, estimates(m, *rows, AlgorithmSection(advantage_estimator="gae", critic=critic)), rows[1]


def test_gae_of_verl_passes_over_the_tokens_of_an_environment():
    for (gamma, factor), (advantages, returns) in VERL.items():
        m, found, _ = of_peers(gamma=gamma, gae_lambda=factor)
        torch.testing.assert_close(found.advantages[m.loss_mask], torch.tensor(advantages))
        torch.testing.assert_close(found.returns[m.loss_mask], torch.tensor(returns))
    m, found, _ = of_peers(length_adaptive_alpha=0.5)
    torch.testing.assert_close(found.advantages[m.loss_mask], torch.tensor(ADAPTED))


def test_advantages_are_scaled_as_by_openrlhf_and_rounding_stays_small():
    rows = torch.tensor(VERL[0.97, 0.9][0]).double()
    mean, scale = mean_and_scale(len(rows), rows.sum().item(), rows.square().sum().item())
    torch.testing.assert_close((rows - mean) / scale, torch.tensor(WHITENED).double(), rtol=1e-6, atol=1e-6)
    flat = 0.3 + 1e-7 * torch.tensor([1.0, -1, 1, -1]).double()
    mean, scale = mean_and_scale(4, flat.sum().item(), flat.square().sum().item())
    assert ((flat - mean) / scale).abs().max() == pytest.approx(1e-3, rel=1e-2)


def test_the_value_loss_of_verl_takes_the_larger_error():
    m, _, before = of_peers()
    terms = {name: torch.zeros(m.num_tokens) for name in ("values", "returns")}
    terms["values"][m.loss_mask], terms["returns"][m.loss_mask] = before[m.loss_mask], torch.tensor(VERL[0.97, 0.9][1])
    now = torch.zeros(m.num_tokens).masked_scatter(m.loss_mask, torch.tensor(MOVED)).requires_grad_()
    result = make_value_loss(0.2)(LossInputs(now, torch.zeros_like(now), m.with_terms(**terms)))
    loss = result.numerator / len(MOVED)
    torch.testing.assert_close(loss.item(), VALUE_LOSS)
    torch.testing.assert_close(torch.autograd.grad(loss, now)[0][m.loss_mask], torch.tensor(SLOPES))
    assert result.metrics["critic/clip_ratio"].value == pytest.approx(CLIPPED)
