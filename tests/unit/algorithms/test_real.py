"""REAL's terms of a step, computed for all groups at once, against the loop over groups and micro-batches."""

import pytest
import torch

from megagrpo.algorithms.real_loss import RealTerms, group_terms, sample_sums, sums_by_sample
from megagrpo.data.packing.sample_packing import PackingRules, pack
from megagrpo.proof.verify.shrink import GROUP_SIZE, random_samples
from tests.unit.for_each import for_each


def naive_group_terms(scores, advantages, groups):
    """One group after the other, each side by torch's own logsumexp and softmax."""
    losses, slopes = scores.new_zeros(int(groups.max()) + 1), torch.zeros_like(scores)
    for group in range(losses.numel()):
        positive, negative = (groups == group) & (advantages > 0), (groups == group) & (advantages <= 0)
        if not (positive.any() and negative.any()):
            continue
        for side, sign in ((negative, 1.0), (positive, -1.0)):
            exponents = torch.cat([scores.new_zeros(1), sign * scores[side]])
            losses[group] += exponents.logsumexp(0)
            slopes[side] = sign * exponents.softmax(0)[1:]
    return losses, slopes


@for_each("seed", range(20))
@for_each("scale", [0.1, 30.0, 1000.0])  # exp(1000) is no float64
def test_the_terms_of_all_groups_are_those_of_one_group_after_the_other(seed, scale):
    torch.manual_seed(seed)
    groups = torch.randint(0, 12, (80,)).unique(return_inverse=True)[1]
    scores = scale * torch.randn(80, dtype=torch.float64)
    advantages = torch.randint(-1, 2, (80,)) * torch.where(groups % 5 == 0, 0.0, 1.0).double()
    for found, expected in zip(
        group_terms(scores, advantages, groups), naive_group_terms(scores, advantages, groups), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def moved(micro_batch):
    return micro_batch.rollout_logprobs + 0.3 * torch.sin(40 * micro_batch.rollout_logprobs)


def sums_of(batches, members):
    """`sums_by_sample` of each rank."""
    of_ranks = [[m.with_terms(old_logprobs=m.rollout_logprobs) for m in batch.micro_batches] for batch in batches]
    return [sums_by_sample([sample_sums(m, moved(m)) for m in of_rank], members) for of_rank in of_ranks]


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_sums_of_samples_add_up_over_ranks_to_the_same_bits(share, ranks):
    samples = random_samples()
    rules = PackingRules(max_tokens=96, share_prompts=share, mask_truncated=True, skip_zero_advantage=True)
    batches = [pack(samples, rules, rank, ranks) for rank in range(ranks)]
    members = batches[0].samples
    (whole,) = sums_of([pack(samples, PackingRules(max_tokens=10_000, mask_truncated=True))], members)
    total = sum(sums_of(batches, members))
    used = torch.tensor([s.advantage != 0 and not s.truncated for s in samples])
    assert torch.equal(total[used], whole[used]) and not total[~used].any() and used.any() and not used.all()
    assert total.nbytes == 16 * len(members), "an all-reduce moves four times as many"
    assert total[used, 0].tolist() == [
        int(s.response_mask.sum()) * (1 if s.advantage > 0 else -1) for s in samples if s.advantage and not s.truncated
    ]


def test_the_rows_of_a_micro_batch_are_the_terms_of_its_samples_and_zero_elsewhere():
    batch = pack(random_samples(), PackingRules(max_tokens=96, align=8, share_prompts=True))
    (sums,) = sums_of([batch], batch.samples)
    terms = RealTerms.of(batch.samples, sums, GROUP_SIZE, 0.5)
    assert terms.slopes.any()
    for micro_batch in batch.micro_batches:
        slopes, values = terms.rows(micro_batch, 2.0)
        for token in range(micro_batch.num_tokens):
            sample = int(micro_batch.samples[micro_batch.sequence_index[token]])
            counts = bool(micro_batch.loss_mask[token])
            assert slopes[token] == (2 * terms.slopes[sample]).float() * counts
            assert values[token] == (2 * terms.values[sample]).float() * counts


def test_a_step_without_samples_has_no_terms():
    (micro_batch,) = pack([], PackingRules(max_tokens=8)).micro_batches
    slopes, values = RealTerms.of((), sums_by_sample([], ()), GROUP_SIZE, 0.5).rows(micro_batch, 1.0)
    assert not slopes.any() and not values.any()
