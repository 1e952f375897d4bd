"""Slices of context-parallel ranks: every token on one rank, equal attention work on each, and a gather in pack
order."""

import random
from itertools import pairwise

import pytest
import torch

from megagrpo.data.packing.sample_packing import PackingRules, build_micro_batch
from megagrpo.platform.parallel.context import gathered_indices, rank_indices
from megagrpo.train_types import TrainSample
from tests.unit.for_each import for_each


def borders(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def random_borders(seed: int, cp_size: int) -> torch.Tensor:
    draw = random.Random(seed)
    return borders([2 * cp_size * draw.randint(0, 9) for _ in range(draw.randint(1, 12))])


def test_a_rank_holds_its_two_chunks_of_every_sequence():
    cu_seqlens = borders([8, 4])
    assert rank_indices(cu_seqlens, 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert rank_indices(cu_seqlens, 2, 1).tolist() == [2, 3, 4, 5, 9, 10]
    assert rank_indices(cu_seqlens, 1, 0).tolist() == list(range(12))


@for_each("cp_size", [1, 2, 3, 4, 8])
@for_each("seed", range(5))
def test_every_token_is_on_one_rank_and_every_rank_has_as_many(seed, cp_size):
    cu_seqlens = random_borders(seed, cp_size)
    slices = [rank_indices(cu_seqlens, cp_size, rank) for rank in range(cp_size)]
    assert len({s.numel() for s in slices}) == 1
    assert torch.equal(torch.cat(slices).sort().values, torch.arange(int(cu_seqlens[-1])))
    for s in slices:  # a sequence stays together, and its tokens in order
        assert torch.equal(s, s.sort().values)
    pack = torch.randn(int(cu_seqlens[-1]))
    gathered = torch.cat([pack[s] for s in slices])
    assert torch.equal(gathered[gathered_indices(cu_seqlens, cp_size)], pack)


@pytest.mark.parametrize("cp_size", [2, 4, 8])
def test_causal_attention_costs_every_rank_the_same_whatever_the_lengths(cp_size):
    lengths = [2 * cp_size * n for n in (1, 40, 3, 17)]
    seen = torch.cat([torch.arange(1, n + 1) for n in lengths])  # keys that each token of the pack attends to
    work = torch.stack([seen[rank_indices(borders(lengths), cp_size, rank)].sum() for rank in range(cp_size)]).float()
    assert work.max() == work.min()
    # Cut in order instead, the last rank would have nearly twice the mean.
    in_order = torch.arange(lengths[1]).chunk(cp_size)
    assert (in_order[-1] + 1).sum() > 1.4 * sum((part + 1).sum() for part in in_order) / cp_size


def test_a_sequence_that_cannot_be_cut_is_caught():
    with pytest.raises(AssertionError, match=r"sequences of \[8, 6\] tokens cannot be cut into 4 chunks"):
        rank_indices(borders([8, 6]), 2, 0)


def samples(seed: int) -> list[TrainSample]:
    """Groups with one prompt each."""
    draw = random.Random(seed)
    made = []
    for i in range(6):
        prompt = torch.arange(1000 * i + 1, 1000 * i + 1 + draw.randint(1, 20))
        for j in range(draw.randint(1, 3)):
            ids = torch.cat(
                [prompt, torch.arange(1000 * i + 100 * j + 100, 1000 * i + 100 * j + 100 + draw.randint(1, 15))]
            )
            mask = torch.arange(ids.numel()) >= prompt.numel()
            made.append(TrainSample(ids, mask, torch.where(mask, -ids / 1e4, 0.0), advantage=1.0 + i))
    return made


@for_each("share", [False, True])
@for_each("align", [4, 24])
@for_each("seed", range(4))
def test_sequences_are_padded_at_their_ends_and_no_loss_token_is_lost(seed, align, share):
    plain = build_micro_batch(samples(seed))
    rules = PackingRules(max_tokens=10_000, align=align, sequence_align=4, share_prompts=share)
    aligned = build_micro_batch(samples(seed), rules)
    assert not (aligned.cu_seqlens.diff() % 4).any() and aligned.num_tokens % align == 0
    for row in ("labels", "position_ids", "advantages", "rollout_logprobs"):
        assert torch.equal(getattr(aligned, row)[aligned.loss_mask], getattr(plain, row)[plain.loss_mask]), row
    for i, (start, stop) in enumerate(pairwise(aligned.cu_seqlens.tolist())):
        real = aligned.token_ids[start:stop] > 0
        assert torch.equal(real, real.sort(descending=True).values)  # padding, id 0 here, comes last
        assert not (aligned.loss_mask[start:stop] & ~real).any()
        if aligned.prefixes is not None and i in aligned.prefixes:
            assert real.all()  # tokens that continue it would see its padding
